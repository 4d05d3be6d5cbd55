# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The operations as Triton kernels: for GPUs without a compiler, and for CPU tensors under ``TRITON_INTERPRET=1``.

Note [Tiles]
    A program works on ``TILE`` values, whole blocks: ``[blocks, block_size]``. Whether all of a tile exists is one
    scalar comparison. Only the other tiles are moved with masks, which keep a thread from moving 16 bytes at once.

Note [Addresses]
    The messages of a sum are the chunks of one receive buffer, so their addresses are evenly spaced, and a loop over
    ``address + source * spacing`` serves any number of them with one compiled kernel. A tuple of pointers would need a
    kernel for each number, a table of pointers a copy to the device for each call. Messages that are not evenly spaced
    are stacked first.

Note [Integers in floats]
    Between ``2**23`` and ``2**24`` floats are 1 apart. Adding ``1.5 * 2**23``, which is even, hence rounds a small
    number to an integer, half to even, and leaves that integer in the sum's low bits, in two's complement. Subtracting
    a power of two undoes the like exactly, so neither way needs a conversion instruction. There is no clamp, because
    rounding is monotone: ``|x * inverse| < L + 1/2`` if symmetric, and ``0 <= (x - zero) * inverse < 2**b - 1/2``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_topo.quant.pieces import Piece, write_all
from zero_topo.quant.spec import BlockSpec, Reduce, Total
from zero_topo.quant.triton_sparse import (
    compact_above,
    count_above,
    launch,
    loaded,
    mask_pack,
    mask_unpack,
    sketch_insert,
    sketch_peel,
    widened,
)

__all__ = [
    "compact_above",
    "count_above",
    "dequantize",
    "dequantize_reduce",
    "mask_pack",
    "mask_unpack",
    "quantize",
    "requantize",
    "sketch_insert",
    "sketch_peel",
]

TILE = tl.constexpr(4096)
ALIGNED = tl.constexpr(16)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
ROUNDER = tl.constexpr(1.5 * 2**23)
TINY = tl.constexpr(2.0**-100)
# The interpreter does not round to bfloat16 as GPUs do, half to even.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class _Place(NamedTuple):
    """A piece as kernels take it; columns and stride are 0 if it is flat, lest each size has its own kernel."""

    data: Tensor
    numel: int
    columns: int
    stride: int
    limit: int


class _Fold(NamedTuple):
    """How a piece's rows meet the blocks, which is compiled in.

    Attributes:
        flat: there is but one row.
        narrow: a block may meet more than two rows.
        group: so many values are adjacent, as rows are multiples of it.
    """

    flat: bool
    narrow: bool
    group: int

    @property
    def warps(self) -> int:
        """More where each value has an offset of its own, in registers."""
        return 4 if self.group > 1 else 16


class _Message(NamedTuple):
    """A message to write: its bytes, and where its planes begin."""

    data: Tensor
    scales: int
    zeros: int


class _Messages(NamedTuple):
    """Messages to read; Note [Addresses]."""

    address: int
    spacing: int
    sources: int
    scales: int
    zeros: int


def quantize(pieces: Sequence[Piece], spec: BlockSpec, out: Tensor) -> None:
    """The concatenated pieces -> one message."""
    place, fold = _placed(_one(pieces), spec)
    launch(_quantize, _tiles(place.numel), _written(out, spec, place.numel), place, spec, fold, warps=fold.warps)


def dequantize(message: Tensor, spec: BlockSpec, pieces: Sequence[Piece]) -> None:
    """One message -> the pieces."""
    dequantize_reduce([message], spec, pieces, Reduce())


def dequantize_reduce(messages: Sequence[Tensor], spec: BlockSpec, pieces: Sequence[Piece], reduce: Reduce) -> None:
    """The messages' sum -> the pieces."""
    target = _one(pieces)
    place, fold = _placed(target, spec)
    messages = _spaced(messages)
    sources = _described(messages, spec, place.numel)
    arguments = place, sources, reduce.factor, spec, fold, reduce.accumulate
    launch(_dequantize_reduce, _tiles(place.numel), *arguments, warps=fold.warps)
    if target is not pieces[0]:
        write_all(target.flat, pieces)


def requantize(messages: Sequence[Tensor], source: BlockSpec, spec: BlockSpec, out: Tensor, total: Total) -> None:
    """The messages' sum -> one message."""
    messages = _spaced(messages)
    sources, message = _described(messages, source, total.numel), _written(out, spec, total.numel)
    launch(_requantize, _tiles(total.numel), message, sources, total.numel, total.factor, source, spec)


