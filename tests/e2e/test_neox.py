# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""GPT-NeoX itself, unmodified, on 8 CPU ranks: it trains, saves and resumes under zero_topo as
under plain ZeRO-3.

    NEOX_PATH=<a checkout of EleutherAI/gpt-neox> NEOX_PYTHON=<a Python with its requirements> \
        pytest tests/e2e/test_neox.py

NEOX_PYTHON also needs zero_topo and DeepSpeed; by default it is the Python of the tests. Of
GPT-NeoX's requirements it takes transformers 4.57, setuptools below 81, lm_dataformat, ftfy,
sentencepiece, tiktoken and pybind11.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, free_port, rank_environment

CHECKOUT = os.environ.get("NEOX_PATH", "")
PYTHON = os.environ.get("NEOX_PYTHON", sys.executable)
RANKS = 8
STEPS, SAVED_AT = 30, 20
TOPO = {
    "topology": {"emulated": {"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 2}},
    "scheme": "topo",
}
SCAPE = TOPO | {"optimizer": "node", "sync": {"mode": "scape", "density": 0.5}}
LOSS = re.compile(r"iteration +(\d+)/ +\d+ .*?lm[_ ]loss: ([\d.E+-]+)")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not CHECKOUT, reason="NEOX_PATH is not set to a checkout of EleutherAI/gpt-neox"
    ),
]


def environment(folder: Path) -> dict[str, str]:
    """Of CPU ranks; NeoX compiles its C++ helpers with the `python3` it finds, which must have
    pybind11.
    """
    env = rank_environment(TRITON_CACHE_DIR=str(folder / "triton"))
    return env | {"PATH": os.pathsep.join([str(Path(PYTHON).parent), env["PATH"]])}


def run(folder: Path, *words: str, log: str) -> str:
    """Output of a Python program that must succeed."""
    path = folder / f"{log}.log"
    with path.open("w") as output:
        done = subprocess.run(
            [PYTHON, *words],
            cwd=folder,
            env=environment(folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=500,
        )
    text = path.read_text(errors="replace")
    assert done.returncode == 0, "\n".join(line[:300] for line in text.splitlines()[-60:])
    return text


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The standard library's own modules, as bytes, through NeoX's preprocessing."""
    folder = tmp_path_factory.mktemp("neox")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    lines = [json.dumps({"text": file.read_text(errors="replace")}) for file in files]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    program = ROOT / "tests/e2e/programs/neox_data.py"
    run(folder, str(program), CHECKOUT, "text.jsonl", str(folder / "data"), log="data")
    return folder


def config(data: Path, block: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Two layers of 64, byte level, without dropout."""
    zero = {"stage": 3, "overlap_comm": False, "stage3_param_persistence_threshold": 0}
    return {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 64,
        "max_position_embeddings": 64,
        "train_micro_batch_size_per_gpu": 2,
        "train_iters": STEPS,
        "lr_decay_iters": STEPS,
        "warmup": 0.1,
        "min_lr": 0.0003,
        "log_interval": 1,
        "eval_interval": 1000,
        "eval_iters": 1,
        "lr_decay_style": "cosine",
        "checkpoint_factor": SAVED_AT,
        "tokenizer_type": "CharLevelTokenizer",
        "vocab_file": "none",
        "data_impl": "mmap",
        "num_workers": 0,
        "data_path": f"{data}/data_text_document",
        "split": "90,5,5",
        "master_port": free_port(),
        "pipe_parallel_size": 0,
        "pos_emb": "rotary",
        "no_weight_tying": True,
        "hidden_dropout": 0,
        "attention_dropout": 0,
        "precision": "bfloat16",
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "weight_decay": 0.01,
        "optimizer": {"type": "Adam", "params": {"lr": 0.003, "betas": [0.9, 0.95]}},
        "zero_optimization": zero,
        "deepspeed_extra_args": {"gradient_clipping": 1.0, "zero_topo": block},
        **more,
    }


def train(data: Path, name: str, neox_config: dict[str, Any]) -> tuple[dict[int, float], str]:
    """Losses by step, and the output, of a launch."""
    path = data / f"{name}.yml"
    path.write_text(json.dumps(neox_config, indent=1))
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    torchrun += ["--master-port", str(neox_config["master_port"])]
    program = ROOT / "tests/e2e/programs/neox_on_cpu.py"
    text = run(data, *torchrun, str(program), CHECKOUT, str(path), log=name)
    buffers = f"deepspeed_allreduce_buffer_*_{neox_config['master_port']}_*"
    assert not list(Path("/dev/shm").glob(buffers))
    return {int(step): float(loss) for step, loss in LOSS.findall(text)}, text


def test_neox_learns_saves_and_resumes(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """INT8 weights, INT4 gradients: the last ten losses are within 1% of plain ZeRO-3, and resuming
    repeats them.
    """
    saved = {"save": str(data / "saved")}
    ours, text = train(data, "topo", config(data, TOPO, **saved))
    resumed, _ = train(
        data, "resumed", config(data, TOPO, iteration=SAVED_AT, load=str(data / "saved"), **saved)
    )
    stock = config(data, TOPO)
    del stock["deepspeed_extra_args"]["zero_topo"]
    plain, _ = train(data, "plain", stock)
    with capsys.disabled():
        print(
            f"\ntopo {ours[STEPS]:.4f}, plain ZeRO-3 {plain[STEPS]:.4f} after {STEPS} steps, "
            f"{plain[1]:.4f} at first"
        )
    assert "zero_topo.neox: 28 of 28 parameters partitioned as they were built" in text
    assert list(ours) == list(plain) == list(range(1, STEPS + 1))
    assert ours[STEPS] < 0.8 * ours[1]
    assert ours != plain  # else both were the same engine
    last = range(SAVED_AT + 1, STEPS + 1)
    assert sum(ours[step] for step in last) == pytest.approx(
        sum(plain[step] for step in last), rel=0.01
    )
    assert resumed == {step: loss for step, loss in ours.items() if step > SAVED_AT}


def test_neox_trains_with_adams(data: Path) -> None:
    """SCAPE's optimizer, which NeoX does not know, by its name in the YAML."""
    optimizer = {"type": "AdamS", "params": {"lr": 0.003, "betas": [0.9, 0.95]}}
    losses, _ = train(data, "scape", config(data, SCAPE, optimizer=optimizer, train_iters=10))
    assert losses[10] < losses[1]
