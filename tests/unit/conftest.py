# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One way to run a command line in unit tests."""

from __future__ import annotations

import os

import pytest

from tests.commands import LAUNCHER_PREFIXES, Run
from zero_topo.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line outside of any launcher's job, such as that of the tests, and returns
    (status, stdout, stderr).
    """
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)

    def call(*words: str) -> tuple[int, str, str]:
        status = main(words)
        seen = capsys.readouterr()
        return status, seen.out, seen.err

    return call
