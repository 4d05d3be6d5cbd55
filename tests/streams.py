# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A device of symbolic streams: what is read and written on which, element by element, and whether that is ordered.

Tensors lie on the CPU and every operation runs at once, so results are right whatever the order; but what a GPU would
run on a stream is booked there. Two accesses of one element, one of them a write, on streams of which neither has
waited for the other are a race; so is memory that its stream takes again while another still uses it and it was not
recorded on that one (torch's caching allocator gives it away). Both are errors with both stack traces.

Note [Clocks]
    Each operation has a number. A stream's clock says, for every stream, up to which number it has waited for it; an
    event keeps a copy of a clock (vector clocks, as torch.cuda._sanitizer keeps them, which knows no elements).
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from zero_topo.collectives.handle import Handle
from zero_topo.mesh import Hop

MAIN = "main"
Numbers = NDArray[np.int64]
Trace = list[tuple[str, int]]


class RaceError(Exception):
    """Two accesses without an order, or memory freed too early."""


@dataclass
class _Memory:
    """A storage: per byte, the number of the last write and of the last read by each stream."""

    weak: StorageWeakRef
    home: str
    size: int
    wrote: dict[str, Numbers] = field(default_factory=dict)
    read: dict[str, Numbers] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)


class Event:
    """What a stream had done when it was recorded."""

    def __init__(self, device: Device, clock: dict[str, int]) -> None:
        self._device, self._clock = device, clock

    def wait(self, stream: Stream | None = None) -> None:
        """The current stream (or this one) goes on after it."""
        self._device.catch_up(stream.name if stream else self._device.current, self._clock)


class Stream:
    """One queue of the device; as a context, where operations are queued."""

    def __init__(self, device: Device, name: str) -> None:
        self._device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        """Go on after all that is queued on the other."""
        self._device.catch_up(self.name, self._device.clocks[other.name])

    def record_event(self) -> Event:
        """All that is queued here so far."""
        return Event(self._device, dict(self._device.clocks[self.name]))

    def __enter__(self) -> Stream:
        self._device.entered.append(self.name)
        return self

    def __exit__(self, *error: object) -> None:
        self._device.entered.pop()


