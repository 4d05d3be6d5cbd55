# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Where collectives run beside the computation, and in which order they end.

Note [Overlap]
    On a CPU a collective progresses in the backend's threads; what follows it (decoding, a second hop) happens when
    somebody needs the result. On a GPU it is queued on a stream of its own, and whoever needs the result makes its
    stream wait for an event. Either way the same operations run on the same values: overlap changes when, not what.

Note [In order]
    What follows a collective may be another one, so it has to follow in one order on all ranks. Who needs which result
    first may differ between them (DeepSpeed waits in the order of a set): so whoever waits for one ends all that were
    begun before it.

Note [One ahead]
    A lane whose runs end as soon as the next has begun sends the next run's messages while it decodes this one's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from zero_topo.collectives.handle import Handle

T = TypeVar("T")


class _Run(Generic[T]):
    """Work that has begun; ``event`` says on a GPU that it has ended."""

    def __init__(self, handle: Handle[T]) -> None:
        self.handle = handle
        self.event: torch.Event | None = None


class Lane:
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
        self._stream = torch.Stream(device) if overlap and self._on_gpu else None
        self._begun: deque[_Run[Any]] = deque()

    def run(self, start: Callable[[], Handle[T]], reads: Sequence[Tensor] = ()) -> Handle[T]:
        """Begin ``start()``; the handle it returns, finished already unless this lane overlaps.

        Args:
            start: begins the work.
            reads: what it reads that the caller may free before it has ended.
        """
        if self._stream is not None:
            for tensor in reads:
                tensor.record_stream(self._stream)
        run = _Run(self._beside(start))
        self._begun.append(run)
        if not self.overlaps or self._on_gpu:
            self._end(self._ahead if self.overlaps else 0)
        return Handle(None, (), partial(self._wait, run))

    def flush(self) -> None:
        """End on a GPU what has begun; nobody waits."""
        if self._on_gpu:
            self.finish()

    def finish(self) -> None:
        """End all that has begun; on a GPU nobody waits."""
        self._end(0)

    def _wait(self, run: _Run[T]) -> T:
        if run in self._begun:
            self._end(len(self._begun) - 1 - self._begun.index(run))
        if run.event is not None:
            run.event.wait()
        return run.handle.wait()

    def _end(self, left: int) -> None:
        """End the oldest runs until so many are left."""
        while len(self._begun) > left:
            run = self._begun.popleft()
            self._beside(run.handle.wait)
            if self._on_gpu:
                run.event = (self._stream or torch.accelerator.current_stream()).record_event()

    def _beside(self, work: Callable[[], T]) -> T:
        """Do something where the caller is, or queue it on this lane's stream, after what the caller has queued.

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
