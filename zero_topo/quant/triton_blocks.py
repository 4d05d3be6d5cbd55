# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Implements the kernels of block quantization in Triton, and defines their arguments.

Tiles
    A program works on ``TILE`` values, whole blocks: ``[blocks, block_size]``. One scalar
    comparison tests whether all values of a tile exist. Only the other tiles use masks, which
    prevent loads and stores of 16 bytes per thread.

Note [Addresses]
    A message's address is a base plus strides for its source and its member, so one compiled kernel
    serves any number of sources and members. A tuple of pointers would need a kernel for each
    number, and a table of pointers a copy to the device for each call. Programs of all members are
    on the first axis of the grid: the others end at 65,535.

Integers in floats
    Between ``2**23`` and ``2**24`` floats are 1 apart. Adding ``1.5 * 2**23``, which is even,
    therefore rounds a small number to an integer, half to even, and leaves that integer in the
    sum's low bits, in two's complement. Subtracting a power of two reverses this exactly, so
    neither direction needs a conversion instruction. There is no clamp,
    because rounding is monotone: ``|x * inverse| < L + 1/2``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_topo.quant.operands import Messages
from zero_topo.quant.spec import NF4_BOUNDS, NF4_LEVELS, NF4_NEAREST, NF4_SCALE, Cast, Format

TILE = tl.constexpr(4096)
ALIGNED = tl.constexpr(16)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
ROUNDER = tl.constexpr(1.5 * 2**23)
TINY = tl.constexpr(2.0**-100)
LEVELS = tl.constexpr(NF4_LEVELS)
BOUNDS = tl.constexpr(NF4_BOUNDS)
NEAREST = tl.constexpr(NF4_NEAREST)
FIRST_SCALE = tl.constexpr(NF4_SCALE)
# The interpreter does not round to bfloat16 half to even, as GPUs do.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Place(NamedTuple):
    """Describes a view to kernels. Columns and stride are 0 if it is flat, so that sizes share one
    kernel.

    Attributes:
        data: elements of the view.
        numel: values of a message.
        columns: columns of a row.
        present: columns that exist; values that exist if the view is flat.
        stride: elements from row to row.
        member_stride: elements from member to member.
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
    """Describes how a view's rows map to blocks; these values are compiled in.

    Attributes:
        flat: whether there is only one row.
        narrow: whether a block may span more than two rows.
        group: number of values that are always adjacent, since rows are multiples of it.
        warps: warps of a program; more if each value has its own offset, which takes registers.
    """

    flat: bool
    narrow: bool
    group: int
    warps: int


class Table(NamedTuple):
    """Describes messages to kernels: strides in bytes, and the scales' begin and end; see Note
    [Addresses].
    """

    data: Tensor
    source_step: int
    outer_step: int
    inner_step: int
    inner: int
    scales: int
    end: int


class Work(NamedTuple):
    """Holds the arguments of a launch. Integers are stored as ``4 n + 2``: Triton specializes on 1
    and on 16 n.

    Attributes:
        tiles: tiles of each member.
        skipped: the member left out, or the number of members.
        sources: messages of a sum.
        hole: the source left out of the sum, or the number of sources.
        factor: multiplies the sum.
    """

    tiles: int
    skipped: int
    sources: int
    hole: int
    factor: float


def launch(
    kernel: Any,
    programs: int,
    target: tuple[Any, ...],
    *arguments: object,
    warps: int = 4,
) -> None:
    """Start programs on the device of the tensor with which their first argument begins.

    Products and sums are not contracted to FMA.
    """
    with torch.cuda.device_of(target[0]):
        # Fused, a product and a sum would round once where the reference rounds twice.
        kernel[(programs,)](target, *arguments, num_warps=warps, enable_fp_fusion=False)


def table_of(table: Tensor, unit: int, kind: object, scales: int = 0, end: int = 0) -> Table:
    """Return messages of some kind as kernels take them.

    Raises:
        ValueError: if they do not begin at multiples of ``unit`` bytes.
    """
    # The stride of a dimension of one is arbitrary, and nothing is ever that far apart.
    steps = [table.stride(i) if table.shape[i] > 1 else 0 for i in range(3)]
    numbers = table.data_ptr(), *steps
    if any(number % unit for number in numbers):
        raise ValueError(
            f"{kind} messages must begin at multiples of {unit} bytes: {table.data_ptr():#x}, "
            f"{steps}"
        )
    return Table(table, steps[0], steps[1], steps[2], table.shape[2], scales, end)


def programs_of(messages: Messages, tiles: int) -> tuple[int, int]:
    """Return the member left out, or the number of members, and the programs of a launch with some
    tiles for each of the others.
    """
    members = messages.members
    skipped = members if messages.without_member < 0 else messages.without_member
    return skipped, tiles * (members - (skipped < members))


@triton.constexpr_function
def size_of(spec: Format) -> int:
    """Return the values of a block; 256 for floats, which have no blocks."""
    return 256 if isinstance(spec, Cast) else spec.block_size


@triton.constexpr_function
def _float(spec: Cast) -> tl.dtype:
    """Return the dtype to which values are cast."""
    return {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}[spec.dtype]


@triton.jit
def quantize_tile(
    message: Table,
    place: Place,
    work: Work,
    SPEC: tl.constexpr,
    FOLD: tl.constexpr,
) -> None:
    """Quantize a tile of a view into its blocks of the message."""
    tile, member = _mine(work)
    offsets, exists, whole = _find(place, tile, member, SPEC, FOLD)
    # Groups of adjacent values become the blocks of the message.
    x = _widened(_loaded(place.data + offsets, exists, whole))
    x = x.reshape(TILE // size_of(SPEC), size_of(SPEC))
    _encode(x, message, work, place.numel, SPEC)


@triton.jit
def reduce_tile(
    place: Place,
    messages: Table,
    work: Work,
    SPEC: tl.constexpr,
    FOLD: tl.constexpr,
    ACCUMULATE: tl.constexpr,
) -> None:
    """Write a tile of the messages' sum to its values in the view."""
    tile, member = _mine(work)
    offsets, exists, whole = _find(place, tile, member, SPEC, FOLD)
    total = _sum(messages, work, place.numel, SPEC).reshape(offsets.shape)
    pointers: tl.tensor = place.data + offsets
    # A constant at compile time, so that no value of the view is read where it is overwritten.
    if ACCUMULATE:
        total = _widened(_loaded(pointers, exists, whole)) + total
    _stored(pointers, total, exists, whole)


