# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A lock of torch's compiler for which a launch waits is named in a line."""

from __future__ import annotations

import shlex
import threading
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from zero_topo.hook import install


@pytest.mark.parametrize(("after", "rank", "lines"), [(0.1, "0", 1), (0.1, "1", 0), (30.0, "0", 0)])
def test_a_lock_for_which_a_launch_waits_is_named(
    after: float,
    rank: str,
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After some seconds, with what to do, by one rank of a node; the wait goes on until the lock
    is gone.
    """
    monkeypatch.setattr(install, "LOCK_S", after)
    monkeypatch.setenv("LOCAL_RANK", rank)
    lock = tmp_path / "a folder" / "lock"
    lock.parent.mkdir()
    lock.touch()
    threading.Timer(1.0, lock.unlink).start()
    FileBaton(str(lock)).wait()
    assert not lock.exists()
    assert len(caplog.messages) == lines
    assert all(line.endswith(f"rm {shlex.quote(str(lock))}") for line in caplog.messages)
