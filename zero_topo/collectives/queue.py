# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Asynchronous collectives: where they run beside the computation, and in which order they end.

Note [Overlap]
    On a CPU a collective progresses in the backend's threads; what follows it (decoding, a second hop) runs when the
    result is needed. On a GPU both are queued on a stream of the queue's own, and the reader's stream waits for an
    event. Either way the same operations run on the same values: overlap changes when they run, not what they do.

Note [In order]
    What follows a collective may be another one, so it has to follow in one order on all ranks. Ranks may need results
    in different orders (DeepSpeed waits in the order of a set): waiting for one result therefore ends all work that
    began before it.

Note [One ahead]
    A queue that ends a run as soon as the next has begun sends the next run's messages while it decodes this one's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")


class Handle(Generic[T]):
    """Owns the buffers of a collective until it is waited for, then finishes it once.

    Args:
        wait: blocks (CPU) or makes the current stream wait (GPU) until the collective has ended; None if nothing moves.
        buffers: tensors the collective reads or writes; kept alive until :meth:`wait`.
        finish: what turns the received buffers into the result; runs once, in the first :meth:`wait`.
    """

    # Recorded on the queue's stream after `finish`, by a queue on a GPU; a reader's stream waits for it.
    event: torch.Event | None = None

    def __init__(self, wait: Callable[[], object] | None, buffers: tuple[object, ...], finish: Callable[[], T]) -> None:
        self._wait = wait
        self._buffers = buffers
        # None once the first `wait` has called it; the result is stored then.
        self._finish: Callable[[], T] | None = finish
        self._result: T

    def then(self, finish: Callable[[T], U]) -> Handle[U]:
        """A handle whose result is that of a function of this one's."""
        return Handle(None, (), lambda: finish(self.wait()))

    def wait(self) -> T:
        """The result; the second and later calls return it again."""
        if self._finish is not None:
            if self._wait is not None:
                self._wait()
            finish, self._finish = self._finish, None
            self._result = finish()
            self._buffers, self._wait = (), None
        return self._result


class OrderedQueue:
    """Runs work beside the computation, or at once if overlap is off.

    Args:
        device: of the tensors.
        overlap: False finishes everything before it returns.
        ahead: runs that a GPU begins before it ends an older one; see Note [One ahead].

    Attributes:
        overlaps: as ``overlap``.
    """

    def __init__(self, device: torch.device, overlap: bool, ahead: int = 0) -> None:
        self.overlaps = overlap
        self._ahead = ahead
        self._on_gpu = on_gpu(device)
        # On a GPU with overlap, where all work of this queue is queued; it waits for the caller's stream first.
        self._stream = torch.Stream(device) if overlap and self._on_gpu else None
        # Begun and not ended, oldest first: ended in this order on all ranks; see Note [In order].
        self._begun: deque[Handle[Any]] = deque()

    def run(self, start: Callable[[], Handle[T]], reads: Sequence[Tensor] = ()) -> Handle[T]:
        """Begin ``start()``; the handle it returns, finished already unless this queue overlaps.

        Args:
            start: begins the work.
            reads: what it reads that the caller may free before it has ended.
        """
        if self._stream is not None:
            for tensor in reads:
                tensor.record_stream(self._stream)
        begun = self._beside(start)
        self._begun.append(begun)
        if not self.overlaps or self._on_gpu:
            self._end(self._ahead if self.overlaps else 0)
        return Handle(None, (), partial(self._wait, begun))

    def flush(self) -> None:
        """End on a GPU what has begun; the host does not wait."""
        if self._on_gpu:
            self.finish()

    def finish(self) -> None:
        """End all that has begun; on a GPU the host does not wait."""
        self._end(0)

    def _wait(self, begun: Handle[T]) -> T:
        if begun in self._begun:
            self._end(len(self._begun) - 1 - self._begun.index(begun))
        if begun.event is not None:
            begun.event.wait()
        return begun.wait()

    def _end(self, left: int) -> None:
        """End the oldest runs until so many are left."""
        while len(self._begun) > left:
            oldest = self._begun.popleft()
            self._beside(oldest.wait)
            if self._on_gpu:
                oldest.event = (self._stream or torch.accelerator.current_stream()).record_event()

    def _beside(self, work: Callable[[], T]) -> T:
        """Do something where the caller is, or queue it on this queue's stream, after what the caller has queued.

        That also keeps it from memory of this stream that the caller has freed, but still uses.
        """
        if self._stream is None:
            return work()
        caller = torch.accelerator.current_stream()
        self._stream.wait_stream(caller)
        torch.accelerator.set_stream(self._stream)  # torch.Stream is a context from torch 2.7 on
        try:
            return work()
        finally:
            torch.accelerator.set_stream(caller)


def on_gpu(device: torch.device) -> bool:
    """Whether work on a device is queued on streams; on a CPU it is done when the call returns."""
    return device.type != "cpu"
