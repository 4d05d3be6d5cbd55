# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Whatever people or machines hand to a command, it works or says why not: see tests/fuzz.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import settings

from tests.commands import LAUNCHER_PREFIXES
from tests.launching import ROOT, output


def test_no_input_ends_in_a_traceback(tmp_path: Path) -> None:
    """Nor takes 10 s or 1 GB; in a process of its own that can write, start and reach nothing
    else.
    """
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)
    }
    command = [sys.executable, "-m", "tests.fuzz", str(settings().max_examples // 3)]
    env["PYTHONPATH"] = str(ROOT)
    output(command, cwd=tmp_path, env=env, timeout=300)
