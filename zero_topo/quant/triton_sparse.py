# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Implements the sparse modes' operations as Triton kernels, and helpers that all Triton kernels
here share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = tl.constexpr(2048)
SKETCH_WIDTH = tl.constexpr(1024)
AGES = tl.constexpr(257)
# Lanes of a peeling program, which is one warp of 32 or 64 threads. The interpreter is not slower
# with more lanes.
PART = tl.constexpr(1024 if triton.knobs.runtime.interpret else 128)


class _Places(NamedTuple):
    """Holds the rows (int32) and signs (FP32) of a sketch's blocks, ``[3, blocks]``."""

    rows: Tensor
    signs: Tensor
    blocks: int


class _Aged(NamedTuple):
    """Holds the weights, gradients, moments and ages ``[n]`` of AgedAdamW, and its table of
    factors.
    """

    p: Tensor
    g: Tensor
    mean: Tensor
    square: Tensor
    age: Tensor
    table: Tensor


def launch(
    kernel: Any,
    programs: int,
    target: Tensor | tuple[Any, ...],
    *arguments: object,
    warps: int = 4,
) -> None:
    """Start programs on the device of their first argument, a tensor or a tuple that begins with
    one.

    Products and sums are not contracted to FMA.
    """
    first = target if isinstance(target, Tensor) else target[0]
    with torch.cuda.device_of(first):
        # Fused, a product and a sum would round once where the reference rounds twice.
        kernel[(programs,)](target, *arguments, num_warps=warps, enable_fp_fusion=False)


def mask_pack(mask: Tensor, bits: Tensor) -> None:
    """Pack booleans ``[n]`` into bytes ``[ceil(n / 8)]``."""
    n = mask.numel()
    launch(_mask_pack, triton.cdiv(n, CHUNK.value), bits, mask.view(torch.uint8), n)


def mask_unpack(bits: Tensor, mask: Tensor) -> None:
    """Unpack bytes ``[ceil(n / 8)]`` into booleans ``[n]``."""
    n = mask.numel()
    launch(_mask_unpack, triton.cdiv(n, CHUNK.value), mask.view(torch.uint8), bits, n)


def count_above(x: Tensor, threshold: float) -> Tensor:
    """Count the elements with ``|x[i]| >= threshold``, int64 ``[1]``."""
    return _counts(x, threshold).sum().view(1)


def compact_above(x: Tensor, threshold: float, indices: Tensor, values: Tensor) -> Tensor:
    """Write the indices and values of large elements, up to the room; return their number, int64
    ``[1]``.
    """
    # Where each chunk writes is known on the device: the host waits for nothing.
    ends = _counts(x, threshold).cumsum(0)
    launch(
        _compact_above,
        ends.numel(),
        values,
        indices,
        ends,
        x,
        x.numel(),
        threshold,
        indices.numel(),
    )
    return ends[-1:]


def sketch_insert(x: Tensor, seed: int, sketch: Tensor) -> None:
    """Compute the count sketches ``[members, rows, 1024]`` of FP32 ``[members, n]``; one launch for
    each member.

    A program sums one row. It reads the row's blocks from a sorted list, so sums have the
    reference's order.
    """
    rows = sketch.shape[1]
    places = _places(x[0], seed, rows)
    # Stable: blocks of a row stay in ascending order.
    row_of, order = places.rows.view(-1).sort(stable=True)
    every = torch.arange(rows + 1, dtype=row_of.dtype, device=x.device)
    starts = torch.searchsorted(row_of, every)
    for own, sketched in zip(x, sketch, strict=True):
        launch(_sketch_insert, rows, sketched, own, own.numel(), places, order, starts)


def sketch_peel(sketch: Tensor, bits: Tensor, seed: int, out: Tensor) -> Tensor:
    """Recover a vector from its sketch and mask; return the number of elements only estimated,
    int64 ``[1]``.

    A program peels ``PART`` lanes, block after block like the reference; lanes are independent.
    """
    places = _places(out, seed, sketch.shape[0])
    padded = places.blocks * SKETCH_WIDTH.value
    unresolved = out.new_zeros(padded, dtype=torch.uint8)
    mask_unpack(bits, unresolved[: out.numel()].view(torch.bool))
    counts = out.new_zeros(sketch.shape, dtype=torch.int32)
    programs = SKETCH_WIDTH.value // PART.value
    left = out.new_empty(programs, dtype=torch.int64)
    out.zero_()
    launch(_sketch_peel, programs, sketch, counts, unresolved, out, left, places, warps=1)
    return left.sum().view(1)


