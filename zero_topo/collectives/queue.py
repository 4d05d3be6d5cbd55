# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Runs collectives asynchronously: in parallel with the computation, and finished in one order on
all ranks.

Overlap
    On a CPU, a collective progresses in the backend's threads; its follow-up work (decoding, a
    second collective) runs when the result is needed. On a GPU, both are queued on the queue's own
    stream, and the reader's stream waits for an event. In both cases overlap changes when the
    operations run, and neither the operations nor their values.

Note [In order]
    The follow-up of a collective may be another collective, so follow-ups must run in one order on
    all ranks. Ranks may need results in different orders (DeepSpeed waits in the order of a set).
    Waiting for one result therefore finishes all work that began before it.

Note [Stages]
    A hierarchical collective has two exchanges with a kernel between them, so its handle has
    several stages: each stage waits for one exchange, runs the kernels that read its result, and
    begins the next exchange. A queue that is staged begins the next run before it takes the runs
    before it one stage further, the newer of them first. While one run then crosses nodes, the next
    is exchanged inside the node, and kernels of both run on the queue's stream. Every rank begins
    the same runs in the same order, so the order of exchanges is the same on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")


class Handle(Generic[T]):
    """A value that is there after some steps: exchanges to wait for, and what is computed of
    their results.

    Args:
        value: the value, or the buffer that an exchange receives.
        wait: blocks (CPU) or makes the current stream wait (GPU) until the exchange has ended; None
            if nothing moves.
        buffers: tensors the exchange reads or writes; kept alive until it has been waited for.
    """

    # On a GPU, the queue records this event on its stream after the last step; the reader's stream
    # waits for it.
    event: torch.Event | None = None

    def __init__(
        self,
        value: T = None,  # type: ignore[assignment]
        wait: Callable[[], object] | None = None,
        buffers: object = (),
    ) -> None:
        self._value: Any = value
        # Each is taken once, in order: whether it waits for an exchange, what to call, and what it
        # keeps alive.
        self._steps: list[tuple[bool, Callable[..., Any], object]] = []
        if wait is not None:
            self._steps.append((True, wait, buffers))

    @property
    def ended(self) -> bool:
        """Whether the value is there."""
        return not self._steps

    def then(self, finish: Callable[[T], U | Handle[U]]) -> Handle[U]:
        """Return this handle, whose value becomes ``finish`` of its value; if that is a handle, its
        steps follow.
        """
        self._steps.append((False, finish, None))
        return cast("Handle[U]", self)

    def wait(self, exchanges: int = -1) -> T:
        """Take all steps and return the value; later calls return it again.

        Args:
            exchanges: the most exchanges to wait for, -1 for all; there is no value before the last
                step.
        """
        steps = self._steps
        while steps and (exchanges or not steps[0][0]):
            exchange, call, _ = steps[0]
            if exchange:
                exchanges -= 1
                call()
            del steps[0]  # a step that raises is not taken again, but for an exchange
            if not exchange:
                value = call(self._value)
                if isinstance(value, Handle):
                    # Nobody else has this handle, so its steps become those of the waiting one.
                    steps[:0] = value._steps
                    value = value._value
                self._value = value
        return cast(T, self._value)


class OrderedQueue:
    """Runs work in parallel with the computation, or synchronously if overlap is off.

    Args:
        device: device of the tensors.
        overlap: False makes :meth:`run` finish the work before it returns.
        staged: whether a GPU begins a run before it takes older ones one stage further; see Note
            [Stages].
        priority: of the queue's stream on a GPU; -1 lets its kernels start before waiting kernels
            of the computation.

    Attributes:
        overlaps: whether overlap is on.
    """

    def __init__(
        self,
        device: torch.device,
        overlap: bool,
        staged: bool = False,
        priority: int = 0,
    ) -> None:
        self.overlaps = overlap
        self._staged = staged
        self._on_gpu = on_gpu(device)
        # On a GPU with overlap, the stream of all work of this queue. It first waits for the
        # caller's stream.
        self._stream = torch.Stream(device, priority=priority) if overlap and self._on_gpu else None
        # Unfinished runs, oldest first: all ranks finish them in this order; see Note [In order].
        self._begun: deque[Handle[Any]] = deque()

    def run(self, start: Callable[[], Handle[T]], reads: Sequence[Tensor] = ()) -> Handle[T]:
        """Begin ``start()``, and return its handle, which is finished already unless this queue
        overlaps.

        Args:
            start: begins the work.
            reads: tensors that the work reads and the caller may free before the work has ended.
        """
        if self._stream is not None:
            for tensor in reads:
                # The allocator then keeps the memory until this stream has passed the last use.
                tensor.record_stream(self._stream)
        begun = self._on_stream(start)
        self._begun.append(begun)
        if self.overlaps and self._staged and self._on_gpu:
            self._advance()
        elif not self.overlaps or self._on_gpu:
            self._end(0)
        return Handle(begun).then(self._wait)

    def flush(self) -> None:
        """Finish all begun runs on a GPU, without host synchronization; do nothing on a CPU."""
        if self._on_gpu:
            self.finish()

    def finish(self) -> None:
        """Finish all begun runs; on a GPU without host synchronization."""
        self._end(0)

    def _wait(self, begun: Handle[T]) -> T:
        if begun in self._begun:
            self._end(len(self._begun) - 1 - self._begun.index(begun))
        if begun.event is not None:
            # The reader's stream waits for the queue's, not the host.
            begun.event.wait()
        return begun.wait()

    def _advance(self) -> None:
        """Take all runs but the newest one stage further, the newer first, and finish all but two
        of them.
        """
        # The newest has just begun its first exchange; each older one begins its next.
        for begun in list(self._begun)[-2::-1]:
            self._on_stream(partial(begun.wait, 1))
        self._end(3)
        while self._begun and self._begun[0].ended:
            self._end(len(self._begun) - 1)

    def _end(self, left: int) -> None:
        """Finish the oldest runs until ``left`` of them remain."""
        while len(self._begun) > left:
            oldest = self._begun.popleft()
            self._on_stream(oldest.wait)
            if self._on_gpu:
                # Behind the last kernel of this run on the queue's stream.
                oldest.event = (self._stream or torch.accelerator.current_stream()).record_event()

    def _on_stream(self, work: Callable[[], T]) -> T:
        """Run work on the caller's stream, or on this queue's stream after all work on the caller's
        stream.

        Waiting for the caller's stream also protects memory of this stream that the caller has
        freed but still uses.
        """
        if self._stream is None:
            return work()
        caller = torch.accelerator.current_stream()
        # An event on the caller's stream: the host does not wait.
        self._stream.wait_stream(caller)
        torch.accelerator.set_stream(self._stream)  # torch.Stream is a context from torch 2.7 on
        try:
            return work()
        finally:
            torch.accelerator.set_stream(caller)


class Queues:
    """The queues of a model's engines; on a GPU, each has a separate stream.

    Args:
        device: device of the tensors.
        overlap: whether scatters, sync and publish run in parallel with the computation.

    Attributes:
        gathers: of the weights. The next module waits for it, so its kernels start before waiting
            ones.
        scatters: of gradients in a bucket.
        updates: of sync and publish.
    """

    def __init__(self, device: torch.device, overlap: bool) -> None:
        self.gathers = OrderedQueue(device, overlap=True, priority=-1)
        self.scatters = OrderedQueue(device, overlap, staged=True)
        self.updates = OrderedQueue(device, overlap, staged=True)


def on_gpu(device: torch.device) -> bool:
    """Return whether work on a device is queued on streams; on a CPU it is done when the call
    returns.
    """
    return device.type != "cpu"
