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
