# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""From Slurm's and MPI's variables to torch's, to train and to measure: agreement with the
topology, and refusals.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launching import ROOT
from tests.steps import deal, step, task
from zero_topo.launch.env import PORT, rank_environment
from zero_topo.topology.discover import discover
from zero_topo.topology.launchers import launcher_view

SIZES = st.integers(1, 6)


def tasks(nodes: int, per_node: int, plane: int | None) -> list[dict[str, str]]:
    """What srun gives each task; ``plane`` None is block, 1 is cyclic."""
    dealt = deal(nodes, per_node, plane or per_node)
    names = {None: "block", 1: "cyclic"}
    env = step(nodes, per_node, names.get(plane, f"plane={plane}"), SLURM_JOB_ID="7")
    return [env | task(dealt, rank) for rank in range(len(dealt))]


def openmpi(world: int, per_node: int, rank: int, **more: str) -> dict[str, str]:
    """What mpirun --map-by slot gives a rank."""
    names = {"SIZE": world, "RANK": rank, "LOCAL_RANK": rank % per_node, "LOCAL_SIZE": per_node}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | more


@given(SIZES, SIZES, st.sampled_from([None, 1, 2, 3]))
def test_slurm_ranks_are_where_the_topology_puts_them(
    nodes: int, per_node: int, plane: int | None
) -> None:
    """Numbers are Slurm's, places are the probe's, torch's variables change no topology, a second
    worker nothing.
    """
    for rank, env in enumerate(tasks(nodes, per_node, plane)):
        added = rank_environment(env)
        assert added["RANK"] == env["SLURM_PROCID"] and added["LOCAL_RANK"] == env["SLURM_LOCALID"]
        assert added["WORLD_SIZE"] == str(nodes * per_node) and added["LOCAL_WORLD_SIZE"] == str(
            per_node
        )
        assert added["MASTER_ADDR"] == ("127.0.0.1" if nodes == 1 else "n0") and added[
            "MASTER_PORT"
        ] == str(PORT)
        assert rank_environment(env | added) == added
        before, after = (discover(each, lambda: (None, ())) for each in (env, env | added))
        assert before.order == after.order and (before.hosts == after.hosts or per_node == 1)
        assert after.coordinates(rank)[:1] == (int(env["SLURM_NODEID"]),)
        view = launcher_view(env | added)
        assert view is not None and view.local_rank == int(env["SLURM_LOCALID"])


@given(SIZES, SIZES)
def test_mpi_ranks_keep_their_numbers(nodes: int, per_node: int) -> None:
    for rank in range(nodes * per_node):
        added = rank_environment(openmpi(nodes * per_node, per_node, rank, MASTER_ADDR="head"))
        assert [added[name] for name in ("RANK", "LOCAL_RANK")] == [str(rank), str(rank % per_node)]
        assert (added["MASTER_ADDR"], added["LOCAL_WORLD_SIZE"]) == ("head", str(per_node))


def flux(nodes: int, per_node: int, rank: int, **more: str) -> dict[str, str]:
    """What flux run gives a task (flux-environment(7); the same from a Flux 0.88 on one host)."""
    names = {"FLUX_JOB_SIZE": nodes * per_node, "FLUX_JOB_NNODES": nodes, "FLUX_TASK_RANK": rank}
    names |= {"FLUX_TASK_LOCAL_ID": rank % per_node, "PMI_RANK": rank, "PMI_SIZE": nodes * per_node}
    return {name: str(value) for name, value in names.items()} | {"FLUX_JOB_ID": "f2"} | more


@given(SIZES, SIZES, st.booleans())
def test_flux_ranks_are_where_the_topology_puts_them(nodes: int, per_node: int, pmi: bool) -> None:
    """Nodes and places follow from the number of nodes, with Flux's PMI and without it."""
    for rank in range(nodes * per_node):
        env = flux(nodes, per_node, rank, MASTER_ADDR="head")
        env = {name: value for name, value in env.items() if pmi or not name.startswith("PMI")}
        added = rank_environment(env)
        assert [added[name] for name in ("RANK", "LOCAL_RANK")] == [str(rank), str(rank % per_node)]
        assert (added["WORLD_SIZE"], added["LOCAL_WORLD_SIZE"]) == (
            str(nodes * per_node),
            str(per_node),
        )
        assert rank_environment(env | added) == added
        found = discover(env, lambda: (None, ()))
        assert (found.nodes, found.ranks_per_node) == (nodes, per_node)


