# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The example trains alike under deepspeed, mpirun and Slurm: same data for each rank, same losses.

Eight CPU ranks: under Slurm on two emulated nodes with four each (sixteen, as two nodes of Frontier have, would take
this test's memory and time twice), under the others on one host that pretends to be two.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, free_port
from tests.slurm import Cluster, missing, submitted

SCRIPT = str(ROOT / "zero_topo/examples/train_gpt.py")
MACHINE = str(ROOT / "tests/data/launch/half-frontier.json")
SMALL = ["--layers", "1", "--width", "32", "--context", "16", "--eval-batches", "1", "--sample", "0", "--warmup", "2"]
STEPS = 4
TIMEOUT_S = 400
SHAPE = {"nodes": 2, "gpus_per_node": 2}
ROLES = {"weights": "gpu", "secondary": "none", "gradients": "node", "optimizer": "world"}
TOPOLOGIES = {
    "pretended": {"emulated": SHAPE | {"gcds_per_gpu": 2}},
    "stated": SHAPE | {"ranks_per_gpu": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, and a DeepSpeed JSON for each way to say the machine: FP32, nothing quantized."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "text").write_bytes((ROOT / "LICENSE").read_bytes() * 5)
    config = json.loads((ROOT / "configs/demo.json").read_text()) | {"gradient_accumulation_steps": 2}
    del config["bf16"]
    for name, topology in TOPOLOGIES.items():
        block = {"topology": topology, **ROLES}
        (folder / f"{name}.json").write_text(json.dumps(config | {"zero_topo": block}))
    return folder


def training(folder: Path, config: str, run: str) -> list[str]:
    """The example's command."""
    words = [*SMALL, "--steps", str(STEPS), "--data", str(folder / "text"), "--run-dir", str(folder / run)]
    return [SCRIPT, *words, "--deepspeed_config", str(folder / f"{config}.json")]


def losses(folder: Path, run: str) -> list[float]:
    """Loss of each step, averaged over ranks."""
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    found = [line["loss"] for line in lines if "loss" in line]
    assert len(found) == STEPS and found[-1] < found[0]
    return found


def launched(words: list[str], log: Path) -> None:
    """Run `zero-topo launch` with CPU ranks on this host; it and its ranks end with this call."""
    env: dict[str, Any] = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    env |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    env.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".torch_extensions"))
    command = [sys.executable, "-m", "zero_topo.cli", "launch", *words[:1], "--master-port", str(free_port())]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*command, *words[1:]], env=env, stdout=output, stderr=output, start_new_session=True, cwd=log.parent
        )
        try:
            status = process.wait(TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert status == 0, log.read_text()[-3000:]


@functools.cache
def reference(folder: Path) -> list[float]:
    """Losses under the deepspeed launcher, which every test here compares with."""
    words = ["deepspeed", "--ranks", "8", "--", "python", *training(folder, "pretended", "deepspeed")]
    launched(words, folder / "deepspeed.log")
    return losses(folder, "deepspeed")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun_trains_as_deepspeed_does(folder: Path) -> None:
    """The same ranks in the same order: the same bits."""
    words = ["mpirun", "--ranks", "8", "--oversubscribe", "--", sys.executable, *training(folder, "pretended", "mpi")]
    launched(words, folder / "mpi.log")
    assert losses(folder, "mpi") == reference(folder)


@pytest.mark.skipif(missing() is not None, reason=f"{missing()}")
def test_slurm_trains_as_deepspeed_does(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Block distribution: the same bits. Cyclic: other ranks share a node, so sums round differently, no more."""
    found = {}
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        for order in ("block", "cyclic"):
            log = folder / f"slurm-{order}.log"
            words = ["--machine", MACHINE, "--nodes", "2", "--distribution", order, "--name", order, "--log", str(log)]
            words += ["--master-port", str(free_port()), "--", "python", *training(folder, "stated", order)]
            state = cluster.wait(submitted(cluster, words, {}), TIMEOUT_S)
            assert state == "COMPLETED", log.read_text()[-3000:] + cluster.logs()
            found[order] = losses(folder, order)
    assert found["block"] == reference(folder)
    assert found["cyclic"] == pytest.approx(reference(folder), rel=0, abs=1e-6)
    placed = json.loads((folder / "cyclic/report.json").read_text())["zero_topo"]["topology"]["order"]
    assert placed == [0, 4, 1, 5, 2, 6, 3, 7]
