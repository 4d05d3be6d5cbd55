# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The page on extending tells the truth: its examples, applied to a copy of the package, pass its
checks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

from tests.launching import ROOT, output
from tests.ranks.test_launch_budget import CASES
from tests.unit.test_topology_presets import assert_sourced
from zero_topo.config import SPARSE_MODES
from zero_topo.strict import read
from zero_topo.topology.presets import Machine

PAGE = ROOT / "docs/extending.md"
BLOCK = re.compile(r"^```\w+\n# ([^\n]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_examples_pass_their_checks(tmp_path: Path) -> None:
    """All in one copy and one process, in the order of the page."""
    package = tmp_path / "zero_topo"
    shutil.copytree(ROOT / "zero_topo", package, ignore=shutil.ignore_patterns("__pycache__"))
    checks = []
    for file, body in BLOCK.findall(PAGE.read_text()):
        if file == "check":
            checks.append(body)
        elif body.startswith("- "):
            old, *new = (line[2:] for line in body.splitlines())
            text = (package / file).read_text()
            assert text.count(old) == 1, f"{file} has not one {old!r}"
            (package / file).write_text(text.replace(old, "\n".join(new)))
        else:
            assert not (package / file).exists(), f"{file} is no new file"
            (package / file).write_text(body)
    assert len(checks) == 4
    command = [sys.executable, "-c", "\n".join(checks)]
    output(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})


def test_the_example_of_a_preset_is_one() -> None:
    """It has what the tests of presets ask of each."""
    (text,) = [body for file, body in BLOCK.findall(PAGE.read_text()) if "presets/" in file]
    assert_sourced(read(Machine, "example", json.loads(text)))


def test_every_mode_of_sync_is_tested_by_rule() -> None:
    """Launches and the peak of memory (tests/ranks) take their cases from here; the page has a row
    for each mode.
    """
    modes = {mode.MODE for mode in SPARSE_MODES}
    page = (ROOT / "docs/sparse.md").read_text()
    assert {mode for mode in modes if f"| `{mode}` |" in page} == modes
    cases = {case.partition("+")[2] for case in CASES}
    assert modes <= cases