def test_launchers_inside_a_flux_task_are_closer() -> None:
    """torchrun, or an mpiexec of MPICH, that Flux started once per node has the ranks."""
    inner = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
    }
    view = launcher_view(flux(2, 1, 1) | inner)
    assert view is not None and (view.source, view.world_size, view.nodes) == ("torchrun", 8, 2)
    hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
    view = launcher_view(flux(1, 1, 0) | hydra)
    assert view is not None and (view.source, view.world_size, view.rank) == ("mpich", 4, 3)


STEP = tasks(2, 4, None)[5]
TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n0",
}


@pytest.mark.parametrize(
    ("env", "kept"),
    [
        (STEP, {"MASTER_ADDR": "here", "MASTER_PORT": "5"}),
        (tasks(2, 1, None)[1], TORCHRUN),
        ({}, TORCHRUN),
    ],
    ids=["host and port", "one torchrun per node that srun started", "torchrun alone"],
)
def test_what_is_set_is_kept(env: dict[str, str], kept: dict[str, str]) -> None:
    assert rank_environment(env | kept).items() >= kept.items()


REFUSED: Mapping[str, tuple[dict[str, str], str]] = {
    "nothing": ({}, "the rank of this process is unknown"),
    "batch script": (
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_PROCID": "0"},
        "this is the batch script of job 7",
    ),
    "rank": (STEP | {"RANK": "5"}, "RANK was set before Slurm started the ranks"),
    "local rank": (STEP | {"LOCAL_RANK": "0"}, "LOCAL_RANK was set before Slurm"),
    "mpi rank": (openmpi(4, 4, 0, RANK="0"), "RANK was set before MPI started the ranks"),
    "flux rank": (flux(1, 4, 0, RANK="0"), "RANK was set before Flux started the ranks"),
    "flux uneven": (
        flux(2, 4, 0, FLUX_JOB_SIZE="7"),
        "7 ranks (FLUX_JOB_SIZE) on 2 nodes (FLUX_JOB_NNODES) cannot",
    ),
    "flux cyclic": (flux(2, 4, 1, FLUX_TASK_LOCAL_ID="0"), "rank 1 has local rank 0"),
    "world": (STEP | {"WORLD_SIZE": "16"}, "two launchers disagree: 16 ranks"),
    "local world": (STEP | {"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is '8' but"),
    "local id": (STEP | {"SLURM_LOCALID": "0"}, "rank 5 has local rank 0"),
    "node": (STEP | {"SLURM_NODEID": "0"}, "rank 5 has node 0"),
    "by node": (openmpi(8, 4, 0, OMPI_MCA_rmaps_base_mapping_policy="node"), "use --map-by slot"),
    "uneven": (STEP | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}, "nodes with unequal numbers"),
    "no host": (openmpi(8, 4, 3), "MASTER_ADDR is not set"),
    "no host of torchrun's": (
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        "MASTER_ADDR is not set",
    ),
    "port": (STEP | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
    "no local rank": ({"RANK": "1", "WORLD_SIZE": "2"}, "has no number on its node"),
}


@pytest.mark.parametrize(("env", "reason"), REFUSED.values(), ids=REFUSED)
def test_contradictions_are_refused(env: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        rank_environment(env)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "more",
    [
        {"RANK": "0"},
        {"LOCAL_RANK": "0"},
        {"WORLD_SIZE": "4"},
        {"LOCAL_WORLD_SIZE": "2"},
        {"MASTER_PORT": "0"},
    ],
)
def test_what_all_tasks_inherit_is_refused_by_all_alike(more: dict[str, str]) -> None:
    """Whatever the batch script exports, no rank goes on while others stop, and all say the
    same.
    """
    said = []
    for env in tasks(2, 4, 1):
        with pytest.raises(ValueError) as caught:
            rank_environment(env | more)
        said.append(str(caught.value))
    assert said == [said[0]] * 8


def worker(*words: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the worker as a task of a step would."""
    command = [sys.executable, "-m", "zero_topo.launch.worker", *words]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        command,
        env={**kept, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_worker_becomes_the_command() -> None:
    """Variables are set, arguments and the exit status pass through."""
    done = worker("--", "sh", "-c", 'echo "$RANK $LOCAL_RANK $1"; exit 5', "sh", "a b", env=STEP)
    assert (done.returncode, done.stdout) == (5, "5 1 a b\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "env", "status", "said"),
    [
        (["--", "true"], {}, 2, "the rank of this process is unknown"),
        ([], STEP, 2, "no command"),
        (
            ["--", "no-such-program"],
            STEP,
            127,
            "no-such-program cannot be run (No such file or directory)",
        ),
    ],
)
def test_the_worker_complains_in_one_line(
    words: list[str], env: dict[str, str], status: int, said: str
) -> None:
    done = worker(*words, env=env)
    assert done.returncode == status and said in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith(
        "zero_topo.launch.worker: "
    )
