# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A device of symbolic streams: what is read and written on which, byte by byte, and whether that
is ordered.

Tensors lie on the CPU and every operation runs at once, so results are right whatever the order;
but what a GPU would run on a stream is booked there. Two accesses of one byte, one of them a write,
on streams of which neither has waited for the other are a race; so is memory that its stream takes
again while another still uses it and it was not recorded on that one (torch's caching allocator
gives it away). Both are errors with both stack traces.

Clocks
    Each operation has a number. A stream's clock says of every stream up to which it has waited for
    it; an event keeps a copy of a clock (vector clocks, as torch.cuda._sanitizer keeps them, which
    knows no elements).

An operation is one of torch, a kernel's call (whatever the reference does inside it), or a
collective.

Note [The host]
    Memory that was named to :meth:`Device.host` is the host's, page-locked; where tests run on a
    device (see ``tests/device.py``), so is that of every tensor of the CPU. What touches no other
    runs on the host at once. It waits for a stream where it synchronizes, or where a copy to or
    from its memory blocks. What it queues comes after all that it has done.

Note [Threads]
    Each thread has its own current stream, as on a GPU: autograd calls hooks in a thread of its own
    (:meth:`Device.in_autograds_thread`). One thread runs at a time.
"""

from __future__ import annotations

import linecache
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import CodeType, FrameType, MappingProxyType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.device import DEVICE, ON_GPU
from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Group
from zero_topo.quant import reference
from zero_topo.quant.operands import Codes, Messages, View, views_of

MAIN = "main"
HOST = "host"
Numbers = NDArray[np.int64]
Places = slice | Numbers
Trace = list[tuple[CodeType, int]]
Booking = tuple[torch.UntypedStorage, Places]


class RaceError(BaseException):
    """Two accesses without an order, or memory freed too early; code that catches an Exception does
    not hide it.
    """


BLOCKING = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
"""Operations that make the host wait if the host's memory is on one side, unless they are
asynchronous.
"""


@dataclass
class _Memory:
    """A storage: per byte, the number of the last write and of the last read by each stream."""

    storage: weakref.ref[torch.UntypedStorage]
    home: str
    size: int
    wrote: dict[str, Numbers] = field(default_factory=dict)
    read: dict[str, Numbers] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)


class Event:
    """What a stream had done when it was recorded."""

    def __init__(self, device: Device, clock: dict[str, int]) -> None:
        self._device, self._clock = device, clock

    def record(self) -> None:
        """What the current stream has done."""
        self._clock = dict(self._device.clocks[self._device.current])

    def wait(self) -> None:
        """The current stream goes on after it."""
        self._device.catch_up(self._device.current, self._clock)


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

    def synchronize(self) -> None:
        """The host waits for what is queued here, and whatever is queued later comes after it."""
        for name in self._device.clocks:
            self._device.catch_up(name, self._device.clocks[self.name])

    def __enter__(self) -> Stream:
        self._device.entered.append(self.name)
        return self

    def __exit__(self, *error: object) -> None:
        self._device.entered.pop()


class _Thread(threading.local):
    """The streams that a thread has entered, the current one last."""

    def __init__(self) -> None:
        self.entered = [MAIN]


class Device(TorchDispatchMode):
    """The device; within it, operations are booked on the current stream.

    Attributes:
        log: stream, name and number of each kernel's call and collective, and what the stream had
            waited for, in the order in which they were queued.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clocks: dict[str, dict[str, int]] = {MAIN: {}, HOST: {}}
        self._thread = _Thread()
        self._hosts: set[int] = set()
        self.log: list[tuple[str, str, int, dict[str, int]]] = []
        self._number = 0
        self._traces: list[Trace] = [[]]
        self._memory: dict[int, _Memory] = {}
        self._free: dict[str, list[dict[str, int]]] = {}

    @property
    def entered(self) -> list[str]:
        """Of this thread, the streams that it has entered."""
        return self._thread.entered

    @property
    def current(self) -> str:
        """The current stream's name."""
        return self.entered[-1]

    def stream(self, name: str = "") -> Stream:
        """A stream, by default a new one."""
        name = name or f"stream {len(self.clocks)}"
        self.clocks.setdefault(name, {})
        return Stream(self, name)

    def current_stream(self) -> Stream:
        """The current one."""
        return self.stream(self.current)

    def set_stream(self, stream: Stream) -> None:
        """Make a stream the current one."""
        self.entered[-1] = stream.name

    def synchronize(self) -> None:
        """The host waits for all streams."""
        for name in self.clocks:
            Stream(self, name).synchronize()

    def catch_up(self, stream: str, clock: dict[str, int]) -> None:
        """A stream waits for what a clock says."""
        own = self.clocks[stream]
        for other, number in clock.items():
            own[other] = max(own.get(other, 0), number)

    def record(self, tensor: Tensor, stream: Stream) -> None:
        """``Tensor.record_stream``."""
        self._memory_of(tensor.untyped_storage()).recorded.add(stream.name)

    def host(self, *tensors: Tensor) -> None:
        """Take the memory of tensors for page-locked memory of the host, see Note [The host]."""
        self._hosts.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def _is_hosts(self, tensor: Tensor) -> bool:
        """See Note [The host]."""
        return tensor.device.type != DEVICE.type or tensor.untyped_storage()._cdata in self._hosts

    def in_autograds_thread(self, work: Callable[[], object]) -> None:
        """Run something where autograd calls hooks, see Note [Threads]."""

        def run() -> None:
            with self:
                work()

        with ThreadPoolExecutor(max_workers=1) as threads:
            threads.submit(run).result()

    # -- operations --------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "zero_topo" and func._opname in KERNELS:
            name, booked = KERNELS[func._opname]
            with self.call(name, *booked(*args)):
                return func(*args)
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        given: dict[bool, list[Tensor]] = {False: [], True: []}
        names, touches = _known(func)
        values = [*args, *(kwargs.get(name) for name, _ in names[len(args) :])]
        for (_, writes), value in zip(names, values, strict=True):
            given[writes] += _tensors(value)
        made = [] if given[True] else _tensors(out)
        keys = {tensor.untyped_storage()._cdata for tensor in given[False]}
        new = [tensor for tensor in made if tensor.untyped_storage()._cdata not in keys]
        touched = [*given[False], *given[True], *(new if ON_GPU else ())]
        hosts = list(map(self._is_hosts, touched))
        on_host = bool(hosts) and all(hosts)
        if on_host:
            self.host(*new)
            self.entered.append(HOST)
        try:
            with self._operation(func._schema.name):
                if new:
                    self._reuse(func._schema.name)
                if touches:
                    self._book(func._schema.name, False, map(_all_of, given[False]))
                    self._book(func._schema.name, True, map(_all_of, given[True] + new))
                for tensor in new:
                    self._memory_of(tensor.untyped_storage())
        finally:
            if on_host:
                self.entered.pop()
        asynchronous = kwargs.get("non_blocking", len(args) > 2 and args[2])
        if func in BLOCKING and any(hosts) and not on_host and not asynchronous:
            self.current_stream().synchronize()
        return out

    @contextmanager
    def call(
        self, name: str, reads: Iterable[Booking], writes: Iterable[Booking]
    ) -> Iterator[None]:
        """A kernel or a collective on the current stream; what is done inside is not booked."""
        with _disable_current_modes(), self._operation(name):
            clock = dict(self.clocks[self.current])
            self.log.append((self.current, name, self._number, clock))
            self._book(name, False, reads)
            self._book(name, True, writes)
            yield

    @contextmanager
    def _operation(self, name: str) -> Iterator[None]:
        self._number += 1
        self.catch_up(self.current, self.clocks[HOST])
        self._traces.append(_trace(sys._getframe(1)))
        self.clocks[self.current][self.current] = self._number
        yield

    def _memory_of(self, storage: torch.UntypedStorage) -> _Memory:
        key = storage._cdata
        if key not in self._memory:
            weak = weakref.ref(storage, lambda _: self._freed(key))
            self._memory[key] = _Memory(weak, self.current, storage.nbytes())
        return self._memory[key]

    def _book(self, name: str, writes: bool, accesses: Iterable[Booking]) -> None:
        stream, clock = self.current, self.clocks[self.current]
        for storage, places in accesses:
            memory = self._memory_of(storage)
            for kind in (memory.wrote, memory.read) if writes else (memory.wrote,):
                for other, numbers in kind.items():
                    if other == stream:
                        continue
                    last = int(numbers[places].max(initial=0))
                    if last > clock.get(other, 0):
                        raise RaceError(
                            self._story(f"{name} on {stream}", f"an access on {other}", last)
                        )
            kind = memory.wrote if writes else memory.read
            if stream not in kind:
                kind[stream] = np.zeros(memory.size, dtype=np.int64)
            kind[stream][places] = self._number

    def _freed(self, key: int) -> None:
        """Memory that was freed waits for the next allocation on its stream."""
        memory = self._memory.pop(key)
        self._hosts.discard(key)
        last: dict[str, int] = {}
        for kind in (memory.read, memory.wrote):
            for stream, numbers in kind.items():
                if stream not in (memory.home, *memory.recorded):
                    last[stream] = max(last.get(stream, 0), int(numbers.max(initial=0)))
        if last:
            self._free.setdefault(memory.home, []).append(last)

    def _reuse(self, name: str) -> None:
        """The current stream takes memory that was freed: nobody may use it any more."""
        for others in self._free.pop(self.current, []):
            for stream, number in others.items():
                if number > self.clocks[self.current].get(stream, 0):
                    what = f"memory of {self.current} is free, and its use again for {name}"
                    raise RaceError(self._story(what, f"its use on {stream}", number))

    def _story(self, what: str, before: str, number: int) -> str:
        here = _trace(sys._getframe(1))
        return "\n".join(
            [
                f"{what} is not ordered after {before}, which was:",
                *_settings(self._traces[number]),
                "now:",
                *_settings(here),
            ]
        )