def aged_adamw(
    p: Tensor,
    g: Tensor,
    mean: Tensor,
    square: Tensor,
    age: Tensor,
    table: Tensor,
    settings: Sequence[float],
) -> None:
    """Update FP32 weights, moments and ages; see ``ops.aged_adamw``."""
    # Rounded as the kernel's arguments are.
    scalars = torch.tensor(settings, dtype=torch.float32, device="cpu").tolist()
    aged = _Aged(p, g, mean, square, age, table)
    programs = triton.cdiv(p.numel(), SKETCH_WIDTH.value)
    launch(_aged_adamw, programs, aged, p.numel(), *scalars)


def _counts(x: Tensor, threshold: float) -> Tensor:
    """Count the large elements of each chunk, int64 ``[chunks]``."""
    chunks = triton.cdiv(x.numel(), CHUNK.value)
    counts = x.new_empty(chunks, dtype=torch.int64)
    launch(_count_above, chunks, counts, x, x.numel(), threshold)
    return counts


def _places(x: Tensor, seed: int, rows: int) -> _Places:
    blocks = triton.cdiv(x.numel(), SKETCH_WIDTH.value)
    at = x.new_empty(3, blocks, dtype=torch.int32)
    signs = x.new_empty(3, blocks, dtype=torch.float32)
    # Kernels take signed numbers; the bits are those of the unsigned seed.
    signed = (seed + 2**63) % 2**64 - 2**63
    programs = triton.cdiv(3 * blocks, SKETCH_WIDTH.value)
    launch(_hash, programs, at, signs, blocks, rows, signed)
    return _Places(at, signs, blocks)


@triton.jit
def loaded(pointers: tl.tensor, exists: tl.tensor, whole: tl.tensor) -> tl.tensor:
    """Load existing elements, zero elsewhere. If all exist, no mask is used, as masks prevent
    16-byte loads.
    """
    return tl.load(pointers) if whole else tl.load(pointers, mask=exists, other=0)


