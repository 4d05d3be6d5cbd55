# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The page on extending tells the truth: its examples, applied to a copy of the package, pass its
checks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.launching import ROOT

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
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True
    )
    assert not done.returncode, done.stderr.decode()
