# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Where overlapped work runs.

Note [Overlap]
    On a CPU a collective progresses in the backend's threads; what follows it (decoding, a second hop) happens when
    somebody needs the result. On a GPU everything is queued at once on a stream of its own, and whoever needs the
    result makes its stream wait for an event. Either way the same operations run on the same values: overlap changes
    when, not what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from zero_topo.collectives.handle import Handle

T = TypeVar("T")


class _After:
    """Waiting for an event makes the current stream wait, not the host."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Order the current stream after the event."""
        self._event.wait()


class Lane:
    """Runs work beside the computation, or at once if overlap is off.

    Args:
        device: of the tensors.
        overlap: False finishes everything before it returns.

    Attributes:
        overlaps: the same.
    """

    def __init__(self, device: torch.device, overlap: bool) -> None:
        self.overlaps = overlap
        self._stream = torch.Stream(device) if overlap and device.type != "cpu" else None

    def run(self, start: Callable[[], Handle[T]]) -> Handle[T]:
        """Begin ``start()``; the handle it returns, finished already unless this lane overlaps."""
        if self._stream is None:
            handle = start()
            if not self.overlaps:
                handle.wait()
            return handle
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            handle = start()
            result = handle.wait()
            event = self._stream.record_event()
        return Handle(_After(event), (), lambda: self._keep(handle, result))

    @staticmethod
    def _keep(handle: Handle[T], result: T) -> T:
        """The handle owns the buffers the side stream used until the current stream waits for it."""
        del handle
        return result