@cache
def _known(func: Any) -> tuple[tuple[tuple[str, bool], ...], bool]:
    """Of an operation: its arguments, and whether it writes them; and whether it touches any
    memory.
    """
    arguments = func._schema.arguments
    writes = ((a.name, a.alias_info is not None and a.alias_info.is_write) for a in arguments)
    return tuple(writes), "empty" not in func._schema.name


def _tensors(value: Any) -> list[Tensor]:
    parts = value if isinstance(value, list | tuple) else [value]
    return [part for part in parts if isinstance(part, Tensor)]


def _trace(frame: FrameType | None) -> Trace:
    """The package's functions and lines, innermost first."""
    found: Trace = []
    while frame is not None:
        if "/zero_topo/" in frame.f_code.co_filename:
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


def _settings(trace: Trace) -> list[str]:
    found = []
    for code, line in trace:
        file = code.co_filename
        text = linecache.getline(file, line).strip()
        found.append(f"  {file.rsplit('/zero_topo/', 1)[-1]}:{line} {text}")
    return found


# -- where things lie ------------------------------------------------------------------------------


def _all_of(tensor: Tensor) -> Booking:
    """All elements of a tensor."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    return tensor.untyped_storage(), _places(
        int(tensor.storage_offset()), shape, strides, tensor.element_size()
    )


@lru_cache(maxsize=1 << 16)
def _places(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> Places:
    """The bytes of elements that lie so in a storage."""
    where = _elements(offset, shape, strides)
    count = where.size
    if not count or int(where.max()) - offset == count - 1:
        return slice(offset * item, (offset + count) * item)
    return _bytes(where, item)


def _elements(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Numbers:
    where = np.array(offset, dtype=np.int64)
    for size, stride in zip(shape, strides, strict=True):
        where = where[..., None] + np.arange(size, dtype=np.int64) * stride
    return where


def _bytes(elements: Numbers, item: int) -> Numbers:
    return (np.unique(elements)[:, None] * item + np.arange(item)).reshape(-1)


def _of_pieces(pieces: Sequence[View], messages: Messages) -> list[Booking]:
    """What messages are made of, or become: the elements that exist of the members that are not
    left out.
    """
    return [
        (piece.flat.untyped_storage(), _of_piece(piece, messages.without_member))
        for piece in pieces
    ]


def _of_piece(piece: View, without: int) -> Places:
    shape, strides = (
        (piece.members, piece.rows, piece.width),
        (piece.member_stride, piece.stride, 1),
    )
    where = _elements(0, shape, strides)
    where = where if without < 0 else np.delete(where, without, 0)
    return _bytes(
        where[where < piece.flat.numel()] + int(piece.flat.storage_offset()),
        piece.flat.element_size(),
    )


def _of_messages(messages: Messages) -> list[Booking]:
    table = messages.table
    where = _elements(int(table.storage_offset()), tuple(table.shape), table.stride())
    where = where.reshape(table.shape[0], messages.members, -1)
    for axis, without in ((0, messages.without_source), (1, messages.without_member)):
        where = where if without < 0 else np.delete(where, without, axis)
    return [(table.untyped_storage(), _bytes(where, 1))]


def _of_codes(codes: Codes, member: int) -> Booking:
    """Codes and scales of the blocks of one member's message."""
    with _disable_current_modes():
        codes_at, scales_at = (places.cpu().numpy() for places in reference._places(codes, member))
        where = (codes_at.reshape(-1), (4 * scales_at[:, None] + np.arange(4)).reshape(-1))
    return codes.stored.untyped_storage(), np.concatenate(where)


