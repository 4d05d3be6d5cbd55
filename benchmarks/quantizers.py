# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How fast block quantization is: every backend and its peers on the same buffers, against a plain
copy.

Traffic
    A kernel that is bound by memory moves the bytes it reads and those it writes. ``gb_per_s`` is
    both together over the median time, and ``memcpy_ratio`` compares that with a copy that moves as
    much in total. All kernels of a format and their copies are timed in turns, so that a busy
    machine slows all alike. Outputs are allocated and touched before. The reduction's traffic is
    what it reads from all sources and what it writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import ROW, SOURCES, Op, keep_freed_memory, peers
from benchmarks.records import GrowingRecord, Spread, Tick, record
from zero_topo.quant import ops
from zero_topo.quant.operands import DTYPES
from zero_topo.quant.operators import BACKENDS, BackendUnavailable, use
from zero_topo.quant.spec import NF4, BlockSpec
from zero_topo.units import GB

PLACES = 3  # a copy begins where none was for two turns, so that no cache helps it


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        nbytes: size of the unquantized buffer.
        repeats: timed calls of each kernel, each followed by a copy.
        threads: numbers of torch threads.
        dtypes: of the unquantized values.
        block_sizes: of the wire format.
        bits: of the wire format; NF4, whose blocks have one size, goes with 4.
        device: "cpu" or "cuda".
    """

    nbytes: int = 64 << 20
    repeats: int = 15
    threads: tuple[int, ...] = (1, 2)
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    block_sizes: tuple[int, ...] = (256, 2048)
    bits: tuple[int, ...] = (8, 4)
    device: str = "cpu"

    def __post_init__(self) -> None:
        unknown = [name for name in self.dtypes if name not in DTYPES]
        if unknown:
            raise ValueError(f"dtype {unknown[0]} cannot be quantized; choose of {list(DTYPES)}")
        if self.device not in ("cpu", "cuda") or (
            self.device == "cuda" and not torch.cuda.is_available()
        ):
            raise ValueError(
                f"device {self.device} is not here; choose cpu, or cuda where there is a GPU"
            )
        if self.nbytes < SOURCES * ROW * 4:
            raise ValueError(
                f"a buffer of {self.nbytes} bytes is too small to measure; give at least "
                f"{SOURCES * ROW * 4}"
            )
        self.formats()  # refuses unknown ones

    def formats(self) -> list[BlockSpec]:
        """Wire formats to measure."""
        plain = [BlockSpec(f"int{bits}", block) for bits in self.bits for block in self.block_sizes]
        return [*plain, NF4] if 4 in self.bits else plain

    def rounds(self) -> list[tuple[str, int]]:
        """Each dtype with each number of threads, of which a GPU needs one."""
        threads = self.threads if self.device == "cpu" else self.threads[:1]
        return [(dtype, count) for dtype in self.dtypes for count in threads]

    def ticks(self) -> int:
        """Formats that :func:`run` announces, one tick each."""
        return len(self.rounds()) * len(self.formats())

    def to_json(self) -> dict[str, Any]:
        """In JSON types."""
        return {**asdict(self), "sources": SOURCES}


def run(settings: Settings, tick: Tick) -> GrowingRecord:
    """Measure everything.

    Args:
        settings: what.
        tick: called after each format of each round, with the word for what is measured and 1.

    Yields:
        The record so far, after each round of one dtype and number of threads; ``results`` has one
        entry per kernel and number of threads: backend, op, dtype, bits, block_size, threads,
        seconds (with spread), gb_per_s, memcpy_gb_per_s and memcpy_ratio. ``skipped``
        says what is not there.
    """
    results: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    before = torch.get_num_threads()
    keep_freed_memory()
    device = torch.device(settings.device)
    backends = _backends(device, skipped)
    others = list(peers(device, skipped))
    name = torch.cuda.get_device_name() if settings.device == "cuda" else None
    for dtype, count in settings.rounds():
        torch.set_num_threads(count)
        use(backends[0], device)
        x = _values(settings.nbytes, DTYPES[dtype], device)
        alien = [(peer.name, op) for peer in others for op in peer.prepare(x)]
        for spec in settings.formats():
            own = [(name, op) for name in backends for op in _ops(spec, x)]
            kernels = [(name, replace(op, prepare=partial(use, name, device))) for name, op in own]
            kernels += [
                (peer, op)
                for peer, op in alien
                if (op.bits, op.block_size) == (spec.bits, spec.block_size)
            ]
            timed = _timed([op for _, op in kernels], settings)
            for (backend, op), result in zip(kernels, timed, strict=True):
                results.append(
                    {"backend": backend, "op": op.name, "dtype": dtype, **result, "threads": count}
                )
            tick("kernels", 1)
        torch.set_num_threads(before)
        yield record(
            "quantizers",
            settings.to_json(),
            {"device": name, "results": results, "skipped": skipped},
        )


def _backends(device: torch.device, skipped: dict[str, str]) -> list[str]:
    found = []
    for name, load in BACKENDS.items():
        try:
            load(device)
            found.append(name)
        except BackendUnavailable as reason:
            skipped[name] = str(reason)
    return found


def _values(nbytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    numel = nbytes // dtype.itemsize // (SOURCES * ROW) * SOURCES * ROW
    return torch.randn(numel, generator=generator).to(dtype).to(device)


def _ops(spec: BlockSpec, x: Tensor) -> list[Op]:
    message = ops.quantize(x, spec)
    back = torch.zeros_like(x)
    messages = ops.quantize(x.view(SOURCES, 1, -1), spec)
    total = torch.zeros_like(x[: x.numel() // SOURCES])
    both = x.nbytes + message.nbytes
    reduced = messages.nbytes + total.nbytes
    kind = spec.bits, spec.block_size
    return [
        Op("quantize", lambda: ops.quantize(x, spec, message), both, *kind),
        Op("dequantize", lambda: ops.dequantize(message, spec, back), both, *kind),
        Op(
            "dequantize_reduce",
            lambda: ops.dequantize_reduce(messages, spec, total),
            reduced,
            *kind,
        ),
    ]


def _timed(ops: Sequence[Op], settings: Settings) -> list[dict[str, Any]]:
    """Times kernels of one format in turns, each followed by a copy of its traffic."""
    most = max(op.traffic for op in ops) // 2
    places = [most * k for k in range(PLACES)]
    source = torch.ones(most * PLACES, dtype=torch.uint8, device=settings.device)
    target = torch.zeros_like(source)
    place = cycle(places)
    clock = _Clock(settings.device)
    own: list[list[float]] = [[] for _ in ops]
    copies: list[list[float]] = [[] for _ in ops]
    for turn in range(-1, settings.repeats):
        for op, times, copied in zip(ops, own, copies, strict=True):
            op.prepare()
            begin = next(place)
            end = begin + op.traffic // 2
            took = (
                clock.time(op.call),
                clock.time(partial(target[begin:end].copy_, source[begin:end])),
            )
            if turn >= 0:
                times.append(took[0])
                copied.append(took[1])
    return [
        _result(op, Spread.of(a), Spread.of(b)) for op, a, b in zip(ops, own, copies, strict=True)
    ]


def _result(op: Op, own: Spread, copy: Spread) -> dict[str, Any]:
    speed = op.traffic / own.median / GB
    copied = op.traffic // 2 * 2 / copy.median / GB
    return {
        "bits": op.bits,
        "block_size": op.block_size,
        "gb_per_s": speed,
        "memcpy_gb_per_s": copied,
        "memcpy_ratio": speed / copied,
        "seconds": own.to_json(),
    }


class _Clock:
    """Seconds of one call; on a GPU those between two events, without the host's launch."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"

    def time(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call."""
        if self._on_gpu:
            return self._time_on_gpu(call)
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    def _time_on_gpu(self, call: Callable[[], object]) -> float:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        call()  # the GPU is busy with this one while the host launches the next
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
