# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One launch that runs a directory of tests on every rank, and what came of each test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.launching import Launch, LaunchSettings, launch

CELLS_VARIABLE = "ZERO_TOPO_CELLS"
"""Names the file to which rank 0 adds each cell of the matrix of features and schemes, as a line of
JSON.
"""
TEST_TIMEOUT_S = 240.0
"""Seconds one launcher test may take; then every rank prints its stacks and the launch ends."""


@dataclass(frozen=True)
class SuiteTest:
    """How a test ended on rank 0, which every rank shares: "passed", "skipped" or "failed"."""

    name: str
    outcome: str
    text: str
    seconds: float


@dataclass(frozen=True)
class SuiteRun:
    """What a launch of tests did: the tests that ended, in order, and those that never ran to their
    end.
    """

    launch: Launch
    tests: tuple[SuiteTest, ...]
    unfinished: tuple[str, ...]


def run_suite(arguments: Sequence[str], settings: LaunchSettings) -> SuiteRun:
    """Runs `pytest arguments` on every rank of one launch.

    The launch's own files (logs, the ranks' temporary directories) go below `settings.log_dir`.
    """
    report = settings.log_dir / "report.jsonl"
    variables = {
        "ZERO_TOPO_LAUNCH_REPORT": str(report),
        "ZERO_TOPO_LAUNCH_DIR": str(settings.log_dir / "tmp"),
    }
    options = ["-v", "--color=no", "--durations=8", "--durations-min=5"]
    options += ["-p", "tests.rank_plugin", "-p", "no:cacheprovider"]
    options += ["-o", f"faulthandler_timeout={TEST_TIMEOUT_S}"]
    options += ["-o", "faulthandler_exit_on_timeout=true", *arguments]
    done = launch(
        ["pytest", *options], replace(settings, module=True, env={**variables, **settings.env})
    )
    return _read(done, report)


def trouble(run: SuiteRun) -> str:
    """What no single test's outcome tells: a launch that was killed, crashed or stopped on the way,
    or ran no test.
    """
    launch, left, said = run.launch, ", ".join(run.unfinished), ""
    if launch.timed_out:
        said = f"killed after {launch.seconds:.0f} s, before {left}"
    elif run.unfinished or not run.tests:
        said = f"the launch ended before {left or 'it ran a test'}"
    elif launch.returncode != 0 and all(test.outcome != "failed" for test in run.tests):
        said = f"the launch ended with exit code {launch.returncode}"
    return said and f"{said}\n{launch.tails()}"


def _read(done: Launch, report: Path) -> SuiteRun:
    lines = report.read_text().splitlines() if report.is_file() else []
    records = [json.loads(line) for line in lines]
    collected = [
        test for record in records if record["event"] == "collected" for test in record["tests"]
    ]
    phases: dict[str, list[dict[str, object]]] = {}
    for record in records:
        if record["event"] == "phase":
            phases.setdefault(record["test"], []).append(record)
    tests = tuple(_test(name, records) for name, records in phases.items() if _ended(records))
    ended = {test.name for test in tests}
    return SuiteRun(done, tests, tuple(name for name in collected if name not in ended))


def _ended(phases: list[dict[str, object]]) -> bool:
    return phases[-1]["phase"] == "teardown" or any(
        phase["outcome"] == "failed" for phase in phases
    )


def _test(name: str, phases: list[dict[str, object]]) -> SuiteTest:
    """One test from its phases: failed if any failed, else skipped if any was, else passed."""
    seconds = sum(float(str(phase["seconds"])) for phase in phases)
    for outcome in ("failed", "skipped"):
        found = [str(phase["text"]) for phase in phases if phase["outcome"] == outcome]
        if found:
            return SuiteTest(name, outcome, "\n".join(found), seconds)
    return SuiteTest(name, "passed", "", seconds)