# -- kernels whose schemas say less than what they touch; sparse ones touch all of their arguments -

Accesses = tuple[list[Booking], list[Booking]]
"""What is read, and what is written."""


def _quantize(
    flats: list[Tensor], shapes: list[int], _: object, table: Tensor, without: int
) -> Accesses:
    messages = Messages(table, -1, without)
    return _of_pieces(views_of(flats, shapes, messages.members), messages), _of_messages(messages)


def _reduce(
    table: Tensor, source: int, member: int, _: object, flats: Any, shapes: Any, *how: object
) -> Accesses:
    messages = Messages(table, source, member)
    return _of_messages(messages), _of_pieces(views_of(flats, shapes, messages.members), messages)


def _requantize(
    table: Tensor, source: int, _: object, out: Tensor, member: int, *how: object
) -> Accesses:
    return _of_messages(Messages(table, source)), _of_messages(Messages(out, -1, member))


def _assess(masters: Tensor, own: list[int], *rest: Any) -> Accesses:
    stored, made = rest[:4], rest[4:]
    return [_all_of(masters), _of_codes(Codes(*stored), own[1])], [*map(_all_of, made)]


def _emit(masters: Tensor, own: list[int], *rest: Any) -> Accesses:
    *change, message = rest[4:]
    codes = _of_codes(Codes(*rest[:4]), own[1])
    return [*map(_all_of, (masters, *change)), codes], [codes, _all_of(message)]


