# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Completion in a shell, and ``--version``: what a shell completes, and which versions a report of
a bug names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.commands import Run
from zero_topo import __version__
from zero_topo.cli import main


def test_bash_completes_options(tmp_path: Path) -> None:
    """As a user's shell does, whose Python this is not, with the script that we print."""
    command = tmp_path / "zero-topo"
    command.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "from zero_topo.cli import main; main()" "$@"\n'
    )
    command.chmod(0o755)
    program = """
        eval "$(zero-topo --show-completion)"
        COMP_WORDS=(zero-topo launch slurm --part) COMP_CWORD=3
        _zero_topo_completion zero-topo
        echo "${COMPREPLY[@]}"
    """
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", program], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("--partition\n", "")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("top", {"topology"}),
        ("plan --machine dgx-", {"dgx-a100", "dgx-h100"}),
        ("plan --model gpt-neox-2", {"gpt-neox-2.7b", "gpt-neox-20b"}),
    ],
)
def test_commands_and_values_complete(
    line: str,
    offered: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Machines and models."""
    asked = {"_ZERO_TOPO_COMPLETE": "complete_bash", "COMP_WORDS": f"zero-topo {line}"}
    for name, value in {**asked, "COMP_CWORD": str(len(line.split()))}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([])
    assert set(capsys.readouterr().out.split()) == offered


def test_version_names_what_it_runs_on(run: Run) -> None:
    status, out, _ = run("--version")
    versions = (__version__, metadata.version("deepspeed"), metadata.version("torch"))
    assert (
        status == 0 and all(version in out for version in versions) and len(out.splitlines()) == 1
    )