class Device(TorchDispatchMode):
    """The device; within it, operations are booked on the current stream."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks: dict[str, dict[str, int]] = {MAIN: {}}
        self.entered = [MAIN]
        self._number = 0
        self._traces: dict[int, Trace] = {}
        self._memory: dict[int, _Memory] = {}
        self._free: dict[str, list[dict[str, int]]] = {}

    @property
    def current(self) -> str:
        """The current stream's name."""
        return self.entered[-1]

    def stream(self, name: str = "") -> Stream:
        """A stream, by default a new one."""
        name = name or f"stream {len(self.clocks)}"
        self.clocks.setdefault(name, dict(self.clocks[MAIN]) if name == MAIN else {})
        return Stream(self, name)

    def current_stream(self) -> Stream:
        """The current one."""
        return self.stream(self.current)

    def catch_up(self, stream: str, clock: dict[str, int]) -> None:
        """A stream waits for what a clock says."""
        self._look_for_freed()
        own = self.clocks[stream]
        for other, number in clock.items():
            own[other] = max(own.get(other, 0), number)

    def synchronize(self) -> None:
        """The host waits for everything, and so does whatever is queued later."""
        everything = {name: clock.get(name, 0) for name, clock in self.clocks.items()}
        for name in self.clocks:
            self.catch_up(name, everything)

    def record(self, tensor: Tensor, stream: Stream) -> None:
        """``Tensor.record_stream``."""
        self._memory_of(tensor).recorded.add(stream.name)

    # -- operations ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look_for_freed()
        kwargs = kwargs or {}
        before = {self._key(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
        out = func(*args, **kwargs)
        self._number += 1
        self._traces[self._number] = _trace()
        self.clocks[self.current][self.current] = self._number
        schema = func._schema
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
        for argument, value in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_flatten(value)[0]:
                if isinstance(tensor, Tensor) and not view:
                    self._access(tensor, writes, str(schema.name))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor) and self._key(tensor) not in before:
                self._reuse()
                self._access(tensor, "empty" not in schema.name, str(schema.name))
        return out

    def _key(self, tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def _memory_of(self, tensor: Tensor) -> _Memory:
        key = self._key(tensor)
        if key not in self._memory:
            storage = tensor.untyped_storage()
            self._memory[key] = _Memory(StorageWeakRef(storage), self.current, storage.nbytes())
        return self._memory[key]

    def _access(self, tensor: Tensor, writes: bool, name: str) -> None:
        memory = self._memory_of(tensor)
        if not tensor.numel() or name.startswith("aten::empty") or name.startswith("aten::new_empty"):
            return
        places = _bytes_of(tensor, memory.size)
        clock = self.clocks[self.current]
        kinds = [memory.wrote, memory.read] if writes else [memory.wrote]
        for kind in kinds:
            for stream, numbers in kind.items():
                last = int(numbers[places].max())
                if stream != self.current and last > clock.get(stream, 0):
                    raise RaceError(self._story(f"{name} on {self.current}", f"an access on {stream}", last))
        table = (memory.wrote if writes else memory.read).setdefault(
            self.current, np.zeros(memory.size, dtype=np.int64)
        )
        table[places] = self._number

    def _look_for_freed(self) -> None:
        """Memory that was freed waits for the next allocation on its stream."""
        for key, memory in [(k, m) for k, m in self._memory.items() if m.weak.expired()]:
            del self._memory[key]
            last = {stream: number for table in (memory.read, memory.wrote) for stream, number in _last(table)}
            others = {stream: last[stream] for stream in last if stream not in (memory.home, *memory.recorded)}
            if others:
                self._free.setdefault(memory.home, []).append(others)

    def _reuse(self) -> None:
        """The current stream takes memory that was freed: nobody may use it any more."""
        for others in self._free.pop(self.current, []):
            for stream, number in others.items():
                if number > self.clocks[self.current].get(stream, 0):
                    what = f"memory of {self.current} is free, and its use again"
                    raise RaceError(self._story(what, f"its use on {stream}", number))

    def _story(self, what: str, before: str, number: int) -> str:
        here = _trace()
        return "\n".join(
            [f"{what} is not ordered after {before}, which was:", *_ours(self._traces[number]), "now:", *_ours(here)]
        )


def _last(table: dict[str, Numbers]) -> list[tuple[str, int]]:
    return [(stream, int(numbers.max())) for stream, numbers in table.items()]


def _trace() -> Trace:
    """Files and lines, innermost first."""
    return [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]


def _ours(trace: Trace) -> list[str]:
    """The lines of the package."""
    ours = [(file.rsplit("/zero_topo/", 1)[-1], file, line) for file, line in trace if "/zero_topo/" in file]
    return [f"  {short}:{line} {linecache.getline(file, line).strip()}" for short, file, line in ours]


def _bytes_of(tensor: Tensor, size: int) -> Numbers:
    """Where a tensor's elements lie in its storage."""
    item = tensor.element_size()
    places = np.arange(size // item, dtype=np.int64)[tensor.storage_offset() :]
    strides = [stride * 8 for stride in tensor.stride()]
    first = np.lib.stride_tricks.as_strided(places, tensor.shape, strides).reshape(-1) * item
    return (first[:, None] + np.arange(item)).reshape(-1)


# -- in place of the accelerator -----------------------------------------------------------------------------------


class _Torch:
    """What ``collectives/lane.py`` uses of torch, on a symbolic device."""

    def __init__(self, device: Device) -> None:
        self.accelerator = device
        self.Stream = lambda _: device.stream()
        self.Event = Event


@contextmanager
def symbolic_device() -> Iterator[Device]:
    """Lanes, events and collectives of the engine on symbolic streams; a collective runs on one of its group's."""
    device = Device()

    def queued(hop: Hop, reads: Sequence[Tensor], received: Tensor, move: Callable[[], object]) -> Handle[Tensor]:
        transport = device.stream(f"nccl {hop.lo}-{hop.hi}")
        transport.wait_stream(device.current_stream())
        with transport:
            move()
            event = transport.record_event()
        return Handle(event, (*reads, received), lambda: received)

    def to_all(hop: Hop, message: Tensor) -> Handle[Tensor]:
        received = torch.empty(hop.size, message.numel(), dtype=message.dtype)
        return queued(hop, [message], received, lambda: received.copy_(message.expand(hop.size, -1)))

    def to_each(hop: Hop, table: Tensor) -> Handle[Tensor]:
        received = torch.empty_like(table)
        return queued(hop, [table], received, lambda: received.copy_(table))

    def recorded_event(_: torch.device) -> Event:
        return device.current_stream().record_event()

    with (
        patch("zero_topo.collectives.lane.torch", _Torch(device)),
        patch("zero_topo.collectives.lane.on_gpu", lambda _: True),
        patch("zero_topo.engine.weights.recorded_event", recorded_event),
        patch("zero_topo.collectives.peers.to_all", to_all),
        patch("zero_topo.collectives.peers.to_each", to_each),
        patch.object(Tensor, "record_stream", lambda tensor, stream: device.record(tensor, stream)),
        device,
    ):
        yield device
