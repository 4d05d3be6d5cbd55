# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""With ``--json`` standard output holds JSON alone, whatever libraries print, log or start."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.launching import ROOT

NOISY = """
import logging, os, subprocess, sys
import typer
from typing import Annotated
from zero_topo.cli.app import run
from zero_topo.cli.output import print_json

def command(words: list[str], as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    logging.basicConfig(stream=sys.stdout)
    logging.warning("Setting accelerator to CPU.")
    print("a library says hello")
    os.write(1, b"from C\\n")
    subprocess.run([sys.executable, "-c", "print('from a compiler')"], check=True)
    print_json({"seen": words}) if as_json else print("the table")

app = typer.Typer()
app.command()(command)
sys.exit(run(sys.argv[1:], lambda word: app))
"""


def noisy(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", NOISY, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_only_json_reaches_standard_output() -> None:
    """A logger, a print, a write of C's and a program that is started all go to standard error."""
    done = noisy("a", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"seen": ["a"]}
    for words in (
        "Setting accelerator to CPU.",
        "a library says hello",
        "from C",
        "from a compiler",
    ):
        assert words in done.stderr and words not in done.stdout


def test_without_json_and_behind_dashes_nothing_is_moved() -> None:
    """The word may belong to a program that is launched."""
    for words in (("a",), ("--", "a", "--json")):
        done = noisy(*words)
        assert (
            done.returncode == 0 and "the table" in done.stdout and "from a compiler" in done.stdout
        )
