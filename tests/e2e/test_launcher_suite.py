# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Runs everything in tests/launcher on every rank of one `deepspeed` launch, and reports each test here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, LaunchSettings
from tests.suite import SuiteRun, run_suite


def test_launcher_suite(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
) -> None:
    """Every test in tests/launcher passes on every rank, and the launch ends by itself with exit code 0."""
    option = request.config.getoption
    settings = LaunchSettings(
        log_dir=tmp_path / "launch",
        world_size=option("--launcher-ranks"),
        timeout_s=option("--launcher-timeout"),
        on_text=_on_terminal,
    )
    selection = option("--launcher-k")
    with capfd.disabled():
        print(f"\nrank 0 of {settings.world_size}; logs of all ranks are in {settings.log_dir}")
        run = run_suite([str(ROOT / "tests" / "launcher"), *(["-k", selection] if selection else [])], settings)
    _report_each(run, subtests)
    _check_whole(run)


def _on_terminal(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _report_each(run: SuiteRun, subtests: pytest.Subtests) -> None:
    for test in run.tests:
        with subtests.test(msg=test.name):
            if test.outcome == "failed":
                pytest.fail(test.text, pytrace=False)
            if test.outcome in ("skipped", "xfailed"):
                pytest.skip(test.text)


def _check_whole(run: SuiteRun) -> None:
    """Fails for what no single test's outcome tells: a launch that was killed, crashed or stopped on the way."""
    launch = run.launch
    if launch.timed_out:
        unfinished = ", ".join(run.unfinished)
        pytest.fail(f"killed after {launch.seconds:.0f} s, before {unfinished}\n{launch.tails()}", pytrace=False)
    if run.unfinished:
        pytest.fail(f"the launch ended before {', '.join(run.unfinished)}\n{launch.tails()}", pytrace=False)
    if not run.tests:
        pytest.fail(f"no launcher test was run\n{launch.tails()}", pytrace=False)
    if launch.returncode != 0 and all(test.outcome != "failed" for test in run.tests):
        pytest.fail(f"the launch ended with exit code {launch.returncode}\n{launch.tails()}", pytrace=False)
