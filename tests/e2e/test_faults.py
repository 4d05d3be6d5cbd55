# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A rank dies, stops or is slow: the others say so in time, and a restart goes on bit for bit."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.emulated_cluster import network
from benchmarks.faults import PHASES, Cluster, Fault, Steps, cluster, meet, steps, whole
from tests.launching import ROOT, Launch, LaunchSettings, launch, succeeded
from tests.marks import late

PROGRAM = ROOT / "benchmarks/faulty_training.py"
TIMEOUT_S = 240.0
WATCH_S = 3.0
TREE = {"sync": "nodes", "publish": "nodes"}  # the other phases are between GCDs


def run(
    folder: Path, kind: str, phase: str, on_text: Callable[[str], None] | None = None
) -> Launch:
    """Two ranks in the folder, which take up what was written there; unless a rank is killed, the
    launch succeeds.
    """
    folder.mkdir(exist_ok=True)
    words = [str(PROGRAM), str(folder), kind, phase, "3", "1", TREE.get(phase, "dies")]
    logs = folder / f"logs {len(list(folder.glob('logs*')))}"
    env = {"ZERO_TOPO_WATCH_S": str(WATCH_S)}
    settings = LaunchSettings(logs, 2, TIMEOUT_S, env=env, forked=True, on_text=on_text)
    return launch(words, settings) if kind == "killed" else succeeded(words, settings)


Slow = Callable[[str], tuple[Launch, Steps]]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Slow:
    """On the tree of a phase, the run in which one rank is slow, once; what it computes is what it
    would otherwise.
    """

    @cache
    def on(tree: str) -> tuple[Launch, Steps]:
        folder = tmp_path_factory.mktemp(tree)
        return run(folder, "slow", {"dies": "forward", "nodes": "sync"}[tree]), steps(folder)

    return lambda phase: on(TREE.get(phase, "dies"))


@pytest.mark.parametrize("phase", ["sync", *(late(phase) for phase in PHASES if phase != "sync")])
def test_a_rank_is_killed_and_the_restart_goes_on_bit_for_bit(
    phase: str, tmp_path: Path, slow: Slow
) -> None:
    """The launch ends by itself with its signal, in time; what the restart computes are the bits of
    a whole run.
    """
    done, (_, whole_run) = run(tmp_path, "killed", phase), slow(phase)
    assert (done.returncode, done.timed_out) == (128 + signal.SIGKILL, False), done.tails()
    assert len(steps(tmp_path)) < len(whole_run)
    run(tmp_path, "none", phase)
    assert steps(tmp_path) == whole_run


@pytest.mark.long
def test_nan_on_one_rank_costs_all_of_them_one_step(tmp_path: Path, slow: Slow) -> None:
    """It is skipped on both, training goes on, and so does a restart from the checkpoint before it,
    bit for bit.
    """
    run(tmp_path, "nan", "forward")
    found = steps(tmp_path)
    assert [math.isnan(loss) for loss, _ in found.values()] == [False, False, False, True, False]
    assert found[3][1] == found[2][1] and found[4][1] != found[3][1]
    (tmp_path / "latest").write_text("global_step2")
    run(tmp_path, "none", "forward")
    assert steps(tmp_path) == slow("forward")[1]


def test_a_stopped_rank_is_named_while_the_run_hangs(tmp_path: Path) -> None:
    """With where the other waits; once it goes on, so does the run."""
    heard, said = list[str](), list[float]()

    def wake(text: str) -> None:
        """Continue the stopped rank as soon as the other one reports that it does not answer."""
        heard.append(text)
        if not said and "did not answer" in "".join(heard):
            faulty = tmp_path / "faulty"
            said.append(time.time() - faulty.stat().st_mtime)
            os.kill(int(faulty.read_text()), signal.SIGCONT)

    done = run(tmp_path, "stopped", "backward", wake)
    assert said[0] < 20 * WATCH_S, "in time, on a busy machine"
    (line,) = [line for line in done.log(0).splitlines() if "did not answer" in line]
    assert "rank 1 of host" in line and "rank 0: " in line and "of step 3" in line


def test_a_slow_rank_is_distinguished_from_a_dead_one(slow: Slow) -> None:
    """Both say where it is, and the run goes on to its end."""
    done, _ = slow("sync")
    for rank in (0, 1):
        assert "every rank answers" in done.log(rank) and "did not answer" not in done.log(rank)
        assert "faulty_training.py:" in done.log(rank)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Two nodes of two ranks, each with a launcher of its own."""
    with cluster() as built:
        yield built


@pytest.fixture(scope="module")
def undisturbed_nodes(nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """The run there that nothing happens to."""
    return whole(nodes, tmp_path_factory.mktemp("undisturbed") / "run")


NAMED = {
    Fault("killed", "publish", 2, 2): "rank 2 of host",
    Fault("killed", "sync", 2, 3): "rank 3 of host",
    Fault("stopped", "scatter", 2, 1): "rank 1 of host",
    Fault("cut", "sync", 2, 3): "rank 3 of host",
}


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.skipif(
    network.refusal() is not None, reason="the emulated cluster needs root, ip and tc"
)
@pytest.mark.parametrize("fault", NAMED, ids=lambda fault: f"{fault.kind} in {fault.phase}")
def test_on_two_nodes_every_survivor_says_who_in_time(
    fault: Fault, nodes: Cluster, undisturbed_nodes: Steps, tmp_path: Path
) -> None:
    """Each rank that no launcher ended names the rank that is gone; a network that comes back
    changes no bit.
    """
    row = meet(nodes, tmp_path / "run", fault, undisturbed_nodes)
    assert row["equal"] and row["restarted"] == (fault.kind == "killed")
    assert len(row["told_s"]) >= 2 and max(row["told_s"].values()) < 20 * WATCH_S, (
        "in time, on a busy machine"
    )
    for rank in row["told_s"]:
        log = (tmp_path / f"run/logs 0/{rank // 2}/{rank % 2}.log").read_text()
        (line,) = [line for line in log.splitlines() if "did not answer" in line]
        assert NAMED[fault] in line and "of step 2" in line
