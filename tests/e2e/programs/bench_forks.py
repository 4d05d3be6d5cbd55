# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A program for ranks whose parent forks slowly, in little memory, and after BENCH_FORKS ranks not at all."""

from __future__ import annotations

import errno
import os
import resource
import time
from typing import Any

from benchmarks.control import Control

MEMORY = 4 << 30
FORK_S = 0.1


def prepare() -> None:
    """Runs in the parent, before it forks."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    fork, left = os.fork, int(os.environ["BENCH_FORKS"])

    def slow() -> int:
        nonlocal left
        left -= 1
        time.sleep(FORK_S)
        if left < 0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    os.fork = slow


def sleeping(settings: dict[str, Any], control: Control) -> None:
    """Rank 0 says that it is there; all stay until they are ended."""
    control.send({"event": "here"})
    time.sleep(600)
