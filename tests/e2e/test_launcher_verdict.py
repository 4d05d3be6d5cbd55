# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The launch's own promises, kept when tests fail: one rank's failure fails the test everywhere and hangs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import LaunchSettings, launch
from tests.suite import SuiteRun, run_suite

CONFTEST = "from tests.rank_plugin import *\n"

TESTS = """
import pytest
import torch.distributed as dist

def test_fails_on_one_rank(rank):
    assert rank != 1, "only here"

def test_goes_on_after_it(rank):
    dist.barrier()

@pytest.fixture
def broken_on_one_rank(rank):
    assert rank != 1, "no such thing here"

def test_setup_fails_on_one_rank(broken_on_one_rank):
    pass

def test_skipped_on_one_rank(rank):
    if rank == 1:
        pytest.skip("not here")

@pytest.mark.skip(reason="nowhere")
def test_skipped_everywhere():
    pass

def test_leaves_the_others_in_a_collective(rank):
    assert rank != 1, "the others wait for me"
    dist.barrier()

def test_never_reached():
    pass
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SuiteRun:
    """One launch of three ranks in which rank 1 fails in several ways."""
    path = tmp_path_factory.mktemp("suite")
    (path / "pytest.ini").write_text("[pytest]\n")
    (path / "conftest.py").write_text(CONFTEST)
    (path / "test_failing.py").write_text(TESTS)
    settings = LaunchSettings(path / "logs", world_size=3, timeout_s=120, env={"ZERO_TOPO_LAUNCH_GRACE": "2"})
    return run_suite([str(path), f"--rootdir={path}"], settings)


def test_one_ranks_failure_fails_the_test_on_every_rank(run: SuiteRun) -> None:
    """Rank 0 reports the failure with the other rank's own words, and later tests still run."""
    outcomes = {test.name.rpartition("::")[2]: test for test in run.tests}
    assert outcomes["test_fails_on_one_rank"].outcome == "failed"
    assert "failed on ranks [1], passed on ranks [0, 2]" in outcomes["test_fails_on_one_rank"].text
    assert "only here" in outcomes["test_fails_on_one_rank"].text
    assert outcomes["test_goes_on_after_it"].outcome == "passed"
    assert outcomes["test_setup_fails_on_one_rank"].outcome == "failed"
    assert "no such thing here" in outcomes["test_setup_fails_on_one_rank"].text


def test_ranks_must_skip_together(run: SuiteRun) -> None:
    """A test that only some ranks skip has failed: it did not test what it says."""
    outcomes = {test.name.rpartition("::")[2]: test for test in run.tests}
    assert outcomes["test_skipped_on_one_rank"].outcome == "failed"
    assert outcomes["test_skipped_everywhere"].outcome == "skipped"


def test_ranks_left_in_a_collective_end_the_launch(run: SuiteRun) -> None:
    """Nobody waits for a collective that cannot end: the stuck ranks say where they are, and the launch stops."""
    left = next(test for test in run.tests if test.name.endswith("test_leaves_the_others_in_a_collective"))
    assert left.outcome == "failed"
    assert "the others wait for me" in left.text
    assert "dist.barrier()" in left.text
    assert "is stuck in" in run.launch.log(2)
    assert [name.rpartition("::")[2] for name in run.unfinished] == ["test_never_reached"]
    assert run.launch.returncode != 0
    assert not run.launch.timed_out


def test_launch_is_killed_at_its_time_limit_with_stacks(tmp_path: Path) -> None:
    """A program that hangs costs its time limit and leaves every rank's stack in its log."""
    script = tmp_path / "hang.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(300)\n")
    for limit in (3, 60):  # the second only where a busy machine needs more than the first to start Python
        settings = LaunchSettings(tmp_path / f"logs{limit}", world_size=2, timeout_s=limit, forked=["time"])
        done = launch([str(script)], settings)
        if len(done.logs()) == 2 and all("up" in log for log in done.logs()):
            break
    assert done.timed_out
    assert done.seconds < limit + 20
    assert done.returncode != 0
    assert len(done.logs()) == 2
    assert all("up" in log and "hang.py" in log and "line 3" in log for log in done.logs()), done.tails()


def test_exit_code_of_a_failing_rank_reaches_the_caller(tmp_path: Path) -> None:
    """What the rank exits with is what the launch reports."""
    script = tmp_path / "fail.py"
    script.write_text("import os, sys\nsys.exit(7 if os.environ['RANK'] == '1' else 0)\n")
    done = launch([str(script)], LaunchSettings(tmp_path / "logs", world_size=2, timeout_s=60))
    assert (done.returncode, done.timed_out) == (7, False)
