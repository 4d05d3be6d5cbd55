# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Trains every cell of the matrix of features and schemes on four ranks, and records it:
`docs/works-with.md` shows it.

python -m tests.matrix [part of a feature's name]: with one only its rows are trained anew, on the
same versions.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.records import commit
from tests.launching import ROOT, LaunchSettings
from tests.suite import CELLS_VARIABLE, SuiteRun, run_suite, trouble
from zero_topo.versions import used

RECORD = ROOT / "tests/data/features.json"
RANKS = 4
TIMEOUT_S = 3600.0


def recorded() -> dict[str, Any]:
    """The record: ``when``, ``versions`` and, by feature and scheme, ``cells``: "pass", or what the
    refusal says.
    """
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def main(part: str = "") -> int:
    """Train, and write the record; 1 if a cell neither passes nor is refused as it should be."""
    with tempfile.TemporaryDirectory(prefix="zero-topo-matrix-") as name:
        cells = Path(name) / "cells.jsonl"
        env = {CELLS_VARIABLE: str(cells)}
        settings = LaunchSettings(Path(name) / "launch", RANKS, TIMEOUT_S, env=env, forked=True)
        words = (
            f"test_feature_under_scheme and ({' and '.join(part.split())})"
            if part
            else "test_feature_under_scheme"
        )
        run = run_suite([str(ROOT / "tests/launcher/test_matrix.py"), "-k", words], settings)
        found = (
            [json.loads(line) for line in cells.read_text().splitlines()] if cells.exists() else []
        )
    if _failed(run):
        return 1
    known = recorded()["cells"] if part else {}
    for feature, scheme, said in found:
        known.setdefault(feature, {})[scheme] = said
    head = {
        "command": "python -m tests.matrix",
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {**used(), "commit": commit()},
    }
    RECORD.write_text(json.dumps({**head, "ranks": RANKS, "cells": known}, indent=1) + "\n")
    return 0


def _failed(run: SuiteRun) -> bool:
    wrong = [f"{test.name}\n{test.text}" for test in run.tests if test.outcome != "passed"]
    wrong += filter(None, [trouble(run)])
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
