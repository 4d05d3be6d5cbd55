# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One way to run a command line in unit tests."""

from __future__ import annotations

import os

import pytest

from tests.commands import LAUNCHER_PREFIXES, Run
from zero_topo.cli import main


@pytest.fixture
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the variables of the job that the tests may run in."""
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], no_job: None) -> Run:
    """Runs a command line outside of any launcher's job and returns (status, stdout, stderr)."""

    def call(*words: str) -> tuple[int, str, str]:
        status = main(words)
        seen = capsys.readouterr()
        return status, seen.out, seen.err

    return call
