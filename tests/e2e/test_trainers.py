# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer and Accelerate, and Lightning's Trainer: as under stock ZeRO-3, also after a resume.

Twenty steps each in FP32, unquantized; Hugging Face on eight ranks, Lightning on four.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import LaunchSettings, launch

PROGRAMS = Path(__file__).parent / "programs"
CLOSE = 1e-5
pytestmark = pytest.mark.long
hugging_face = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")),
    reason="transformers or accelerate is not installed: pip install 'zero-topo[hf]'",
)


def outcome(command: list[str], folder: Path, ranks: int = 8) -> dict[str, Any]:
    """What rank 0 of a program wrote."""
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    words = [str(PROGRAMS / command[0]), *command[1:], str(folder)]
    done = launch(words, LaunchSettings(folder / "logs", ranks, timeout_s=600, env=env))
    assert done.returncode == 0, done.tails()
    return dict(json.loads((folder / f"{Path(command[-1]).stem}.json").read_text()))


@hugging_face
@pytest.mark.parametrize(("verb", "learned"), [("trainer", 1.0), ("lora", 0.2)])
def test_the_trainer_trains_as_under_stock_zero3(verb: str, learned: float, tmp_path: Path) -> None:
    """A checkpoint of the tenth step resumes with the losses that followed it; also of PEFT's adapters alone."""
    if verb == "lora":
        pytest.importorskip("peft")
    found = outcome(["hugging_face.py", verb], tmp_path)
    plain, topo, resumed = (found[name]["losses"] for name in ("plain", "topo", "resumed"))
    assert (found["plain"]["topo"], found["topo"]["topo"], found["resumed"]["topo"]) == (None, 20, 10)
    assert len(topo) == 20 and topo[-1] < topo[0] - learned
    assert topo == pytest.approx(plain, rel=0, abs=CLOSE)
    assert resumed[:10] == topo[:10]  # the Trainer's own log, read back
    assert resumed[10:] == pytest.approx(topo[10:], rel=0, abs=CLOSE)


@hugging_face
def test_accelerate_trains_as_under_stock_zero3(tmp_path: Path) -> None:
    """A saved state goes on as it would have, and saved weights are the engine's."""
    found = outcome(["hugging_face.py", "accelerate"], tmp_path)
    assert found["topo"] == 20 and found["losses"][-1] < found["losses"][0] - 1
    assert found["losses"] == pytest.approx(found["plain"], rel=0, abs=CLOSE)
    assert found["resumed"] == pytest.approx(found["losses"][10:], rel=0, abs=CLOSE)
    assert found["saved"] == 0


@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="pytorch-lightning is not installed")
def test_lightning_trains_as_under_stock_zero3(tmp_path: Path) -> None:
    """Micro-batches and clipping by Lightning; its DeepSpeed strategy passes the block on."""
    found = outcome(["lightning.py"], tmp_path, ranks=4)
    plain, topo, resumed = (found[name] for name in ("plain", "topo", "resumed"))
    assert len(plain) == len(topo) == len(resumed) == 40 and topo[-1] < topo[0] / 2
    assert topo == pytest.approx(plain, rel=0, abs=CLOSE)
    assert resumed[:20] == topo[:20]
    assert found["sent"] == ["gather_forward gpu", "publish world", "scatter gpu", "sync world"]
    assert resumed[20:] == pytest.approx(topo[20:], rel=0, abs=CLOSE)