def _apply(table: Tensor, without: int, *stored: Any) -> Accesses:
    messages = Messages(table, -1, without)
    codes = [_of_codes(Codes(*stored), member) for member in messages.kept()]
    return [*_of_messages(messages), *codes], codes


KERNELS: Mapping[str, tuple[str, Callable[..., Accesses]]] = MappingProxyType(
    {
        "quantize": ("encode", _quantize),
        "dequantize_reduce": ("decode", _reduce),
        "requantize": ("recode", _requantize),
        "codes_assess": ("assess", _assess),
        "codes_emit": ("emit", _emit),
        "codes_apply": ("apply", _apply),
    }
)

# -- in place of the accelerator -------------------------------------------------------------------


class _Torch:
    """torch with the streams and events of a symbolic device."""

    def __init__(self, device: Device) -> None:
        self.accelerator = device
        self.Event = lambda _: Event(device, {})
        self.Stream = lambda _, priority: device.stream(
            f"stream {len(device.clocks)}, priority {priority}"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Symbolic(Group):
    """Brings what was sent, each exchange on a stream of its communicator."""

    device: Device

    def _all_gather(self, x: Tensor, counts: Sequence[int] = ()) -> Handle[Tensor]:
        if counts:
            return self._all_to_all(x, counts, counts)
        received = x.new_empty(self.size, *x.shape)
        return self._queued(x, received, lambda: received.copy_(x.expand_as(received)))

    def _all_to_all(
        self, x: Tensor, counts: Sequence[int] = (), expected: Sequence[int] = ()
    ) -> Handle[Tensor]:
        """Brings zeros, if rows are sent."""
        if counts:
            received = self._room(expected, x)
            return self._queued(x, received, received.zero_)
        received = torch.empty_like(x)
        return self._queued(x, received, lambda: received.copy_(x))

    def _reduce_scatter(self, x: Tensor) -> Handle[Tensor]:
        received = torch.empty_like(x[:1])
        return self._queued(x, received, lambda: received.copy_(x[:1]))

    def _queued(self, sent: Tensor, received: Tensor, move: Callable[[], object]) -> Handle[Tensor]:
        transport = self.device.stream(f"nccl {self.lo}-{self.hi}")
        transport.wait_stream(self.device.current_stream())
        with transport, self.device.call("exchange", [_all_of(sent)], [_all_of(received)]):
            move()
        return Handle(received, transport.record_event().wait, (sent, received))


def _as_on_a_gpu(device: Device) -> list[Any]:
    """What makes the engine take the CPU for a GPU."""
    return [
        patch("zero_topo.collectives.queue.on_gpu", lambda _: True),
        patch("zero_topo.engine.state_offload.on_gpu", lambda _: True),
        patch(
            "zero_topo.engine.weights.recorded_event",
            lambda _: device.current_stream().record_event(),
        ),
    ]


@contextmanager
def symbolic_device() -> Iterator[Device]:
    """Queues, events, kernels and collectives of the engine on symbolic streams."""
    device = Device()
    groups = type("Symbolic", (_Symbolic,), {"device": device})
    patches: list[Any] = [
        patch("zero_topo.collectives.queue.torch", _Torch(device)),
        patch("zero_topo.engine.weights.torch", _Torch(device)),
        patch.object(torch.accelerator, "synchronize", device.synchronize),
        patch("zero_topo.collectives.backends.transport", lambda: groups),
        patch.object(Tensor, "record_stream", lambda tensor, stream: device.record(tensor, stream)),
    ]
    with ExitStack() as stack:
        for patched in patches + ([] if ON_GPU else _as_on_a_gpu(device)):
            stack.enter_context(patched)
        yield stack.enter_context(device)
