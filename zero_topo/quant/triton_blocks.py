# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The kernels of block quantization in Triton, and what they take.

Note [Tiles]
    A program works on ``TILE`` values, whole blocks: ``[blocks, block_size]``. Whether all of a tile exists is one
    scalar comparison. Only the other tiles are moved with masks, which keep a thread from moving 16 bytes at once.

Note [Addresses]
    A message's address is a base and steps for its source and its member, so one compiled kernel serves any number of
    either; a tuple of pointers would need a kernel for each number, a table of pointers a copy to the device for each
    call. Programs of all members are on one axis of the grid: the others end at 65,535.

Note [Integers in floats]
    Between ``2**23`` and ``2**24`` floats are 1 apart. Adding ``1.5 * 2**23``, which is even, hence rounds a small
    number to an integer, half to even, and leaves that integer in the sum's low bits, in two's complement. Subtracting
    a power of two undoes the like exactly, so neither way needs a conversion instruction. There is no clamp, because
    rounding is monotone: ``|x * inverse| < L + 1/2``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from zero_topo.quant.spec import Cast, Format
from zero_topo.quant.triton_sparse import loaded, widened

TILE = tl.constexpr(4096)
ALIGNED = tl.constexpr(16)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
ROUNDER = tl.constexpr(1.5 * 2**23)
TINY = tl.constexpr(2.0**-100)
# The interpreter does not round to bfloat16 as GPUs do, half to even.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Place(NamedTuple):
    """A view as kernels take it; columns and stride are 0 if it is flat, lest each size has its own kernel.

    Attributes:
        data: its elements.
        numel: values of a message.
        columns: of a row.
        present: columns that exist; if it is flat, values.
        stride: from row to row.
        member_stride: from member to member.
        limit: elements of ``data``.
    """

    data: Tensor
    numel: int
    columns: int
    present: int
    stride: int
    member_stride: int
    limit: int


class Fold(NamedTuple):
    """How a view's rows meet the blocks, which is compiled in.

    Attributes:
        flat: there is but one row.
        narrow: a block may meet more than two rows.
        group: so many values are adjacent, as rows are multiples of it.
        warps: more where each value has an offset of its own, in registers.
    """

    flat: bool
    narrow: bool
    group: int
    warps: int


class Table(NamedTuple):
    """Messages as kernels take them: steps in bytes, and where the scales of each begin and end; Note [Addresses]."""

    data: Tensor
    source_step: int
    outer_step: int
    inner_step: int
    inner: int
    scales: int
    end: int


class Work(NamedTuple):
    """What is to be done. Numbers are times 4 plus 2: for 1 and for multiples of 16, Triton compiles other kernels.

    Attributes:
        tiles: of each member.
        skipped: the member left out, or how many there are.
        sources: messages of a sum.
        hole: the source left out of it, or how many there are.
        factor: multiplies it.
    """

    tiles: int
    skipped: int
    sources: int
    hole: int
    factor: float


@triton.constexpr_function
def size_of(spec: Format) -> int:
    """Values of a block, or that take the like's place where there are none."""
    return 256 if isinstance(spec, Cast) else spec.block_size


@triton.constexpr_function
def _float(spec: Cast) -> tl.dtype:
    """What values are cast to."""
    return {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}[spec.dtype]


