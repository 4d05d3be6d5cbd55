# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Unit tests see no device tools, whatever machine they run on; and one way to run a command line
in them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

import pytest

from tests.commands import LAUNCHER_PREFIXES, Run
from zero_topo.cli import main

TOOLS = ("amd-smi", "rocm-smi", "nvidia-smi")


@pytest.fixture(autouse=True, scope="session")
def no_device_tools() -> Iterator[None]:
    """Hides the programs and NVML's module; a test that needs one passes its own runner."""
    which = shutil.which
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            shutil,
            "which",
            lambda name, *rest, **more: None if name in TOOLS else which(name, *rest, **more),
        )
        patch.setitem(sys.modules, "pynvml", None)
        yield


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
