# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A benchmark's ranks under limits: none is forked for nobody, none outlives who started it, a refusal is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.ranks import Ranks, on_loopback
from tests.e2e.programs import bench_forks

MANY = 200  # twenty seconds of forking
SOON_S = 8.0
PROGRAM = f"{bench_forks.__name__}:{bench_forks.sleeping.__name__}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where ranks keep their files, by which they are known; whatever is left of them is ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("BENCH_FORKS", str(MANY))
    yield tmp_path
    for pid in processes(tmp_path):
        os.kill(pid, signal.SIGKILL)


def processes(folder: Path) -> dict[int, int]:
    """Pid -> parent's of each process that was started with a file of the folder."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if f"{folder}/zero-topo-bench-".encode() in (entry / "cmdline").read_bytes():
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it is no process, or no longer one
            continue
    return found


def wait(until: Callable[[], bool], seconds: float) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(0.05)
    return until()


def test_ranks_end_with_a_killed_benchmark_while_they_are_forked(folder: Path) -> None:
    """The parent of the ranks sees between two forks that nobody waits for them any more."""
    words = f"import time\nwith Ranks({PROGRAM!r}, {{}}, on_loopback({MANY}, 1)): time.sleep(600)"
    code = f"from benchmarks.ranks import Ranks, on_loopback\n{words}"
    benchmark = subprocess.Popen([sys.executable, "-c", code])
    assert wait(lambda: len(processes(folder)) > 3, 60)
    benchmark.kill()
    benchmark.wait()
    assert wait(lambda: not processes(folder), SOON_S)


def test_ranks_end_with_their_killed_parent(folder: Path) -> None:
    """As the kernel kills the parent when memory ends: nobody is left to tell the ranks."""
    with Ranks(PROGRAM, {}, on_loopback(5, 1)) as ranks:
        assert next(ranks.messages()) == {"event": "here"}
        assert wait(lambda: len(processes(folder)) == 6, SOON_S)
        (parent,) = (pid for pid, its in processes(folder).items() if its == os.getpid())
        os.kill(parent, signal.SIGKILL)
        assert wait(lambda: set(processes(folder)) <= {parent}, SOON_S)


def test_a_refused_fork_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of processes ends those that were started, and says which was one too many; no traceback."""
    monkeypatch.setenv("BENCH_FORKS", "3")
    with (
        pytest.raises(RuntimeError, match=r"rank 3 of 7 cannot be started .*: take fewer, or raise the limit") as error,
        Ranks(PROGRAM, {}, on_loopback(7, 1)) as ranks,
    ):
        list(ranks.messages())
    assert "Traceback" not in str(error.value)
    assert wait(lambda: not processes(folder), SOON_S)
