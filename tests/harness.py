# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ranks without a cluster: threads that talk.

`run_threads` runs a function on every rank of a small world, one thread per rank, through torch's
multi-threaded process group: real collectives, real data, one process, milliseconds. One rank of a
world so large that nobody answers is `benchmarks.bare.fake_world`. Real processes under the
`deepspeed` launcher are started by `tests/launching.py`.

Ranks that are threads share the default random generator and every module-level object: draw random
numbers from a `torch.Generator` of the rank's own.

Ranks take turns
    Threads that all want Python's lock spend most of their time handing it over, at every operation
    of torch. So a rank runs alone until it waits for others in a collective; who goes on then has
    been waiting longest.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import accumulate
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, ret_work

from benchmarks.bare import fake_world
from tests.device import on_device, synchronize

R = TypeVar("R")

TIMEOUT_S = 60.0
"""Seconds after which `run_threads` gives up on ranks that have not returned."""

GRACE_S = 2.0
"""Seconds the other ranks get to end once one has failed."""


class _Rank(threading.Thread):
    """One rank's thread; `turn` is free when it may go on."""

    def __init__(self, ranks: _Ranks, number: int, run: Callable[[int], None]) -> None:
        super().__init__(target=run, args=(number,), name=f"rank {number}", daemon=True)
        self.ranks = ranks
        self.turn = threading.Lock()
        self.turn.acquire()


FINISHED = ret_work(None)
"""What each collective returns: it has ended, and its data are in place."""


class _Meeting:
    """One collective of one group, in place of torch's: the last rank to come moves the data and
    wakes the others.
    """

    def __init__(self, world_size: int, collective: Any, group: Any) -> None:
        self._collective = collective
        self._data: list[Any] = [None] * world_size
        self._waiting: list[_Rank] = []

    def join(self, rank: int, data: Any) -> Any:
        """Ends the thread once another rank has failed."""
        me = threading.current_thread()
        assert isinstance(me, _Rank)
        self._data[rank] = data
        if len(self._waiting) + 1 < len(self._data):
            self._waiting.append(me)
            me.ranks.next_turn()
            me.turn.acquire()
        else:
            synchronize()  # each rank has a stream of its own for what it sends and receives
            self._collective.work(self._data)
            synchronize()
            me.ranks.ready.extend(self._waiting)
        if me.ranks.failed:
            sys.exit("another rank has failed")
        return FINISHED


def _no_barrier(*arguments: object) -> None:
    """In place of the barrier with which torch's threads create a group: a collective waits for all
    of its members anyhow.
    """


