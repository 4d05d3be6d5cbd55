# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The example trains alike under DeepSpeed's launcher and Slurm: same data for each rank, same
losses.

Sixteen CPU ranks: under Slurm on two emulated nodes of Frontier, else on one host that pretends to
be two.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import ROOT, LaunchSettings, succeeded
from tests.slurm import Cluster, distributed, missing, submitted
from zero_topo.observe.runlog import read_metrics

SCRIPT = str(ROOT / "zero_topo/examples/train_gpt.py")
SMALL = ["--layers", "1", "--width", "32", "--context", "16", "--warmup", "2"]
STEPS = 4
TIMEOUT_S = 400
ROLES = {"weights": "gpu", "secondary": "none", "gradients": "node", "optimizer": "world"}
TOPOLOGIES = {
    "pretended-16": {"emulated": {"nodes": 2, "gpus_per_node": 4, "gcds_per_gpu": 2}},
    "stated-16": {"nodes": 2, "gpus_per_node": 4, "ranks_per_gpu": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, and a DeepSpeed JSON for each way to say the machine: FP32, nothing quantized."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "text").write_bytes((ROOT / "LICENSE").read_bytes() * 5)
    config = json.loads((ROOT / "configs/demo.json").read_text()) | {
        "gradient_accumulation_steps": 2
    }
    for name, topology in TOPOLOGIES.items():
        block = {"topology": topology, **ROLES}
        (folder / f"{name}.json").write_text(json.dumps(config | {"zero_topo": block}))
    return folder


def training(folder: Path, config: str, run: str) -> list[str]:
    """The example's command."""
    words = ["--steps", str(STEPS), "--data", str(folder / "text"), "--run-dir", str(folder / run)]
    return [SCRIPT, *SMALL, *words, "--deepspeed_config", str(folder / f"{config}.json")]


def losses(folder: Path, run: str) -> list[float]:
    """Loss of each step, averaged over ranks."""
    found = [line["loss"] for line in read_metrics(folder / run) if "loss" in line]
    assert len(found) == STEPS and found[-1] < found[0]
    return found


def reference(folder: Path) -> list[float]:
    """Losses under the deepspeed launcher."""
    words = training(folder, "pretended-16", "deepspeed")
    succeeded(words, LaunchSettings(folder / "deepspeed-log", 16, TIMEOUT_S))
    return losses(folder, "deepspeed")


@pytest.mark.long
@pytest.mark.skipif(missing() is not None, reason=f"{missing()}")
def test_slurm_trains_as_deepspeed_does(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Block distribution: the same bits. Cyclic: other ranks share a node, so sums round
    differently, no more.
    """
    expected, found = reference(folder), {}
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        for order in ("block", "cyclic"):
            log = folder / f"slurm-{order}.log"
            words = ["--machine", "frontier", "--nodes", "2", *distributed(order, folder), "--"]
            words += ["env", "OMP_NUM_THREADS=1"]  # the cores are make-believe
            words += ["python", *training(folder, "stated-16", order)]
            state = cluster.wait(submitted(cluster, words, log), TIMEOUT_S)
            assert state == "COMPLETED", log.read_text()[-3000:] + cluster.logs()
            found[order] = losses(folder, order)
    assert found["block"] == expected
    assert found["cyclic"] == pytest.approx(expected, rel=0, abs=1e-6)
    placed = json.loads((folder / "cyclic/report.json").read_text())["zero_topo"]["topology"][
        "order"
    ]
    assert placed == [8 * (rank % 2) + rank // 2 for rank in range(16)]
