# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""From the variables of Slurm, Flux and MPI to those of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data import table
from tests.launching import ROOT, ended
from tests.steps import deal, step, task
from zero_topo.launch.env import PORT, first_host, rank_environment

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SIZES = st.integers(1, 6)
SAMPLES = ROOT / "tests/data/launchers"


def sample(name: str) -> dict[str, str]:
    """The variables of a rank that a launcher started."""
    lines = (SAMPLES / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def tasks(nodes: int, per_node: int, plane: int | None) -> list[dict[str, str]]:
    """What srun gives each task; ``plane`` None is block, 1 is cyclic."""
    dealt = deal(nodes, per_node, plane or per_node)
    names = {None: "block", 1: "cyclic"}
    env = step(nodes, per_node, names.get(plane, f"plane={plane}"), SLURM_JOB_ID="7")
    return [env | task(dealt, rank) for rank in range(len(dealt))]


RANKS = table("launchers/ranks")
"""Launcher -> the rank, ranks, the rank on its node and ranks on it, where they are known."""


@pytest.mark.parametrize("name", RANKS)
def test_each_launchers_numbers_are_read(name: str) -> None:
    """Of launchers inside launchers, those of the closest; a second worker changes nothing."""
    env = {"MASTER_ADDR": "head"} | sample(name)
    added = rank_environment(env)
    found = [added.get(name) for name in NAMES]
    assert found == [None if number is None else str(number) for number in RANKS[name]]
    assert added["MASTER_ADDR"] == env["MASTER_ADDR"]
    assert rank_environment(env | added) == added


@given(SIZES, SIZES, st.sampled_from([None, 1, 2, 3]))
def test_slurms_tasks_meet_on_the_first_host(nodes: int, per_node: int, plane: int | None) -> None:
    for env in tasks(nodes, per_node, plane):
        added = rank_environment(env)
        assert added["RANK"] == env["SLURM_PROCID"] and added["LOCAL_RANK"] == env["SLURM_LOCALID"]
        assert added["WORLD_SIZE"] == str(nodes * per_node)
        assert added["LOCAL_WORLD_SIZE"] == str(per_node)
        assert added["MASTER_ADDR"] == ("127.0.0.1" if nodes == 1 else "n0")
        assert added["MASTER_PORT"] == PORT


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("frontier[00017-00018,04351]", "frontier00017"),
        ("rack[1-2]node[01-16,20],login", "rack1node01"),
        ("gpu3,gpu[5-9]", "gpu3"),
        ("n0", "n0"),
    ],
)
def test_the_first_of_slurms_hosts(hosts: str, first: str) -> None:
    assert first_host({"SLURM_STEP_NODELIST": hosts, "SLURM_JOB_NODELIST": "x"}) == first
    assert first_host({}) is None


STEP = tasks(2, 4, None)[5]


@pytest.mark.parametrize("name", NAMES)
def test_what_all_tasks_inherit_counts_less_than_slurm(name: str) -> None:
    """Whatever the batch script exports."""
    for env in tasks(2, 4, 1):
        assert rank_environment(env | {name: "0"}) == rank_environment(env)


def worker(*words: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the worker as a task of a step would."""
    command = [sys.executable, "-m", "zero_topo.launch.worker", *words]
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return ended(command, env={**kept, **env}, cwd=ROOT, timeout=60)


def test_the_worker_becomes_the_command() -> None:
    """Variables are set, arguments and the exit status pass through."""
    done = worker("--", "sh", "-c", 'echo "$RANK $LOCAL_RANK $1"; exit 5', "sh", "a b", env=STEP)
    assert (done.returncode, done.stdout) == (5, "5 1 a b\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        ([], STEP, "no command"),
        (["--", "no-such-program"], STEP, "No such file or directory"),
    ],
)
def test_the_worker_complains_in_one_line(words: list[str], env: dict[str, str], said: str) -> None:
    done = worker(*words, env=env)
    assert done.returncode == 1 and said in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith(
        "zero_topo.launch.worker: "
    )
