# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""From Slurm's and MPI's variables to torch's: agreement with what the topology reads, and refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launching import ROOT
from zero_topo.launch.env import PORT, rank_environment
from zero_topo.topology.captures import Asked
from zero_topo.topology.discover import discover
from zero_topo.topology.launchers import launcher_view
from zero_topo.topology.probes import slurm

SIZES = st.integers(1, 6)


def step(nodes: int, per_node: int, rank: int, plane: int | None) -> dict[str, str]:
    """What srun gives a task; ``plane`` None is block, 1 is cyclic."""
    node, local = divmod(slurm.placement(nodes, per_node, plane or per_node)[rank], per_node)
    names = {None: "block", 1: "cyclic"}
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"n[0-{nodes - 1}]",
        "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_DISTRIBUTION": names.get(plane, f"plane={plane}"),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
    }


def openmpi(world: int, per_node: int, rank: int, **more: str) -> dict[str, str]:
    """What mpirun --map-by slot gives a rank."""
    names = {"SIZE": world, "RANK": rank, "LOCAL_RANK": rank % per_node, "LOCAL_SIZE": per_node}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | more


@given(SIZES, SIZES, st.sampled_from([None, 1, 2, 3]))
def test_slurm_ranks_are_where_the_topology_puts_them(nodes: int, per_node: int, plane: int | None) -> None:
    """Every task of a step: numbers are Slurm's, places are the probe's, and torch's variables change no topology."""
    for rank in range(nodes * per_node):
        env = step(nodes, per_node, rank, plane)
        added = rank_environment(env)
        assert added["RANK"] == env["SLURM_PROCID"] and added["LOCAL_RANK"] == env["SLURM_LOCALID"]
        assert added["WORLD_SIZE"] == str(nodes * per_node) and added["LOCAL_WORLD_SIZE"] == str(per_node)
        assert added["MASTER_ADDR"] == ("127.0.0.1" if nodes == 1 else "n0") and added["MASTER_PORT"] == str(PORT)
        before, after = (discover(each, Asked) for each in (env, env | added))
        assert before.order == after.order and (before.hosts == after.hosts or per_node == 1)
        assert after.coordinates(rank)[:1] == (int(env["SLURM_NODEID"]),)
        view = launcher_view(env | added)
        assert view is not None and view.local_rank == int(env["SLURM_LOCALID"])


@given(SIZES, SIZES, st.sampled_from([None, 1, 2]))
def test_a_second_worker_changes_nothing(nodes: int, per_node: int, plane: int | None) -> None:
    env = step(nodes, per_node, nodes * per_node - 1, plane)
    added = rank_environment(env)
    assert rank_environment(env | added) == added


@given(SIZES, SIZES)
def test_mpi_ranks_keep_their_numbers(nodes: int, per_node: int) -> None:
    for rank in range(nodes * per_node):
        added = rank_environment(openmpi(nodes * per_node, per_node, rank, MASTER_ADDR="head"))
        assert [added[name] for name in ("RANK", "LOCAL_RANK")] == [str(rank), str(rank % per_node)]
        assert (added["MASTER_ADDR"], added["LOCAL_WORLD_SIZE"]) == ("head", str(per_node))


def test_the_ports_and_hosts_that_are_set_are_kept() -> None:
    added = rank_environment(step(2, 2, 3, None) | {"MASTER_ADDR": "here", "MASTER_PORT": "5"})
    assert (added["MASTER_ADDR"], added["MASTER_PORT"]) == ("here", "5")


def test_torchrun_under_srun_keeps_its_own_ranks() -> None:
    """srun started one torchrun per node, which started the ranks."""
    env = step(2, 1, 1, None) | {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}
    added = rank_environment(env | {"MASTER_ADDR": "n0"})
    assert (added["RANK"], added["LOCAL_RANK"], added["WORLD_SIZE"]) == ("5", "1", "8")


STEP = step(2, 4, 5, None)
REFUSED: Mapping[str, tuple[dict[str, str], str]] = {
    "nothing": ({}, "nothing says which rank this process is"),
    "batch script": (
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_PROCID": "0"},
        "this is the batch script of job 7",
    ),
    "rank": (STEP | {"RANK": "5"}, "RANK was set before Slurm started the ranks"),
    "local rank": (STEP | {"LOCAL_RANK": "0"}, "LOCAL_RANK was set before Slurm"),
    "mpi rank": (openmpi(4, 4, 0, RANK="0"), "RANK was set before MPI started the ranks"),
    "world": (STEP | {"WORLD_SIZE": "16"}, "two launchers disagree: 16 ranks"),
    "local world": (STEP | {"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is '8' but"),
    "local id": (STEP | {"SLURM_LOCALID": "0"}, "rank 5 has local rank 0"),
    "node": (STEP | {"SLURM_NODEID": "0"}, "rank 5 has node 0"),
    "by node": (openmpi(8, 4, 0, OMPI_MCA_rmaps_base_mapping_policy="node"), "use --map-by slot"),
    "uneven": (STEP | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}, "nodes with unequal numbers"),
    "no host": (openmpi(8, 4, 3), "MASTER_ADDR is not set"),
    "port": (STEP | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
    "no local rank": ({"RANK": "1", "WORLD_SIZE": "2"}, "does not know its number on its node"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_are_refused(name: str) -> None:
    env, reason = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        rank_environment(env)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "more", [{"RANK": "0"}, {"LOCAL_RANK": "0"}, {"WORLD_SIZE": "4"}, {"LOCAL_WORLD_SIZE": "2"}, {"MASTER_PORT": "0"}]
)
def test_what_all_tasks_inherit_is_refused_by_all_alike(more: dict[str, str]) -> None:
    """Whatever the batch script exports, no rank goes on while others stop, and all say the same."""
    said = []
    for rank in range(8):
        with pytest.raises(ValueError) as caught:
            rank_environment(step(2, 4, rank, 1) | more)
        said.append(str(caught.value))
    assert said == [said[0]] * 8


def worker(*words: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the worker as a task of a step would."""
    command = [sys.executable, "-m", "zero_topo.launch.worker", *words]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        command, env={**kept, **env}, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_worker_becomes_the_command() -> None:
    """Variables are set, arguments and the exit status pass through."""
    done = worker("--", "sh", "-c", 'echo "$RANK $LOCAL_RANK $1"; exit 5', "sh", "a b", env=STEP)
    assert (done.returncode, done.stdout) == (5, "5 1 a b\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "env", "status", "said"),
    [
        (["--", "true"], {}, 2, "nothing says which rank"),
        ([], STEP, 2, "no command"),
        (["--", "no-such-program"], STEP, 127, "no-such-program cannot be run (No such file or directory)"),
    ],
)
def test_the_worker_complains_in_one_line(words: list[str], env: dict[str, str], status: int, said: str) -> None:
    done = worker(*words, env=env)
    assert done.returncode == status and said in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("zero_topo.launch.worker: ")