@triton.jit
def widened(x: tl.tensor) -> tl.tensor:
    """Convert exactly to FP32, of which bfloat16 is the upper half."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _mask_pack(bits: tl.tensor, mask: tl.tensor, n: int) -> None:
    """Pack a chunk of bytes 0 or 1 into bits."""
    begin = tl.program_id(0).to(tl.int64) * CHUNK
    byte = begin // 8 + tl.arange(0, CHUNK // 8)
    bit = tl.arange(0, 8)[None, :]
    element = byte[:, None] * 8 + bit
    flags = loaded(mask + element, element < n, begin + CHUNK <= n)
    packed = tl.sum(flags.to(tl.int32) << bit, axis=1)
    tl.store(bits + byte, packed.to(tl.uint8), mask=byte * 8 < n)


@triton.jit
def _mask_unpack(mask: tl.tensor, bits: tl.tensor, n: int) -> None:
    """Unpack bits into a chunk of bytes 0 or 1."""
    begin = tl.program_id(0).to(tl.int64) * CHUNK
    byte = begin // 8 + tl.arange(0, CHUNK // 8)
    bit = tl.arange(0, 8)[None, :]
    element = byte[:, None] * 8 + bit
    packed = tl.load(bits + byte, mask=byte * 8 < n, other=0).to(tl.int32)
    flags = packed[:, None] >> bit
    flags = (flags & 1).to(tl.uint8)
    if begin + CHUNK <= n:
        tl.store(mask + element, flags)
    else:
        tl.store(mask + element, flags, mask=element < n)


@triton.jit
def _above(x: tl.tensor, n: int, threshold: float) -> tl.tuple:
    """Return a chunk's indices and values, and as int32 which magnitudes are large; NaN counts as
    large.
    """
    begin = tl.program_id(0).to(tl.int64) * CHUNK
    element = begin + tl.arange(0, CHUNK)
    values = loaded(x + element, element < n, begin + CHUNK <= n)
    small = tl.abs(widened(values)) < threshold
    large = (small == 0) & (element < n)
    return element, values, large.to(tl.int32)


@triton.jit
def _count_above(counts: tl.tensor, x: tl.tensor, n: int, threshold: float) -> None:
    """Count the large elements of a chunk."""
    _, _, large = _above(x, n, threshold)
    tl.store(counts + tl.program_id(0), tl.sum(large, axis=0))


@triton.jit
def _compact_above(
    kept: tl.tensor,
    indices: tl.tensor,
    ends: tl.tensor,
    x: tl.tensor,
    n: int,
    threshold: float,
    room: int,
) -> None:
    """Write a chunk's large elements after those of earlier chunks; ``ends`` are the running
    counts.
    """
    element, values, large = _above(x, n, threshold)
    # Running counts include this chunk.
    begin = tl.load(ends + tl.program_id(0))
    begin -= tl.sum(large, axis=0)
    place = begin + tl.cumsum(large, axis=0) - 1
    writes = (large != 0) & (place < room)
    tl.store(indices + place, element, mask=writes)
    tl.store(kept + place, values, mask=writes)


@triton.jit
def _aged_adamw(
    aged: _Aged,
    n: int,
    decay: float,
    correction: float,
    eps: float,
    rate: float,
) -> None:
    """Update 1024 elements; all of them decay, those that have arrived change otherwise."""
    at = tl.program_id(0).to(tl.int64) * SKETCH_WIDTH
    at += tl.arange(0, SKETCH_WIDTH)
    exists = at < n
    sums = tl.load(aged.g + at, mask=exists, other=0)
    waited = tl.load(aged.age + at, mask=exists, other=0).to(tl.int32)
    weights = tl.load(aged.p + at, mask=exists, other=0) * decay
    arrived = exists & (sums != 0)
    factors = aged.table + waited + 1
    old = tl.load(aged.mean + at, mask=arrived, other=0)
    end = tl.load(factors) * sums
    weight = tl.load(factors + AGES)
    # As `torch.lerp`, which counts from the nearer end.
    small = weight < 0.5
    share = tl.where(small, weight, weight - 1)
    near = tl.where(small, old, end)
    new = tl.fma(share, end - old, near)
    left = tl.load(aged.square + at, mask=arrived, other=0)
    left *= tl.load(factors + 2 * AGES)
    gain = tl.load(factors + 3 * AGES) * sums
    squares = tl.fma(gain, sums, left)
    corrections = tl.full(squares.shape, correction, tl.float32)
    norm = tl.div_rn(tl.sqrt_rn(squares), corrections) + eps
    step = new * (waited + 1).to(tl.float32)
    moved = weights + tl.div_rn(rate * step, norm)
    tl.store(aged.mean + at, new, mask=arrived)
    tl.store(aged.square + at, squares, mask=arrived)
    tl.store(aged.p + at, tl.where(arrived, moved, weights), mask=exists)
    age = tl.where(arrived, 0, tl.minimum(waited, 254) + 1)
    tl.store(aged.age + at, age.to(tl.uint8), mask=exists)


@triton.jit
def _mix(z: tl.tensor) -> tl.tensor:
    """Apply the finalizer of MurmurHash3, uint64."""
    z ^= z >> 33
    z *= 0xFF51AFD7ED558CCD
    z ^= z >> 33
    z *= 0xC4CEB9FE1A85EC53
    return z ^ (z >> 33)


@triton.jit(do_not_specialize=["seed"])
def _hash(at: tl.tensor, signs: tl.tensor, blocks: int, rows: int, seed: int) -> None:
    """Compute the row and sign of each block in each third of the sketch."""
    index = tl.program_id(0).to(tl.int64) * SKETCH_WIDTH
    index += tl.arange(0, SKETCH_WIDTH)
    third = index // blocks
    block = index % blocks
    steps = (3 * block + third + 1).to(tl.uint64)
    key = tl.cast(seed, tl.int64).to(tl.uint64)
    key += steps * 0x9E3779B97F4A7C15
    mixed = _mix(key)
    first = third * rows // 3
    past = (third + 1) * rows // 3
    lower = mixed & 0xFFFFFFFF
    lower *= (past - first).to(tl.uint64)
    row = first + (lower >> 32).to(tl.int64)
    sign = tl.where(mixed >> 63 == 1, -1.0, 1.0)
    tl.store(at + index, row.to(tl.int32), mask=third < 3)
    tl.store(signs + index, sign, mask=third < 3)


@triton.jit
def _sketch_insert(
    sketch: tl.tensor,
    x: tl.tensor,
    n: int,
    places: _Places,
    order: tl.tensor,
    starts: tl.tensor,
) -> None:
    """Compute one row: the sum of its blocks ``order[starts[row] : starts[row + 1]]``,
    ascending.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SKETCH_WIDTH)
    total = tl.zeros((SKETCH_WIDTH,), tl.float32)
    for position in tl.range(tl.load(starts + row), tl.load(starts + row + 1)):
        place = tl.load(order + position)
        element = place % places.blocks * SKETCH_WIDTH + column
        values = tl.load(x + element, mask=element < n, other=0.0)
        total += tl.load(places.signs + place) * values
    tl.store(sketch + row * SKETCH_WIDTH + column, total)


