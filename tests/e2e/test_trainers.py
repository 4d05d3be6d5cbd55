# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer and Accelerate, and Lightning's Trainer: as under stock ZeRO-3, also after
a resume.

Twenty steps each in FP32, unquantized, on four ranks. Imports in every order.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, LaunchSettings, output, rank_alone, succeeded

PROGRAMS = Path(__file__).parent / "programs"
CLOSE = 1e-5
pytestmark = pytest.mark.long
hugging_face = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")),
    reason="transformers or accelerate is not installed: pip install 'zero-topo[hf]'",
)


def outcome(command: list[str], folder: Path) -> dict[str, Any]:
    """What rank 0 of a program wrote."""
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    words = [str(PROGRAMS / command[0]), *command[1:], str(folder)]
    succeeded(words, LaunchSettings(folder / "logs", 4, timeout_s=600, env=env))
    return dict(json.loads((folder / f"{Path(command[-1]).stem}.json").read_text()))


@hugging_face
@pytest.mark.parametrize(
    ("verb", "learned"), [("trainer", 1.0), ("lora", 0.2), ("accelerate", 1.0)]
)
def test_the_trainer_trains_as_under_stock_zero3(verb: str, learned: float, tmp_path: Path) -> None:
    """A checkpoint of the tenth step resumes with the losses that followed it; also of PEFT's
    adapters alone, and of Accelerate, whose saved weights are the engine's.
    """
    if verb == "lora":
        pytest.importorskip("peft")
    found = outcome(["hugging_face.py", verb], tmp_path)
    assert [found[name]["topo"] for name in ("plain", "topo", "resumed")] == [None, 20, 10]
    plain, topo, resumed = (found[name]["losses"] for name in ("plain", "topo", "resumed"))
    assert len(topo) == 20 and topo[-1] < topo[0] - learned
    assert topo == pytest.approx(plain, rel=0, abs=CLOSE)
    assert resumed[:10] == topo[:10]  # the Trainer's own log, read back
    assert resumed[10:] == pytest.approx(topo[10:], rel=0, abs=CLOSE)


@pytest.mark.skipif(
    importlib.util.find_spec("pytorch_lightning") is None,
    reason="pytorch-lightning is not installed",
)
def test_lightning_trains_as_under_stock_zero3(tmp_path: Path) -> None:
    """Micro-batches and clipping by Lightning; its DeepSpeed strategy passes the block on."""
    found = outcome(["lightning.py"], tmp_path)
    plain, topo, resumed = (found[name] for name in ("plain", "topo", "resumed"))
    assert len(plain) == len(topo) == len(resumed) == 40 and topo[-1] < topo[0] / 2
    assert topo == pytest.approx(plain, rel=0, abs=CLOSE)
    assert resumed[:20] == topo[:20]
    assert found["sent"] == ["gather_forward gpu", "publish world", "scatter gpu", "sync world"]
    assert resumed[20:] == pytest.approx(topo[20:], rel=0, abs=CLOSE)


STEPS = {
    "zero_topo": "import zero_topo",
    "model": """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
""",
    "arguments": """
from transformers import TrainingArguments
config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
TrainingArguments(deepspeed=config)
""",
    "deepspeed": "import deepspeed",
}

# Every order of the steps; a process forks one for each step that is left, so orders share what
# they begin with.
ORDERS = """
import json, os, sys, torch, traceback
steps = json.loads(sys.argv[1])
def walk(left):
    if not left:
        print("hooked:", sys.modules["deepspeed"].DeepSpeedEngine._zero_topo_hook, flush=True)
    for step in left:
        if os.fork() == 0:
            try:
                exec(steps[step])
                walk([other for other in left if other != step])
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        assert os.wait()[1] == 0, step
walk(list(steps))
"""


@hugging_face
def test_every_order_of_imports_and_models_installs_the_hook() -> None:
    """A model that exists before DeepSpeed is imported has changed ``torch.nn.Module``; no order
    needs a block.
    """
    env = {**os.environ, **rank_alone(), "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", ORDERS, json.dumps(STEPS)]
    assert output(command, env=env).count("hooked: True") == 24
