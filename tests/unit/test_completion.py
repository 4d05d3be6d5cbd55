# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Completion in a shell, and ``--version``: what a shell completes, and which versions a report of
a bug names.
"""

from __future__ import annotations

from importlib import metadata

import pytest

from tests.commands import Run
from zero_topo import __version__
from zero_topo.cli import main


def test_commands_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("_ZERO_TOPO_COMPLETE", "complete_bash"), ("COMP_CWORD", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COMP_WORDS", "zero-topo top")
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == ["topology"]


def test_version_names_what_it_runs_on(run: Run) -> None:
    status, out, _ = run("--version")
    versions = (__version__, metadata.version("deepspeed"), metadata.version("torch"))
    assert (
        status == 0 and all(version in out for version in versions) and len(out.splitlines()) == 1
    )
