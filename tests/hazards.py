# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Breaks a copy of the package in each way of `tests/hazards.md`, and asserts that the test named
there then fails.

python -m tests.hazards [part of a hazard's name]
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.launching import ROOT, ended

PARTS = ("benchmarks", "csrc", "op_builder", "zero_topo", "tests", "configs", "pyproject.toml")


class Hazard(NamedTuple):
    """What can go wrong, the text whose replacement makes it go wrong, and the test that must see
    it.
    """

    what: str
    text: str
    broken: str
    test: str


def listed() -> list[Hazard]:
    """The rows of the table."""
    lines = (ROOT / "tests/hazards.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if " | `" in line
    ]
    return [Hazard(what, *(re.sub("^`|`$", "", cell) for cell in row[:3])) for what, *row in cells]


def main(part: str = "") -> int:
    """Tell each row's outcome; 1 if a test fails in the whole package, or does not in the broken
    one.
    """
    missed = 0
    for hazard in listed():
        if part not in hazard.what:
            continue
        whole, broken = passes(hazard.test), passes(hazard.test, hazard)
        missed += broken or not whole
        said = f"whole: {'passes' if whole else 'FAILS'}, broken: {'PASSES' if broken else 'fails'}"
        print(f"{said} | {hazard.what} | {hazard.test}", flush=True)
    return 1 if missed else 0


@cache
def passes(test: str, hazard: Hazard | None = None) -> bool:
    """Whether a test passes in a copy of the checkout, broken or whole."""
    with tempfile.TemporaryDirectory(prefix="zero-topo-hazard-") as name:
        for part in PARTS:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, Path(name) / part)
        if hazard is not None:
            put(hazard, Path(name))
        env = {**os.environ, "PYTHONPATH": name, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *words(test),
        ]
        done = ended(command, cwd=name, env=env)
        assert done.returncode in (0, 1), done.stdout + done.stderr  # else pytest has run no test
        return done.returncode == 0


def put(hazard: Hazard, root: Path) -> None:
    """Break the package."""
    files = [*(root / "zero_topo").rglob("*.py"), *(root / "csrc").glob("zt_gpu_*")]
    found = [path for path in files if places(hazard.text, path)]
    number = sum(places(hazard.text, path) for path in found)
    if number != 1:
        sys.exit(
            f"{hazard.text} of {hazard.what!r} stands {number} times in zero_topo and csrc: bring "
            "tests/hazards.md up to date"
        )
    broken = pattern(hazard.text).sub(lambda _: hazard.broken, found[0].read_text())
    found[0].write_text(broken)


def places(text: str, path: Path) -> int:
    """How often a text stands in a file."""
    return len(pattern(text).findall(path.read_text()))


@cache
def pattern(text: str) -> re.Pattern[str]:
    """The text wherever a formatter breaks its lines: white space and commas before a closing
    bracket do not count.
    """
    tokens = re.findall(r"\w+|[^\w\s]", text)
    parts = [
        r",?\s*" + re.escape(token) if token in ")]}" else re.escape(token) for token in tokens
    ]
    return re.compile(r"\s*".join(parts))


def words(test: str) -> list[str]:
    """What pytest gets."""
    _, _, selection = test.partition("launcher: ")
    if not selection:
        return [test]
    return ["tests/e2e/test_launcher_suite.py", "--launcher-ranks=4", f"--launcher-k={selection}"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
