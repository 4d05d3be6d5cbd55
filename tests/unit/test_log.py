# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a run chose is seen where nobody set up logging, once, and what a user has set up is left alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launching import ROOT

PROGRAM = """
import logging, sys
{before}
from zero_topo.hook.log import show_log, tell
rank = int(sys.argv[1])
for engine in range(2):
    show_log(rank)
    tell(rank, [f"choice {{engine}}"])
logging.getLogger("zero_topo.sync.of_its_own").warning("trouble")
"""
QUIET = 'logging.getLogger("zero_topo").setLevel(logging.WARNING)'
OWN = 'logging.basicConfig(format="mine %(message)s", stream=sys.stderr)'


@pytest.mark.parametrize(
    ("before", "rank", "expected"),
    [
        ("", 0, ["[INFO] zero_topo: choice 0", "[INFO] zero_topo: choice 1", "[WARNING] trouble"]),
        ("", 1, ["[WARNING] trouble"]),
        (QUIET, 0, ["[WARNING] trouble"]),
        (OWN, 0, ["mine zero_topo: choice 0", "mine zero_topo: choice 1", "mine trouble"]),
    ],
)
def test_choices_are_seen_once(before: str, rank: int, expected: list[str]) -> None:
    """Each of two engines' on rank 0, warnings on all; the user's level and handlers are used."""
    command = [sys.executable, "-c", PROGRAM.format(before=before), str(rank)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    lines = done.stderr.splitlines()
    assert len(lines) == len(expected)
    assert all(line.endswith(end) for line, end in zip(lines, expected, strict=True)), lines
