# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Completion in a shell, and ``--version``: what a shell completes, and which versions a report of a bug names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.commands import Run
from zero_topo import __version__


def completed(line: str, folder: Path) -> set[str]:
    """What bash offers at the end of a line, with the script that we print."""
    command = folder / "zero-topo"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from zero_topo.cli import main; main()" "$@"\n')
    command.chmod(0o755)
    words = line.split(" ")
    program = f"""
        eval "$(zero-topo --show-completion)"
        COMP_WORDS=({" ".join(words)} {'""' if line.endswith(" ") else ""}) COMP_CWORD={len(words) - 1}
        _zero_topo_completion zero-topo
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", program], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    """As a user's shell does, whose Python this is not."""
    assert {"migrate", "measure"} & completed("zero-topo m", tmp_path) == {"migrate"}
    assert completed("zero-topo launch slurm --part", tmp_path) == {"--partition"}


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("plan --machine dgx-", {"dgx-a100", "dgx-h100"}),
        ("simulate --model gpt-neox-2", {"gpt-neox-2.7b", "gpt-neox-20b"}),
        ("simulate --schemes topo,zero", {"topo,zero3", "topo,zero++"}),
        ("launch slurm --machine gen", {"generic"}),
        ("plan --set sparse=ok", {"sparse=oktopk"}),
        ("plan --set trai", {"trainable="}),
    ],
)
def test_values_complete(line: str, offered: set[str]) -> None:
    """Machines, models, schemes, modes and settings, also after a comma; as zsh asks."""
    env = {**os.environ, "_ZERO_TOPO_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": f"zero-topo {line}"}
    program = [sys.executable, "-c", "from zero_topo.cli import main; main()"]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert set(re.findall(r'"([^"]*)"', done.stdout)) == offered, done.stderr


def test_version_names_what_it_runs_on(run: Run) -> None:
    status, out, _ = run("--version")
    versions = (__version__, metadata.version("deepspeed"), metadata.version("torch"))
    assert status == 0 and all(version in out for version in versions) and len(out.splitlines()) == 1