@triton.jit
def requantize_tile(
    message: Table,
    messages: Table,
    numel: int,
    work: Work,
    SOURCE: tl.constexpr,
    SPEC: tl.constexpr,
) -> None:
    """Quantize a tile of the messages' sum into its blocks of another message."""
    tile, _ = _mine(work)
    total = _sum(messages, work, numel, SOURCE)
    # Padding of the sources may be anything; it must not set the scale of the last block.
    total = tl.where(_index(tile, SPEC) < numel, total, 0.0)
    _encode(total, message, work, numel, SPEC)


@triton.jit
def _mine(work: Work) -> tl.tuple:
    """Return the program's tile, int64, and member."""
    tiles = work.tiles >> 2
    member = tl.program_id(0) // tiles
    tile = tl.program_id(0) - member * tiles
    ahead = (member >= (work.skipped >> 2)).to(tl.int32)
    return tile.to(tl.int64), member + ahead


@triton.jit
def _address(table: Table, source: int, member: int) -> tl.tensor:
    """Return the address at which a message begins."""
    outer = member // table.inner
    inner = tl.cast(member - outer * table.inner, tl.int64)
    begin = tl.cast(source, tl.int64) * table.source_step
    begin += tl.cast(outer, tl.int64) * table.outer_step
    begin += inner * table.inner_step
    return table.data + begin


@triton.jit
def _blocks(tile: int, SPEC: tl.constexpr) -> tl.tensor:
    """Return the indices of a tile's blocks, int64 ``[blocks]``."""
    COUNT: tl.constexpr = TILE // size_of(SPEC)
    return tile * COUNT + tl.arange(0, COUNT)


@triton.jit
def _index(tile: int, SPEC: tl.constexpr) -> tl.tensor:
    """Return the indices of a tile's values, int64 ``[blocks, size]``."""
    SIZE: tl.constexpr = size_of(SPEC)
    first = _blocks(tile, SPEC)[:, None] * SIZE
    return first + tl.arange(0, SIZE)[None, :]