def _tiles(numel: int) -> int:
    return -(-numel // TILE.value)


def _one(pieces: Sequence[Piece]) -> Piece:
    """The piece, or a contiguous copy of several: a block may begin in one and end in another."""
    if len(pieces) == 1:
        return pieces[0]
    dtypes = {piece.flat.dtype for piece in pieces}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    flat = torch.cat([piece.read(dtype) for piece in pieces])
    return Piece(flat, 1, flat.numel(), flat.numel())


def _placed(piece: Piece, spec: BlockSpec) -> tuple[_Place, _Fold]:
    if piece.rows == 1 or piece.stride == piece.columns:
        return _Place(piece.flat, piece.numel, 0, 0, piece.flat.numel()), _Fold(True, False, ALIGNED.value)
    place = _Place(piece.flat, piece.numel, piece.columns, piece.stride, piece.flat.numel())
    group = 1 if piece.columns % ALIGNED.value else ALIGNED.value
    return place, _Fold(False, piece.columns < spec.block_size, group)


def _written(out: Tensor, spec: BlockSpec, numel: int) -> _Message:
    if out.data_ptr() % ALIGNED.value:
        raise ValueError(f"a message must begin at a multiple of {ALIGNED.value} bytes, not at {out.data_ptr():#x}")
    return _Message(out, spec.scales_offset(numel), spec.zero_points_offset(numel))


def _spaced(messages: Sequence[Tensor]) -> Sequence[Tensor]:
    """The messages, aligned and evenly spaced: Note [Addresses]."""
    addresses = [message.data_ptr() for message in messages]
    spacings = {after - before for before, after in pairwise(addresses)}
    even = len(spacings) <= 1 and not any(number % ALIGNED.value for number in addresses)
    return messages if even else torch.stack(list(messages)).unbind()


def _described(messages: Sequence[Tensor], spec: BlockSpec, numel: int) -> _Messages:
    """The messages as kernels take them; the caller keeps them alive until the launch."""
    address = messages[0].data_ptr()
    spacing = messages[-1].data_ptr() - address
    spacing //= max(len(messages) - 1, 1)
    return _Messages(address, spacing, len(messages), spec.scales_offset(numel), spec.zero_points_offset(numel))


@triton.jit
def _quantize(message: _Message, place: _Place, SPEC: tl.constexpr, FOLD: tl.constexpr) -> None:
    """A tile of a piece -> its blocks of the message."""
    offsets, exists, whole = _find(place, SPEC, FOLD)
    x = widened(loaded(place.data + offsets, exists, whole))
    _encode(x.reshape(TILE // SPEC.block_size, SPEC.block_size), message, place.numel, SPEC)


@triton.jit
def _dequantize_reduce(
    place: _Place,
    messages: _Messages,
    factor: float,
    SPEC: tl.constexpr,
    FOLD: tl.constexpr,
    ACCUMULATE: tl.constexpr,
) -> None:
    """A tile of the messages' sum -> its values in the piece."""
    offsets, exists, whole = _find(place, SPEC, FOLD)
    total = (_sum(messages, place.numel, SPEC) * factor).reshape(offsets.shape)
    pointers: tl.tensor = place.data + offsets
    if ACCUMULATE:
        total = widened(loaded(pointers, exists, whole)) + total
    rounded = _rounded(total, pointers.dtype.element_ty)
    if whole:
        tl.store(pointers, rounded)
    else:
        tl.store(pointers, rounded, mask=exists)


@triton.jit
def _requantize(
    message: _Message, messages: _Messages, numel: int, factor: float, SOURCE: tl.constexpr, SPEC: tl.constexpr
) -> None:
    """A tile of the messages' sum -> its blocks of another message."""
    index = _blocks(SPEC)[:, None] * SPEC.block_size + tl.arange(0, SPEC.block_size)[None, :]
    total = _sum(messages, numel, SOURCE) * factor
    _encode(tl.where(index < numel, total, 0.0), message, numel, SPEC)


@triton.jit
def _blocks(SPEC: tl.constexpr) -> tl.tensor:
    """The tile's blocks, int64 ``[blocks]``."""
    COUNT: tl.constexpr = TILE // SPEC.block_size
    return tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)


@triton.jit
def _find(place: _Place, SPEC: tl.constexpr, FOLD: tl.constexpr) -> tl.tuple:
    """Offsets of the tile's values, ``[blocks, groups, group]``; which of them exist; whether all do."""
    first = _blocks(SPEC)[:, None] * SPEC.block_size
    within = tl.arange(0, SPEC.block_size // FOLD.group)[None, :] * FOLD.group
    last = tl.program_id(0).to(tl.int64) * TILE + (TILE - 1)
    if FOLD.flat:
        start = first + within
        end = last
    else:
        row = first // place.columns
        column = first - row * place.columns + within
        if FOLD.narrow:
            over = (column.to(tl.int32) // tl.cast(place.columns, tl.int32)).to(tl.int64)
        else:
            over = (column >= place.columns).to(tl.int64)
        start = (row + over) * place.stride + (column - over * place.columns)
        end = last // place.columns * place.stride + last % place.columns
    member = tl.arange(0, FOLD.group)[None, None, :]
    offsets = start[:, :, None] + member
    exists = ((first + within)[:, :, None] + member < place.numel) & (offsets < place.limit)
    return offsets, exists, (last < place.numel) & (end < place.limit)


@triton.jit
def _encode(x: tl.tensor, message: _Message, numel: int, SPEC: tl.constexpr) -> None:
    """Quantize blocks ``[blocks, block_size]`` and write all that the message has of them, its padding included."""
    BIAS: tl.constexpr = 0 if SPEC.symmetric else SPEC.levels + 1
    block = _blocks(SPEC)
    bits = x.to(tl.int32, bitcast=True)
    if SPEC.symmetric:
        span = tl.max(bits & MAGNITUDE, axis=1).to(tl.float32, bitcast=True)
        levels = tl.full(span.shape, SPEC.levels, tl.float32)
    else:
        ordered = bits ^ ((bits >> 31) & MAGNITUDE)
        lo, hi = tl.min(ordered, axis=1), tl.max(ordered, axis=1)
        zero = (lo ^ ((lo >> 31) & MAGNITUDE)).to(tl.float32, bitcast=True)
        zero = tl.where(zero == 0.0, 0.0, zero)
        span = (hi ^ ((hi >> 31) & MAGNITUDE)).to(tl.float32, bitcast=True) - zero
        levels = tl.full(span.shape, 2 * SPEC.levels + 1, tl.float32)
        x = x - zero[:, None]
    good = (span.to(tl.int32, bitcast=True) & MAGNITUDE) < INFINITE
    tiny = span < TINY
    scale = tl.where(good, tl.where(tiny, 0.0, tl.div_rn(span, levels)), float("nan"))
    inverse = tl.where(tiny, 0.0, tl.div_rn(levels, span))
    q = (x * inverse[:, None] + ROUNDER).to(tl.int32, bitcast=True) ^ BIAS
    q = tl.where((good & (block * SPEC.block_size < numel))[:, None], q, 0)
    if SPEC.bits == 4:
        even, odd = tl.split(q.reshape(TILE // SPEC.block_size, SPEC.block_bytes, 2))
        q = (even & 15) | (odd << 4)
    place = block[:, None] * SPEC.block_bytes + tl.arange(0, SPEC.block_bytes)[None, :]
    tl.store(message.data + place, q.to(tl.uint8), mask=place < message.scales)
    _store_plane(message.data + message.scales, scale, message, numel, SPEC)
    if not SPEC.symmetric:
        _store_plane(message.data + message.zeros, tl.where(good, zero, 0.0), message, numel, SPEC)


@triton.jit
def _store_plane(plane: tl.tensor, values: tl.tensor, message: _Message, numel: int, SPEC: tl.constexpr) -> None:
    """Write one float per block; the last program also writes the plane's padding, less than 32 zeros."""
    floats = plane.to(tl.pointer_type(tl.float32))
    block = _blocks(SPEC)
    tl.store(floats + block, values, mask=block * SPEC.block_size < numel)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        end = tl.cast((message.zeros - message.scales) // 4 - 32, tl.int64) + tl.arange(0, 32)
        tl.store(floats + end, tl.zeros((32,), tl.float32), mask=end * SPEC.block_size >= numel)


@triton.jit
def _sum(messages: _Messages, numel: int, SPEC: tl.constexpr) -> tl.tensor:
    """The messages' values of the tile, FP32 ``[blocks, block_size]``, added up in order."""
    total = tl.full((TILE // SPEC.block_size, SPEC.block_size), -0.0, tl.float32)  # -0 + x is x, whatever x
    for source in tl.range(messages.sources):
        total += _decode(messages, source, numel, SPEC)
    return total


@triton.jit
def _decode(messages: _Messages, source: int, numel: int, SPEC: tl.constexpr) -> tl.tensor:
    """One message's values of the tile."""
    WORDS: tl.constexpr = SPEC.block_bytes // 4
    address = messages.address + tl.cast(source, tl.int64) * messages.spacing
    block = _blocks(SPEC)
    present = block * SPEC.block_size < numel
    values = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), ALIGNED)
    place = block[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    words = tl.load(values + place, mask=present[:, None], other=0)
    scale = tl.load((address + messages.scales).to(tl.pointer_type(tl.float32)) + block, mask=present, other=0.0)
    x = _unpack(words, 0, SPEC.bits, SPEC).reshape(TILE // SPEC.block_size, SPEC.block_size) * scale[:, None]
    if not SPEC.symmetric:
        zero = tl.load((address + messages.zeros).to(tl.pointer_type(tl.float32)) + block, mask=present, other=0.0)
        x += zero[:, None]
    return x


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
        return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - SHIFT) + (HALF if SPEC.symmetric else 0))


@triton.jit
def _rounded(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """FP32 -> another dtype, to nearest, half to even."""
    if INTERPRETED and DTYPE.is_bf16():
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)
