# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ranks without a cluster: threads that talk, and a world so large that nobody has to answer.

`run_threads` runs a function on every rank of a small world, one thread per rank, through torch's multi-threaded
process group: real collectives, real data, one process, milliseconds. `fake_world` pretends to be one rank of a world
of any size, for building meshes and groups: its collectives return at once and move nothing. Real processes under the
`deepspeed` launcher are started by `tests/launching.py`.

What the threaded group can do is held down by `tests/ranks/test_harness.py`. Ranks that are threads share the default
random generator and every module-level object: draw random numbers from a `torch.Generator` of the rank's own.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

R = TypeVar("R")

TIMEOUT_S = 60.0
"""Seconds after which `run_threads` gives up on ranks that have not returned."""

GRACE_S = 2.0
"""Seconds the other ranks get to end once one has failed."""


class _Ranks:
    """The threads of one `run_threads` call, their results and the exceptions that ended them."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.results: list[Any] = [None] * world_size
        self.errors: dict[int, BaseException] = {}
        self.store = dist.HashStore()
        self.threads: list[threading.Thread] = []

    def start(self, fn: Callable[..., R], args: tuple[Any, ...], timeout: float) -> None:
        for rank in range(self.world_size):
            thread = threading.Thread(
                target=self._run, args=(rank, fn, args, timeout), name=f"rank {rank}", daemon=True
            )
            self.threads.append(thread)
        for thread in self.threads:
            thread.start()

    def _run(self, rank: int, fn: Callable[..., R], args: tuple[Any, ...], timeout: float) -> None:
        try:
            dist.init_process_group(
                "threaded",
                rank=rank,
                world_size=self.world_size,
                store=self.store,
                timeout=timedelta(seconds=timeout),
            )
            self.results[rank] = fn(rank, *args)
        except SystemExit:  # how the threaded group ends a rank that waits for one that has failed
            self.errors.setdefault(rank, _LeftAloneError("was waiting in a collective for a rank that had failed"))
        except BaseException as error:
            self.errors[rank] = error
            ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def join(self, timeout: float) -> None:
        """Waits for every rank; those still busy after `timeout` seconds, or soon after a failure, are released."""
        deadline = time.monotonic() + timeout
        while any(thread.is_alive() for thread in self.threads) and time.monotonic() < deadline:
            if self.errors:
                deadline = min(deadline, time.monotonic() + GRACE_S)
                break
            time.sleep(0.001)
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, thread in enumerate(self.threads) if thread.is_alive()]
        if late and not self.errors:
            self.errors[late[0]] = self._hang(late, timeout)

    def _hang(self, late: list[int], timeout: float) -> TimeoutError:
        """The error for ranks `late` that still run, with where each of them is; releases those in a collective."""
        hang = TimeoutError(f"ranks {late} of {self.world_size} still run after {timeout} s")
        frames = sys._current_frames()
        for rank in late:
            frame = frames.get(self.threads[rank].ident or 0)
            hang.add_note(f"rank {rank} is at\n{''.join(_frames_of_the_test(frame))}")
        ProcessLocalGroup.exception_handle(hang)
        for rank in late:
            self.threads[rank].join(GRACE_S / len(late))
        return hang

    def raise_first(self) -> None:
        """Raises the exception of the lowest rank that failed by itself, with the rank as a note."""
        own = {rank: error for rank, error in self.errors.items() if not isinstance(error, _LeftAloneError)}
        if not own:
            return
        rank = min(own)
        error = own[rank]
        error.add_note(f"raised on rank {rank} of {self.world_size}; ranks that failed by themselves: {sorted(own)}")
        raise error


def _frames_of_the_test(frame: FrameType | None) -> list[str]:
    """The last frames of a stack that are not inside torch or the threading module, innermost last."""
    inside = (os.path.dirname(torch.__file__), threading.__file__)
    frames = [entry for entry in traceback.extract_stack(frame) if not entry.filename.startswith(inside)]
    return traceback.format_list(frames[-4:])


class _LeftAloneError(Exception):
    """A rank was ended because another one failed: never the reason, so never raised to the test."""


def run_threads(world_size: int, fn: Callable[..., R], *args: Any, timeout: float = TIMEOUT_S) -> list[R]:
    """Runs `fn(rank, *args)` on `world_size` ranks, one thread each, inside an initialised process group.

    Args:
        world_size: number of ranks, at least 1. 16 ranks cost about 0.15 s.
        fn: called as `fn(rank, *args)`; inside it `torch.distributed` works as in a real rank.
        args: passed to every rank as they are: the same objects, so treat them as read-only.
        timeout: seconds until ranks that have not returned are given up.

    Returns:
        What `fn` returned, in rank order.

    Raises:
        BaseException: the exception of the lowest rank that failed by itself, with a note that names the rank.
        TimeoutError: ranks hang, for example in collectives that do not match; the notes say where each one is.
        RuntimeError: a process group exists already in this process.
    """
    if dist.is_initialized():
        raise RuntimeError("run_threads needs a process without a process group: leave fake_world first")
    ranks = _Ranks(world_size)
    ProcessLocalGroup.reset()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    _install_threaded_pg()
    try:
        ranks.start(fn, args, timeout)
        ranks.join(timeout)
    finally:
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        ProcessLocalGroup.reset()
    ranks.raise_first()
    return ranks.results


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Makes this process rank `rank` of a world of any size whose collectives return at once and move no data.

    For meshes and groups of clusters nobody has at hand. Results of collectives inside are meaningless.

    Args:
        world_size: number of ranks pretended, for example 75264.
        rank: which of them this process is.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
