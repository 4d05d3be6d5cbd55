# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The script that `zero-topo launch slurm` writes for Frontier, run by a real Slurm on two emulated
nodes of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT
from tests.slurm import Cluster, distributed, missing, submitted
from tests.steps import deal
from zero_topo.launch.machines import load_launch_machine, machine_names

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(missing() is not None, reason=f"{missing()}"),
]

FRONTIER = ["--machine", "frontier", "--nodes", "2"]
PER_NODE = 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes of 64 cores and 8 GPUs."""
    with Cluster(tmp_path_factory.mktemp("slurm")) as up:
        yield up


def ran(cluster: Cluster, name: str, words: list[str], **env: str) -> tuple[str, str]:
    """The final state and the output of a Frontier job."""
    log = cluster.folder / f"{name}.out"
    job = submitted(cluster, [*FRONTIER, *words], log, env)
    return cluster.wait(job, 120), log.read_text()


@pytest.mark.parametrize(("distribution", "plane"), [("block", PER_NODE), ("cyclic", 1)])
def test_every_rank_knows_its_place(
    cluster: Cluster, distribution: str, plane: int, tmp_path: Path
) -> None:
    """16 tasks: the worker's variables, the tree that the ranks find and the host where the task
    runs agree.
    """
    program = [sys.executable, str(ROOT / "tests/e2e/programs/launched.py")]
    program += [str(tmp_path), "frontier"]
    state, output = ran(
        cluster, distribution, [*distributed(distribution, tmp_path), "--", *program]
    )
    assert state == "COMPLETED", output
    seen: list[dict[str, Any]] = [
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(16)
    ]
    hosts = deal(2, PER_NODE, plane)
    for rank, (reported, node) in enumerate(zip(seen, hosts, strict=True)):
        local = hosts[:rank].count(node)
        env = reported["env"]
        expected = {
            "RANK": str(rank),
            "WORLD_SIZE": "16",
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(PER_NODE),
            "FI_MR_CACHE_MONITOR": "kdreg2",
            "OMP_NUM_THREADS": "7",
        }
        assert expected.items() <= env.items() and env["MASTER_ADDR"]
        assert reported["host"] == cluster.hosts[node]
        assert reported["place"] == [node, local // 2, local % 2]
        assert env["SLURM_CPU_BIND_LIST"].split(",")[0] == "fe000000000000"
    trees = [reported["topology"] for reported in seen]
    assert trees == [trees[0]] * 16
    assert trees[0]["name"] == "frontier" and trees[0]["hosts"] == cluster.hosts
    assert "load rccl-net-plugin" in (cluster.folder / "modules").read_text()


def test_a_rank_that_fails_ends_the_job(cluster: Cluster) -> None:
    """The others would wait for it in a collective for half an hour."""
    state, output = ran(
        cluster, "failing", ["--", "bash", "-c", "[ $RANK != 3 ] || exit 7; sleep 100"]
    )
    assert state == "FAILED" and "Exited with exit code 7" in output


def test_a_rank_left_over_in_the_environment_is_not_believed(cluster: Cluster) -> None:
    """RANK=0 would be right on rank 0 only, which would then wait for the others."""
    state, output = ran(cluster, "stray", ["--", "sh", "-c", "echo rank $RANK"], RANK="0")
    assert state == "COMPLETED", output
    assert {f"rank {rank}" for rank in range(16)} <= set(output.splitlines())


MACHINES = [
    name for name in machine_names() if load_launch_machine(name).scheduler in (None, "slurm")
]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One node with as many cores as any machine's script asks for, the partitions and features of
    their sites.
    """
    with Cluster(tmp_path_factory.mktemp("large"), nodes=1, cpus=288, name="any") as up:
        yield up


@pytest.mark.parametrize("machine", MACHINES)
def test_slurm_reads_every_machines_options(large: Cluster, machine: str) -> None:
    """sbatch and srun take each option of the script, and every rank starts."""
    log = large.folder / f"{machine}.out"
    ranks = load_launch_machine(machine).ranks_per_node or 2
    words = ["--machine", machine, "--ranks-per-node", str(ranks)]
    job = submitted(large, [*words, "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE"], log)
    assert large.wait(job, 120) == "COMPLETED", log.read_text()
    said = sorted(line for line in log.read_text().splitlines() if line.startswith("rank "))
    assert said == [f"rank {rank} of {ranks}" for rank in range(ranks)]
