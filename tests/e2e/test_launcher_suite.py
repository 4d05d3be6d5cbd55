# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Runs everything in tests/launcher on every rank of a launch, and reports each test here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device import ON_GPU
from tests.launching import ROOT, LaunchSettings
from tests.suite import run_suite, trouble

TIMEOUT_S = 3000.0


def test_launcher_suite(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    subtests: pytest.Subtests,
) -> None:
    """Every test in tests/launcher passes on every rank, and the launch ends by itself with exit
    code 0.

    Ranks are forked, but on a GPU, which a process may not share with its children. What is long or
    needs eight ranks runs only where it is asked for.
    """
    option = request.config.getoption
    words = ["-m", "not long and not eight_ranks"]
    if option("--launcher-k"):
        words = ["-k", option("--launcher-k")]
    forked = not (ON_GPU or option("--launcher-real"))
    ranks = option("--launcher-ranks")
    settings = LaunchSettings(tmp_path / "launch", ranks, TIMEOUT_S, forked=forked)
    with capfd.disabled():
        print(f"\nlogs of {ranks} ranks are in {settings.log_dir}")
    run = run_suite([str(ROOT / "tests" / "launcher"), *words], settings)
    for test in run.tests:
        with subtests.test(msg=test.name):
            if test.outcome == "failed":
                pytest.fail(test.text, pytrace=False)
            if test.outcome == "skipped":
                pytest.skip(test.text)
    if said := trouble(run):
        pytest.fail(said, pytrace=False)