@triton.jit
def _find(place: Place, tile: int, member: int, SPEC: tl.constexpr, FOLD: tl.constexpr) -> tl.tuple:
    """Return the offsets of the tile's values, ``[blocks, groups, group]``, which exist, and
    whether all exist.
    """
    first = _blocks(tile, SPEC)[:, None] * size_of(SPEC)
    within = tl.arange(0, size_of(SPEC) // FOLD.group)[None, :] * FOLD.group
    group = tl.arange(0, FOLD.group)[None, None, :]
    last = tile * TILE + (TILE - 1)
    begin = tl.cast(member, tl.int64) * place.member_stride
    if FOLD.flat:
        # One row: an index is an offset, and what exists ends at one place.
        limit = tl.minimum(place.limit - begin, place.present)
        offsets = (first + within)[:, :, None] + group
        return begin + offsets, offsets < limit, last < limit
    else:
        row = first // place.columns
        column = first - row * place.columns + within
        if FOLD.narrow:
            # A block may span many short rows, which takes a division; else it spans two.
            over = column.to(tl.int32) // tl.cast(place.columns, tl.int32)
            over = over.to(tl.int64)
        else:
            over = (column >= place.columns).to(tl.int64)
        column -= over * place.columns
        groups = begin + (row + over) * place.stride + column
        offsets = groups[:, :, None] + group
        index = (first + within)[:, :, None] + group
        exists = (index < place.numel) & (offsets < place.limit)
        end = last % place.columns
        # Whether no value of this tile is padding of a row: then no load or store needs a mask.
        whole = (end < place.present) & (end >= TILE - 1)
        whole |= place.present == place.columns
        whole &= last < place.numel
        whole &= begin + last // place.columns * place.stride + end < place.limit
        exists &= column[:, :, None] + group < place.present
        return offsets, exists, whole


@triton.jit
def _loaded(pointers: tl.tensor, exists: tl.tensor, whole: tl.tensor) -> tl.tensor:
    """Load existing elements, zero elsewhere. If all exist, no mask is used, as masks prevent
    16-byte loads.
    """
    return tl.load(pointers) if whole else tl.load(pointers, mask=exists, other=0)


@triton.jit
def _widened(x: tl.tensor) -> tl.tensor:
    """Convert exactly to FP32, of which bfloat16 is the upper half."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _stored(pointers: tl.tensor, x: tl.tensor, exists: tl.tensor, whole: tl.tensor) -> None:
    """Round values and store those that lie inside the view; the counterpart of `_loaded`."""
    rounded = _rounded(x, pointers.dtype.element_ty)
    if whole:
        tl.store(pointers, rounded)
    else:
        tl.store(pointers, rounded, mask=exists)


@triton.jit
def _encode(x: tl.tensor, messages: Table, work: Work, numel: int, SPEC: tl.constexpr) -> None:
    """Write a tile ``[blocks, size]`` to the member's message."""
    tile, member = _mine(work)
    message = _address(messages, 0, member)
    if SPEC.block_size == 1:
        index = _index(tile, SPEC)
        pointers = message.to(tl.pointer_type(_float(SPEC))) + index
        _stored(pointers, x, index < numel, (tile + 1) * TILE <= numel)
    else:
        _encode_blocks(x, tl.multiple_of(message, ALIGNED), messages, work, numel, SPEC)


@triton.jit
def _encode_blocks(
    x: tl.tensor,
    message: tl.tensor,
    planes: Table,
    work: Work,
    numel: int,
    SPEC: tl.constexpr,
) -> None:
    """Quantize blocks and write them, with the message's padding."""
    tile, _ = _mine(work)
    block = _blocks(tile, SPEC)
    bits = x.to(tl.int32, bitcast=True)
    largest = tl.max(bits & MAGNITUDE, axis=1).to(tl.float32, bitcast=True)
    # Inf or NaN in a block makes its scale NaN.
    good = (largest.to(tl.int32, bitcast=True) & MAGNITUDE) < INFINITE
    if SPEC.name == "nf4":
        levels = tl.full(largest.shape, 127, tl.float32)
        unit = tl.div_rn(largest, levels).to(tl.int32, bitcast=True)
        unit -= FIRST_SCALE - NEAREST
        step = tl.maximum(unit >> 21, 0)
        good &= step < 255
        stored = tl.where(good, step, 255).to(tl.uint8)
        one = tl.full(largest.shape, 1, tl.float32)
        inverse = tl.div_rn(one, _nf4_scale(step))
        # The last bound below a value gives its level; comparisons in a row take no memory. LLVM
        # would turn a sum of them into counts of bits, with a stack for sm80.
        y = x * inverse[:, None]
        q = tl.full(x.shape, -8, tl.int32)
        for k in tl.static_range(15):
            q = tl.where(y > BOUNDS[k], k - 7, q)
    else:
        tl.static_assert(SPEC.name == "int8" or SPEC.name == "int4")
        levels = tl.full(largest.shape, SPEC.levels, tl.float32)
        tiny = largest < TINY
        stored = tl.where(tiny, 0.0, tl.div_rn(largest, levels))
        stored = tl.where(good, stored, float("nan"))
        inverse = tl.where(tiny, 0.0, tl.div_rn(levels, largest))
        rounded = x * inverse[:, None] + ROUNDER
        q = rounded.to(tl.int32, bitcast=True)
    # Blocks of NaN and blocks behind the last value have codes of zero.
    good &= block * SPEC.block_size < numel
    q = tl.where(good[:, None], q, 0)
    if SPEC.bits == 4:
        # The low nibble is the even element.
        even, odd = tl.split(q.reshape(TILE // SPEC.block_size, SPEC.block_bytes, 2))
        q = (even & 15) | (odd << 4)
    place = block[:, None] * SPEC.block_bytes
    place += tl.arange(0, SPEC.block_bytes)[None, :]
    tl.store(message + place, q.to(tl.uint8), mask=place < planes.scales)
    scales = (message + planes.scales).to(tl.pointer_type(stored.dtype))
    tl.store(scales + block, stored, mask=block * SPEC.block_size < numel)
    # The last program writes the padding: fewer than 128 bytes of zeros
    if tile == (work.tiles >> 2) - 1:
        COUNT: tl.constexpr = 128 // SPEC.scale_bytes
        room = (planes.end - planes.scales) // SPEC.scale_bytes
        end = tl.cast(room - COUNT, tl.int64) + tl.arange(0, COUNT)
        zeros = tl.zeros((COUNT,), stored.dtype)
        tl.store(scales + end, zeros, mask=end * SPEC.block_size >= numel)


@triton.jit
def _nf4_scale(step: tl.tensor) -> tl.tensor:
    """Return the scales of bytes below 255."""
    return ((step << 21) + FIRST_SCALE).to(tl.float32, bitcast=True)


@triton.jit
def _sum(messages: Table, work: Work, numel: int, SPEC: tl.constexpr) -> tl.tensor:
    """Return the sum of the messages' tiles, FP32 ``[blocks, size]``, in order, times the
    factor.
    """
    tile, member = _mine(work)
    # The sum starts at -0, since -0 + x is x for every x; Triton would turn a literal -0.0 into 0.
    SIZE: tl.constexpr = size_of(SPEC)
    sign = tl.full((TILE // SIZE, SIZE), -(2**31), tl.int32)
    total = sign.to(tl.float32, bitcast=True)
    for number in tl.range(work.sources >> 2):
        message = _address(messages, number + (number >= (work.hole >> 2)), member)
        if SPEC.block_size == 1:
            index = _index(tile, SPEC)
            pointers = message.to(tl.pointer_type(_float(SPEC))) + index
            total += _widened(_loaded(pointers, index < numel, (tile + 1) * TILE <= numel))
        else:
            message = tl.multiple_of(message, ALIGNED)
            total += _decode(message, messages, tile, numel, SPEC)
    return total * work.factor


@triton.jit
def _decode(
    message: tl.tensor,
    planes: Table,
    tile: int,
    numel: int,
    SPEC: tl.constexpr,
) -> tl.tensor:
    """Decode a tile's values from one message."""
    WORDS: tl.constexpr = SPEC.block_bytes // 4
    block = _blocks(tile, SPEC)
    present = block * SPEC.block_size < numel
    place = block[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    pointers = message.to(tl.pointer_type(tl.int32)) + place
    words = tl.load(pointers, mask=present[:, None], other=0)
    # A word has 4 or 8 values, which new dimensions of 2 put into their order.
    q = _unpack(words, 0, SPEC.bits, SPEC)
    q = q.reshape(TILE // SPEC.block_size, SPEC.block_size)
    if SPEC.name == "nf4":
        step = tl.load(message + planes.scales + block, mask=present, other=0).to(tl.int32)
        scale = tl.where(step < 255, _nf4_scale(step), float("nan"))
        level = tl.full(q.shape, LEVELS[0], tl.float32)  # exact: sums of small integers
        for k in tl.static_range(15):
            level += tl.where(q > k - 7.5, LEVELS[k + 1] - LEVELS[k], 0.0)
        q = level
    else:
        scales = (message + planes.scales).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + block, mask=present, other=0.0)
    return q * scale[:, None]


@triton.jit
def _unpack(
    words: tl.tensor,
    AT: tl.constexpr,
    STEP: tl.constexpr,
    SPEC: tl.constexpr,
) -> tl.tensor:
    """Return the integers at bits AT, AT + STEP, ... of each word, as floats, in new last
    dimensions of 2.
    """
    HALF: tl.constexpr = SPEC.levels + 1
    SHIFT: tl.constexpr = AT % 16
    MASK: tl.constexpr = (2 * SPEC.levels + 1) << SHIFT
    FLOAT: tl.constexpr = ((150 - SHIFT) << 23) | (HALF << SHIFT)
    if STEP < 32:
        even = _unpack(words, AT, 2 * STEP, SPEC)
        odd = _unpack(words, AT + STEP, 2 * STEP, SPEC)
        return tl.join(even, odd)
    else:
        # The bits of a value become the mantissa of a float with a known exponent; see the head.
        bits = words >> (AT - SHIFT)
        bits = (bits & MASK) ^ FLOAT
        return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - SHIFT) + HALF)


@triton.jit
def _rounded(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Round FP32 to another dtype, to nearest, half to even."""
    if INTERPRETED and DTYPE.is_bf16():
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + (bits >> 16 & 1)
        bits = tl.where(x == x, bits >> 16, 0x7FC0)
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)
