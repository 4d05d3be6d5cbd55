# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks files and shared memory: locks of dead compilers, and space in ``/dev/shm``."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from zero_topo.doctor.finding import FAIL, OK, WARN, Finding
from zero_topo.units import MB, format_bytes, format_seconds

STALE_S = 15 * 60  # longer than any compilation takes
ENOUGH = 512 * MB


def locks() -> Iterator[Finding]:
    """Check the lock files of torch's compiler: a lock of a dead process makes later runs wait
    forever, silently.
    """
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(chosen) if chosen else Path(cache) / "torch_extensions"
    found = sorted(folder.glob("**/lock")) if folder.is_dir() else []
    for lock in found:
        remove = f"rm {shlex.quote(str(lock))}"
        age = time.time() - lock.stat().st_mtime
        if age > STALE_S:
            text = (
                f"{format_seconds(age)} old: its compiler is dead, and runs wait for it without "
                "a word"
            )
            yield Finding(FAIL, f"lock {lock}", text, remove)
        else:
            yield Finding(
                WARN,
                f"lock {lock}",
                "something compiles, or was killed while it did",
                f"if not: {remove}",
            )
    if folder.is_dir() and not os.access(folder, os.W_OK):
        yield Finding(
            WARN,
            "extensions",
            f"{folder} is not writable",
            "export TORCH_EXTENSIONS_DIR to a folder of yours",
        )
    elif not found:
        yield Finding(OK, "extensions", f"no locks in {folder}")


def shared_memory(root: Path = Path("/")) -> Iterator[Finding]:
    """Check the space in ``/dev/shm``.

    Args:
        root: the directory that holds ``dev/shm``.
    """
    folder = root / "dev" / "shm"
    if not folder.is_dir():
        fix = "mount a tmpfs there (in a container: --shm-size=8g)"
        yield Finding(
            WARN, "/dev/shm", "is not there; NCCL and DeepSpeed's CPU all-reduce need it", fix
        )
        return
    free = shutil.disk_usage(folder).free
    if free < ENOUGH:
        text = (
            f"{format_bytes(free)} free; NCCL and DeepSpeed's CPU all-reduce keep their buffers "
            "there"
        )
        yield Finding(
            WARN,
            "/dev/shm",
            text,
            "remove deepspeed_allreduce_buffer_* of runs that crashed, or start the container with "
            "--shm-size=8g",
        )
    else:
        yield Finding(OK, "/dev/shm", f"{format_bytes(free)} free")
