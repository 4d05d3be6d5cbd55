# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The launch's own promises, kept when tests fail: one rank's failure fails the test everywhere and hangs nothing."""

from __future__ import annotations

import pytest

from tests.launching import LaunchSettings
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
    env = {"ZERO_TOPO_LAUNCH_GRACE": "2"}
    settings = LaunchSettings(path / "logs", world_size=3, timeout_s=240, env=env, forked=("pytest", "deepspeed"))
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
    """Nobody waits for a collective that cannot end: the launch stops, and the stuck ranks print where they are."""
    names = ["test_leaves_the_others_in_a_collective", "test_never_reached"]
    assert [name.rpartition("::")[2] for name in run.unfinished] == names
    assert "the others wait for me" in run.launch.log(1)
    assert all("in test_leaves_the_others_in_a_collective" in run.launch.log(rank) for rank in (0, 2))
    assert run.launch.returncode != 0
    assert not run.launch.timed_out