def _ends(collective: Any, total: int, sizes: Sequence[int] | None, world_size: int) -> list[int]:
    """Where the parts of an all-to-all begin and end: torch's own takes ten tensors for each pair
    of ranks.
    """
    return [0, *accumulate(sizes or [total // world_size] * world_size)]


def without_communicators() -> AbstractContextManager[Any]:
    """torch 2.11 destroys communicators that its own threads' world does not list; other releases
    do not look.
    """
    world = multi_threaded_pg.ThreadLocalWorld
    return (
        nullcontext() if hasattr(world, "comms") else patch.object(world, "comms", [], create=True)
    )


class _Ranks:
    """The threads of one `run_threads` call, their results and the exceptions that ended them."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.results: list[Any] = [None] * world_size
        self.errors: dict[int, BaseException] = {}
        self.store = dist.HashStore()
        self.threads: list[_Rank] = []
        self.ready: deque[_Rank] = deque()
        self.failed = False
        self.over = threading.Event()
        self.left = world_size

    def start(self, fn: Callable[..., R], args: tuple[Any, ...], timeout: float) -> None:
        def run(rank: int) -> None:
            self._run(rank, fn, args, timeout)

        self.threads = [_Rank(self, rank, run) for rank in range(self.world_size)]
        self.ready.extend(self.threads)
        for thread in self.threads:
            thread.start()
        self.next_turn()

    def next_turn(self) -> None:
        """Lets the rank go on that has been ready longest, if any is."""
        if self.ready:
            self._release(self.ready.popleft())

    def fail(self) -> None:
        """All ranks may go on at once: their next collective, or the one in which they wait, ends
        them.
        """
        self.failed = True
        for thread in self.threads:
            self._release(thread)

    @staticmethod
    def _release(thread: _Rank) -> None:
        with suppress(RuntimeError):  # after a failure: free already
            thread.turn.release()

    def _run(self, rank: int, fn: Callable[..., R], args: tuple[Any, ...], timeout: float) -> None:
        self.threads[rank].turn.acquire()
        try:
            dist.init_process_group(
                "threaded",
                rank=rank,
                world_size=self.world_size,
                store=self.store,
                timeout=timedelta(seconds=timeout),
            )
            with on_device():
                self.results[rank] = fn(rank, *args)
        except SystemExit:  # how a rank ends that waits for one that has failed
            self.errors.setdefault(
                rank, _LeftAloneError("was waiting in a collective for a rank that had failed")
            )
        except BaseException as error:
            self.errors[rank] = error
            self.fail()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            self.left -= 1
            if self.errors or not self.left:
                self.over.set()
            self.next_turn()

    def join(self, timeout: float) -> None:
        """Waits for every rank; those still busy after `timeout` seconds, or soon after a failure,
        are released.
        """
        if self.over.wait(timeout):
            deadline = time.monotonic() + GRACE_S
            for thread in self.threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, thread in enumerate(self.threads) if thread.is_alive()]
        if late and not self.errors:
            self.errors[late[0]] = self._hang(late, timeout)

    def _hang(self, late: list[int], timeout: float) -> TimeoutError:
        """The error for ranks `late` that still run, with where each of them is; releases those in
        a collective.
        """
        hang = TimeoutError(f"ranks {late} of {self.world_size} still run after {timeout} s")
        frames = sys._current_frames()
        for rank in late:
            frame = frames.get(self.threads[rank].ident or 0)
            hang.add_note(f"rank {rank} is at\n{''.join(_frames_of_the_test(frame))}")
        self.fail()
        for rank in late:
            self.threads[rank].join(GRACE_S / len(late))
        return hang

    def raise_first(self) -> None:
        """Raises the exception of the lowest rank that failed by itself, with the rank as a
        note.
        """
        own = {
            rank: error
            for rank, error in self.errors.items()
            if not isinstance(error, _LeftAloneError)
        }
        if not own:
            return
        rank = min(own)
        error = own[rank]
        error.add_note(
            f"raised on rank {rank} of {self.world_size}; ranks that failed by themselves: "
            f"{sorted(own)}"
        )
        raise error


def _frames_of_the_test(frame: FrameType | None) -> list[str]:
    """The last frames of a stack that are not inside torch or the threading module, innermost
    last.
    """
    inside = (os.path.dirname(torch.__file__), threading.__file__)
    frames = [
        entry for entry in traceback.extract_stack(frame) if not entry.filename.startswith(inside)
    ]
    return traceback.format_list(frames[-4:])


class _LeftAloneError(Exception):
    """A rank was ended because another one failed: never the reason, so never raised to the
    test.
    """


def run_threads(
    world_size: int, fn: Callable[..., R], *args: Any, timeout: float = TIMEOUT_S
) -> list[R]:
    """Runs `fn(rank, *args)` on `world_size` ranks, one thread each, inside an initialised process
    group.

    Args:
        world_size: number of ranks, at least 1. 16 ranks cost some milliseconds.
        fn: called as `fn(rank, *args)`; inside it `torch.distributed` works as in a real rank.
        args: passed to every rank as they are: the same objects, so treat them as read-only.
        timeout: seconds until ranks that have not returned are given up.

    Returns:
        What `fn` returned, in rank order.

    Raises:
        BaseException: the exception of the lowest rank that failed by itself, with a note that
            names the rank.
        TimeoutError: ranks hang, for example in collectives that do not match; the notes say where
            each one is.
        RuntimeError: a process group exists already in this process.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "run_threads needs a process without a process group: leave fake_world first"
        )
    ranks = _Ranks(world_size)
    ProcessLocalGroup.reset()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    multi_threaded_pg._install_threaded_pg()
    try:
        with (
            patch.object(multi_threaded_pg, "Collective", _Meeting),
            patch.object(multi_threaded_pg, "_store_based_barrier", _no_barrier),
            patch.object(multi_threaded_pg.AllToAllBase, "_size_cumsum", _ends),
            without_communicators(),
        ):
            ranks.start(fn, args, timeout)
            ranks.join(timeout)
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        ProcessLocalGroup.reset()
    ranks.raise_first()
    return ranks.results


# Declared with C++'s signatures, of which the stand-in needs few arguments
GROUP: Any = dist.ProcessGroup


class SplittingGroup(GROUP):
    """A world bound to a device, or a group split off it: stands in for NCCL's under torch's own
    ``split_group``.
    """

    supports_splitting = True
    options = SimpleNamespace(_timeout=timedelta(hours=3))
    group_desc = "pretended"
    group_name = ""
    _device_types = (torch.device("cpu"), torch.device("cuda"))

    def __init__(self, rank: int, size: int, name: str = "world", unequal: bool = False) -> None:
        super().__init__(rank, size)
        self.splits: list[list[int]] = []
        self.group_name, self.unequal = name, unequal

    def name(self) -> str:
        return "nccl"

    def _get_backend(self, device: torch.device) -> SplittingGroup:
        return self

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        """Of the numbers of groups: another rank is in one more, if that is pretended."""
        tensors[0][0] += self.unequal
        return ret_work(None)

    def all_gather_single(
        self, table: torch.Tensor, own: torch.Tensor, options: Any = None
    ) -> dist.Work:
        """All others have what this rank has."""
        table.view(self.size(), -1).copy_(own)
        return ret_work(None)

    def split_group(self, ranks: list[int], **options: Any) -> SplittingGroup:
        assert options["device_types"] == [torch.device("cuda")]
        assert options["timeout"] == self.options._timeout
        self.splits.append(ranks)
        return SplittingGroup(ranks.index(self.rank()), len(ranks), options["group_name"])

    def get_group_store(self) -> dist.Store:
        return dist.HashStore()

    def _set_sequence_number_for_group(self) -> None: ...


@contextmanager
def bound_world(size: int, rank: int, unequal: bool = False) -> Iterator[SplittingGroup]:
    """A pretended world as DeepSpeed makes it on GPUs: NCCL's, bound to a device (which is the
    host).
    """
    world = SplittingGroup(rank, size, unequal=unequal)
    world.bound_device_id = torch.device("cpu", 0)
    known = dist.distributed_c10d._world
    # torch's recorder wants a backend in C++
    unrecorded = patch.dict(os.environ, TORCH_FR_BUFFER_SIZE="0")
    with unrecorded, fake_world(size, rank), patch.object(torch, "accelerator") as accelerator:
        accelerator.current_accelerator.return_value = torch.device("cuda")
        known.pg_group_ranks[world] = {r: r for r in range(size)}
        known.pg_map[world] = ("cpu:gloo,cuda:nccl", dist.HashStore())
        fake, known.default_pg = known.default_pg, world
        try:
            yield world
        finally:
            known.default_pg = fake