@triton.jit
def quantize_tile(message: Table, place: Place, work: Work, SPEC: tl.constexpr, FOLD: tl.constexpr) -> None:
    """A tile of a view -> its blocks of the message."""
    tile, member = _mine(work)
    offsets, exists, whole = _find(place, tile, member, SPEC, FOLD)
    x = widened(loaded(place.data + offsets, exists, whole)).reshape(TILE // size_of(SPEC), size_of(SPEC))
    _encode(x, message, work, place.numel, SPEC)


@triton.jit
def reduce_tile(
    place: Place, messages: Table, work: Work, SPEC: tl.constexpr, FOLD: tl.constexpr, ACCUMULATE: tl.constexpr
) -> None:
    """A tile of the messages' sum -> its values in the view."""
    tile, member = _mine(work)
    offsets, exists, whole = _find(place, tile, member, SPEC, FOLD)
    total = _sum(messages, work, place.numel, SPEC).reshape(offsets.shape)
    pointers: tl.tensor = place.data + offsets
    if ACCUMULATE:
        total = widened(loaded(pointers, exists, whole)) + total
    _stored(pointers, total, exists, whole)


@triton.jit
def requantize_tile(
    message: Table, messages: Table, numel: int, work: Work, SOURCE: tl.constexpr, SPEC: tl.constexpr
) -> None:
    """A tile of the messages' sum -> its blocks of another message."""
    tile, _ = _mine(work)
    total = _sum(messages, work, numel, SOURCE)
    _encode(tl.where(_index(tile, SPEC) < numel, total, 0.0), message, work, numel, SPEC)


@triton.jit
def _mine(work: Work) -> tl.tuple:
    """The program's tile, int64, and member."""
    tiles, skipped = work.tiles >> 2, work.skipped >> 2
    member = tl.program_id(0) // tiles
    tile = tl.program_id(0) - member * tiles
    return tile.to(tl.int64), member + (member >= skipped).to(tl.int32)


@triton.jit
def address(table: Table, source: int, member: int) -> tl.tensor:
    """Where a message begins."""
    outer = member // table.inner
    inner = tl.cast(member - outer * table.inner, tl.int64)
    begin = tl.cast(source, tl.int64) * table.source_step + tl.cast(outer, tl.int64) * table.outer_step
    return table.data + (begin + inner * table.inner_step)


@triton.jit
def _blocks(tile: int, SPEC: tl.constexpr) -> tl.tensor:
    """A tile's blocks, int64 ``[blocks]``."""
    COUNT: tl.constexpr = TILE // size_of(SPEC)
    return tile * COUNT + tl.arange(0, COUNT)


@triton.jit
def _index(tile: int, SPEC: tl.constexpr) -> tl.tensor:
    """A tile's values, int64 ``[blocks, size]``."""
    return _blocks(tile, SPEC)[:, None] * size_of(SPEC) + tl.arange(0, size_of(SPEC))[None, :]


@triton.jit
def _find(place: Place, tile: int, member: int, SPEC: tl.constexpr, FOLD: tl.constexpr) -> tl.tuple:
    """Offsets of the tile's values, ``[blocks, groups, group]``; which of them exist; whether all do."""
    first = _blocks(tile, SPEC)[:, None] * size_of(SPEC)
    within = tl.arange(0, size_of(SPEC) // FOLD.group)[None, :] * FOLD.group
    group = tl.arange(0, FOLD.group)[None, None, :]
    last = tile * TILE + (TILE - 1)
    begin = tl.cast(member, tl.int64) * place.member_stride
    if FOLD.flat:
        limit = tl.minimum(place.limit - begin, place.present)
        offsets = (first + within)[:, :, None] + group
        return begin + offsets, offsets < limit, last < limit
    else:
        row = first // place.columns
        column = first - row * place.columns + within
        if FOLD.narrow:
            over = (column.to(tl.int32) // tl.cast(place.columns, tl.int32)).to(tl.int64)
        else:
            over = (column >= place.columns).to(tl.int64)
        column -= over * place.columns
        offsets = (begin + (row + over) * place.stride + column)[:, :, None] + group
        exists = ((first + within)[:, :, None] + group < place.numel) & (offsets < place.limit)
        end = last % place.columns
        filled = (place.present == place.columns) | ((end < place.present) & (end >= TILE - 1))
        whole = filled & (last < place.numel) & (begin + last // place.columns * place.stride + end < place.limit)
        return offsets, exists & (column[:, :, None] + group < place.present), whole


@triton.jit
def _stored(pointers: tl.tensor, x: tl.tensor, exists: tl.tensor, whole: tl.tensor) -> None:
    """Write what exists, rounded; the counterpart of `loaded`."""
    rounded = _rounded(x, pointers.dtype.element_ty)
    if whole:
        tl.store(pointers, rounded)
    else:
        tl.store(pointers, rounded, mask=exists)


@triton.jit
def _encode(x: tl.tensor, messages: Table, work: Work, numel: int, SPEC: tl.constexpr) -> None:
    """Write all that the member's message has of a tile ``[blocks, size]``."""
    tile, member = _mine(work)
    message = address(messages, 0, member)
    if SPEC.block_size == 1:
        index = _index(tile, SPEC)
        pointers = message.to(tl.pointer_type(_float(SPEC))) + index
        _stored(pointers, x, index < numel, (tile + 1) * TILE <= numel)
    else:
        _encode_blocks(x, tl.multiple_of(message, ALIGNED), messages, work, numel, SPEC)


@triton.jit
def _encode_blocks(x: tl.tensor, message: tl.tensor, planes: Table, work: Work, numel: int, SPEC: tl.constexpr) -> None:
    """Quantize blocks and write them, the message's padding included."""
    tile, _ = _mine(work)
    block = _blocks(tile, SPEC)
    bits = x.to(tl.int32, bitcast=True)
    span = tl.max(bits & MAGNITUDE, axis=1).to(tl.float32, bitcast=True)
    levels = tl.full(span.shape, SPEC.levels, tl.float32)
    good = (span.to(tl.int32, bitcast=True) & MAGNITUDE) < INFINITE
    tiny = span < TINY
    scale = tl.where(good, tl.where(tiny, 0.0, tl.div_rn(span, levels)), float("nan"))
    inverse = tl.where(tiny, 0.0, tl.div_rn(levels, span))
    q = (x * inverse[:, None] + ROUNDER).to(tl.int32, bitcast=True)
    q = tl.where((good & (block * SPEC.block_size < numel))[:, None], q, 0)
    if SPEC.bits == 4:
        even, odd = tl.split(q.reshape(TILE // SPEC.block_size, SPEC.block_bytes, 2))
        q = (even & 15) | (odd << 4)
    place = block[:, None] * SPEC.block_bytes + tl.arange(0, SPEC.block_bytes)[None, :]
    tl.store(message + place, q.to(tl.uint8), mask=place < planes.scales)
    scales = (message + planes.scales).to(tl.pointer_type(tl.float32))
    tl.store(scales + block, scale, mask=block * SPEC.block_size < numel)
    if tile == (work.tiles >> 2) - 1:  # the member's last program: less than 32 zeros follow the scales
        end = tl.cast((planes.end - planes.scales) // 4 - 32, tl.int64) + tl.arange(0, 32)
        tl.store(scales + end, tl.zeros((32,), tl.float32), mask=end * SPEC.block_size >= numel)


@triton.jit
def _sum(messages: Table, work: Work, numel: int, SPEC: tl.constexpr) -> tl.tensor:
    """The messages' values of the tile, FP32 ``[blocks, size]``, added up in order, times the factor."""
    tile, member = _mine(work)
    # -0 + x is x, whatever x; but -0.0 for a number would be taken for 0.
    total = tl.full((TILE // size_of(SPEC), size_of(SPEC)), -(2**31), tl.int32).to(tl.float32, bitcast=True)
    for number in tl.range(work.sources >> 2):
        message = address(messages, number + (number >= (work.hole >> 2)), member)
        if SPEC.block_size == 1:
            index = _index(tile, SPEC)
            pointers = message.to(tl.pointer_type(_float(SPEC))) + index
            total += widened(loaded(pointers, index < numel, (tile + 1) * TILE <= numel))
        else:
            total += _decode(tl.multiple_of(message, ALIGNED), messages, tile, numel, SPEC)
    return total * work.factor


@triton.jit
def _decode(message: tl.tensor, planes: Table, tile: int, numel: int, SPEC: tl.constexpr) -> tl.tensor:
    """One message's values of the tile."""
    WORDS: tl.constexpr = SPEC.block_bytes // 4
    block = _blocks(tile, SPEC)
    present = block * SPEC.block_size < numel
    place = block[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    words = tl.load(message.to(tl.pointer_type(tl.int32)) + place, mask=present[:, None], other=0)
    scale = tl.load((message + planes.scales).to(tl.pointer_type(tl.float32)) + block, mask=present, other=0.0)
    return _unpack(words, 0, SPEC.bits, SPEC).reshape(TILE // SPEC.block_size, SPEC.block_size) * scale[:, None]


@triton.jit
def _unpack(words: tl.tensor, AT: tl.constexpr, STEP: tl.constexpr, SPEC: tl.constexpr) -> tl.tensor:
    """The integers at bits AT, AT + STEP, ... of each word, as floats, in new last dimensions of 2."""
    HALF: tl.constexpr = SPEC.levels + 1
    SHIFT: tl.constexpr = AT % 16
    MASK: tl.constexpr = (2 * SPEC.levels + 1) << SHIFT
    FLOAT: tl.constexpr = ((150 - SHIFT) << 23) | (HALF << SHIFT)
    if STEP < 32:
        return tl.join(_unpack(words, AT, 2 * STEP, SPEC), _unpack(words, AT + STEP, 2 * STEP, SPEC))
    else:
        bits = ((words >> (AT - SHIFT)) & MASK) ^ FLOAT
        return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - SHIFT) + HALF)


@triton.jit
def _rounded(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """FP32 -> another dtype, to nearest, half to even."""
    if INTERPRETED and DTYPE.is_bf16():
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)