@triton.jit
def _sketch_peel(
    sketch: tl.tensor,
    counts: tl.tensor,
    unresolved: tl.tensor,
    values: tl.tensor,
    left: tl.tensor,
    places: _Places,
) -> None:
    """Decode some lanes of a sketch: count unresolved elements in each row, resolve them in passes,
    estimate the rest.

    A barrier follows each block: the next block may share its rows, and a lane may move to another
    thread.
    """
    column = _columns()
    for block in tl.range(places.blocks):
        element = tl.cast(block, tl.int64) * SKETCH_WIDTH + column
        here = tl.load(unresolved + element).to(tl.int32)
        for third in tl.static_range(3):
            cell, _ = _cell(places, third, block)
            count = tl.load(counts + cell) + here
            tl.store(counts + cell, count)
        tl.debug_barrier()
    # Peeling: an element alone in a cell is known; subtracting it may leave others alone.
    resolved = 1
    while resolved > 0:
        resolved = 0
        for block in tl.range(places.blocks):
            some = _visit(sketch, counts, unresolved, values, places, block)
            resolved = tl.maximum(resolved, some)
            tl.debug_barrier()
    # Elements that no pass has resolved share all their cells with others.
    guessed = tl.cast(0, tl.int64)
    for block in tl.range(places.blocks):
        element = tl.cast(block, tl.int64) * SKETCH_WIDTH + column
        here = tl.load(unresolved + element).to(tl.int32)
        a = _says(sketch, places, 0, block)
        b = _says(sketch, places, 1, block)
        c = _says(sketch, places, 2, block)
        tl.store(values + element, _middle(a, b, c), mask=here != 0)
        guessed += tl.sum(here, axis=0)
    tl.store(left + tl.program_id(0), guessed)


@triton.jit
def _visit(
    sketch: tl.tensor,
    counts: tl.tensor,
    unresolved: tl.tensor,
    values: tl.tensor,
    places: _Places,
    block: int,
) -> tl.tensor:
    """Resolve elements alone in one of their rows and subtract them from all their rows; return 1
    if there is any.

    The value comes from the first such row, which is not read again: subtracting the value from it
    too is harmless.
    """
    column = _columns()
    element = tl.cast(block, tl.int64) * SKETCH_WIDTH + column
    here = tl.load(unresolved + element) != 0
    known = column < 0
    # Most blocks have no unresolved element after the first passes.
    if tl.max(here.to(tl.int32), axis=0) > 0:
        value = tl.zeros((PART,), tl.float32)
        for third in tl.static_range(3):
            cell, sign = _cell(places, third, block)
            alone = here & ~known & (tl.load(counts + cell) == 1)
            value = tl.where(alone, sign * tl.load(sketch + cell), value)
            known = known | alone
        tl.store(values + element, value, mask=known)
        tl.store(unresolved + element, 0, mask=known)
        for third in tl.static_range(3):
            cell, sign = _cell(places, third, block)
            tl.store(counts + cell, tl.load(counts + cell) - 1, mask=known)
            rest = tl.load(sketch + cell) - sign * value
            tl.store(sketch + cell, rest, mask=known)
    return tl.max(known.to(tl.int32), axis=0)


@triton.jit
def _columns() -> tl.tensor:
    """Return the program's lanes, ``[PART]``."""
    return tl.program_id(0) * PART + tl.arange(0, PART)


@triton.jit
def _cell(places: _Places, third: int, block: int) -> tl.tuple:
    """Return the offsets ``[PART]`` of a block in a third of the sketch, and its sign."""
    place = tl.cast(block, tl.int64) + third * places.blocks
    row = tl.load(places.rows + place).to(tl.int64)
    sign = tl.load(places.signs + place)
    return row * SKETCH_WIDTH + _columns(), sign


@triton.jit
def _says(sketch: tl.tensor, places: _Places, third: int, block: int) -> tl.tensor:
    """Return the value of an element according to one row, ``[PART]``."""
    cell, sign = _cell(places, third, block)
    return sign * tl.load(sketch + cell)


@triton.jit
def _middle(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """Return the median of three values; NaN if one is NaN."""
    ALL: tl.constexpr = tl.PropagateNan.ALL
    low = tl.minimum(a, b, propagate_nan=ALL)
    high = tl.maximum(a, b, propagate_nan=ALL)
    upper = tl.minimum(high, c, propagate_nan=ALL)
    return tl.maximum(low, upper, propagate_nan=ALL)
