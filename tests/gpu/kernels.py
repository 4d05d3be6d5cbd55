# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu.kernels FOLDER`: times our kernels next to a copy of as many bytes, for
messages of 4 MB to 2 GB, and for the rows of a shard of 384 ranks, which begin at odd addresses.

Calls follow one another, so that no kernel waits for the host. The record has the clock of the GPU
during each size.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import records
from tests.device import DEVICE, ON_GPU
from tests.kernels.operators import Operators
from tests.launching import output
from zero_topo.quant import operators
from zero_topo.quant.operands import View, from_sources, to_members, view_of
from zero_topo.quant.spec import NF4, BlockSpec, Cast, Format

BLOCKS = (BlockSpec("int8"), BlockSpec("int4"), NF4)
MEGABYTES = (2048, 256, 64, 16, 4) if ON_GPU else (0.0625,)
REPEATS = 20 if ON_GPU else 1
SOURCES = 8
RANKS, WIDTH = 384, 43_691
"""Of the shards with odd rows: a matrix of 16,777,344 values in a row for each rank."""


def seconds_of(call: Callable[[], Any]) -> float:
    """The median of calls that follow one another."""
    for _ in range(3):
        call()
    if not ON_GPU:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in pairwise(events)) / 1e3


def copy_seconds(nbytes: int) -> float:
    """The seconds of a copy that reads and writes as many bytes in all."""
    half = torch.empty(2, nbytes // 2, dtype=torch.uint8, device=DEVICE)
    return seconds_of(lambda: half[1].copy_(half[0]))


def timed(call: Callable[[], Any], nbytes: int, **what: Any) -> dict[str, Any]:
    """An entry of the record, which is printed too."""
    seconds, copied = seconds_of(call), copy_seconds(nbytes)
    entry = {**what, "seconds": seconds, "of_a_copy": copied / seconds}
    print(*what.values(), f"{seconds * 1e6:.1f} us, {entry['of_a_copy']:.3f} of a copy", flush=True)
    return entry


def even_rows(kernels: Operators, x: Tensor, spec: Format) -> Iterator[dict[str, Any]]:
    """One long row of BF16: quantized, decoded, and a sum of eight messages."""
    numel, part = x.numel(), x.numel() // SOURCES
    back, message = torch.empty_like(x), x.new_empty(spec.nbytes(numel), dtype=torch.uint8)
    few = x.new_zeros(SOURCES, spec.nbytes(part), dtype=torch.uint8)
    what = {"rows": "even", "format": str(spec), "bytes": 2 * numel}
    row, out, decoded = [view_of(x)], to_members(message), [view_of(back)]
    nbytes = 2 * numel + message.numel()
    quantize = partial(kernels.quantize, row, spec, out)
    yield timed(quantize, nbytes, op="quantize", **what)
    dequantize = partial(kernels.dequantize_reduce, out, spec, decoded)
    yield timed(dequantize, nbytes, op="dequantize", **what)
    total = [view_of(back[:part])]
    reduce = partial(kernels.dequantize_reduce, from_sources(few), spec, total)
    yield timed(reduce, few.numel() + 2 * part, op="sum of 8", **what)


def odd_rows(kernels: Operators, x: Tensor, spec: BlockSpec) -> Iterator[dict[str, Any]]:
    """Rows of an odd number of values, one for each of 384 members, filled up to whole blocks."""
    rows = x.numel() // (RANKS * WIDTH)
    columns = -(-WIDTH // spec.block_size) * spec.block_size
    view = View(x, rows, columns, WIDTH * RANKS, RANKS, WIDTH, WIDTH)
    out = to_members(x.new_empty(RANKS, spec.nbytes(rows * columns), dtype=torch.uint8))
    nbytes = 2 * rows * RANKS * WIDTH + out.table.numel()
    what = {"rows": "odd", "format": str(spec), "bytes": 2 * x.numel()}
    quantize = partial(kernels.quantize, [view], spec, out)
    yield timed(quantize, nbytes, op="quantize", **what)
    dequantize = partial(kernels.dequantize_reduce, out, spec, [view])
    yield timed(dequantize, nbytes, op="dequantize", **what)


def clock() -> str:
    """What nvidia-smi says about the GPU now."""
    words = (
        "nvidia-smi",
        "--query-gpu=name,clocks.sm,clocks.mem,power.draw",
        "--format=csv,noheader",
    )
    return output(words).strip() if ON_GPU else "unknown"


def main(folder: Path) -> None:
    """Every size, in the record after each."""
    operators.use("native", DEVICE)
    kernels = Operators()
    entries: list[dict[str, Any]] = []
    clocks = {}
    for megabytes in MEGABYTES:
        x = torch.randn(int(megabytes * 2**20) // 2, device=DEVICE).bfloat16()
        for spec in BLOCKS:
            entries += even_rows(kernels, x, spec)
            if x.numel() >= RANKS * WIDTH:
                entries += odd_rows(kernels, x, spec)
        entries += even_rows(kernels, x, Cast("bf16"))
        clocks[str(megabytes)] = clock()
        content = {"results": entries, "clocks": clocks}
        records.write(folder / "kernels-gpu.json", records.record("gpu-kernels", {}, content))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
