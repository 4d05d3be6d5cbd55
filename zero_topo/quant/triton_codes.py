# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Implements the operations on INT8 weights (codes) as Triton kernels; Note [Codes] in ``ops.py`` defines codes.

A program works on whole blocks, ``[blocks, block]``. It reads the placement of the blocks from tables on the device, so
no size of a model is compiled in.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from zero_topo.quant.operands import Change, Codes, Masters, Messages, Part
from zero_topo.quant.spec import CHUNK, GROUP, HEADROOM, KEPT_FROM, KEPT_TO, TritSpec
from zero_topo.quant.triton_blocks import ALIGNED, MAGNITUDE, ROUNDER, TILE, TINY, Table, address
from zero_topo.quant.triton_sparse import launch

LEVELS = tl.constexpr(127.0)
FIVE = tl.constexpr(GROUP)
MASKED = tl.constexpr(CHUNK)
HEAD = tl.constexpr(128)
RATIOS = tl.constexpr((HEADROOM, KEPT_FROM, KEPT_TO))


class _Weights(NamedTuple):
    """Holds INT8 weights and the part that a launch processes. Integers are ``4 n + 2``, see `triton_blocks.Work`."""

    data: Tensor
    slots: Tensor
    slot_of: Tensor
    begin: int
    width: int
    blocks: int
    members: int


class _Own(NamedTuple):
    """Holds the masters of one member. Integers except the step are stored as ``4 n + 2``."""

    data: Tensor
    step: int
    first: int
    columns: int
    member: int


class _Changes(NamedTuple):
    """Holds a message, the `Change` it encodes, its length in bytes, and the offset of its scales."""

    message: Tensor
    scales: Tensor
    order: Tensor
    escaped: Tensor
    nbytes: int
    scales_at: int


class _Sizes(NamedTuple):
    """Holds the tiles per member, and the offsets in a message that do not depend on the blocks sent whole."""

    tiles: int
    skipped: int
    nbytes: int
    before: int
    scales: int


def codes_assess(masters: Masters, codes: Codes, part: Part, scales: Tensor, escaped: Tensor) -> None:
    """Compute each block's new scale, and whether the block is sent whole."""
    if part.blocks:
        programs = triton.cdiv(part.blocks, _tile(codes))
        launch(_assess, programs, scales, escaped, _weights(codes, part), _own(masters), codes.block)


def codes_emit(masters: Masters, codes: Codes, part: Part, change: Change, message: Tensor) -> None:
    """Update codes and scales, and write the scales, codes and trits of the message.

    Raises:
        ValueError: if the message is not aligned for the kernels, or is too small for any change.
    """
    spec, n = TritSpec(codes.block), part.blocks
    if message.numel() < spec.nbytes(n, 0) or message.data_ptr() % ALIGNED.value:
        raise ValueError(f"a message of {n} blocks is {spec.nbytes(n, 0)} bytes or more, at a multiple of 16 bytes")
    if n:
        ends = _coded(message.numel()), _coded(spec.scales_offset(n))
        changes = _Changes(message, change.scales, change.order, change.count, *ends)
        arguments = _weights(codes, part), _own(masters), codes.block
        launch(_emit, triton.cdiv(n, FIVE.value * _groups(codes)) + 1, changes, *arguments, _groups(codes))


def codes_apply(messages: Messages, codes: Codes, part: Part) -> None:
    """Update the rows of all members except the one left out.

    Raises:
        ValueError: if messages are not aligned for the kernels, or are too small for any change.
    """
    table, spec, n = messages.table, TritSpec(codes.block), part.blocks
    steps = [table.stride(i) if table.shape[i] > 1 else 0 for i in range(3)]
    if any(number % ALIGNED.value for number in (table.data_ptr(), *steps)) or table.shape[-1] < spec.scales_offset(n):
        raise ValueError(f"messages must begin at multiples of 16 bytes, and be larger than their {n} blocks' counts")
    tiles = triton.cdiv(n, _tile(codes))
    skipped = messages.members if messages.without_member < 0 else messages.without_member
    programs = tiles * (messages.members - (skipped < messages.members))
    if programs:
        numbers = tiles, skipped, table.shape[-1], spec.before_offset(n), spec.scales_offset(n)
        where = Table(table, steps[0], steps[1], steps[2], table.shape[2], 0, 0)
        launch(_apply, programs, where, _weights(codes, part), _Sizes._make(map(_coded, numbers)), codes.block)


def _coded(number: int) -> int:
    return 4 * number + 2


def _tile(codes: Codes) -> int:
    return int(TILE.value) // codes.block


def _groups(codes: Codes) -> int:
    """Return the number of groups of five blocks that a program emits."""
    return max(1, 1024 // codes.block)


def _weights(codes: Codes, part: Part) -> _Weights:
    numbers = part.begin, part.end - part.begin, part.blocks, part.members
    return _Weights(codes.held, codes.slots, codes.slot_of, *map(_coded, numbers))


def _own(masters: Masters) -> _Own:
    numbers = masters.first, masters.table.shape[1], masters.member
    return _Own(masters.table, masters.table.stride(0), *map(_coded, numbers))


@triton.jit
def _places(weights: _Weights, block: tl.tensor, member: tl.tensor, SIZE: tl.constexpr) -> tl.tuple:
    """Return for ``[blocks]``: byte offsets of codes and scales, row, first master, and number of masters left."""
    width = weights.width >> 2
    row = block // width
    column = block - row * width + (weights.begin >> 2)
    slot = weights.slots + tl.load(weights.slot_of + column).to(tl.int64) * 6
    here = column - tl.load(slot + 3)
    index = (row * (weights.members >> 2) + member) * tl.load(slot + 2) + here
    codes = tl.multiple_of(tl.load(slot) + index * SIZE, 16)
    inside = here * SIZE
    return codes, tl.load(slot + 1) + index * 4, row, tl.load(slot + 4) + inside, tl.load(slot + 5) - inside


@triton.jit
def _floats(at: tl.tensor) -> tl.tensor:
    return at.to(tl.pointer_type(tl.float32))


@triton.jit
def _bytes(at: tl.tensor, block: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return pointers ``[blocks, block]`` to signed bytes, from offsets ``[blocks]`` on."""
    return at.to(tl.pointer_type(tl.int8)) + (block[:, None] + tl.arange(0, SIZE)[None, :])


@triton.jit
def _values(own: _Own, row: tl.tensor, first: tl.tensor, left: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Load the masters ``[blocks, block]``, zero where there are none."""
    inside = tl.arange(0, SIZE)[None, :]
    at = (first - (own.first >> 2))[:, None] + inside
    exists = (inside < left[:, None]) & (at >= 0) & (at < (own.columns >> 2))
    return tl.load(own.data + row[:, None] * own.step + at, mask=exists, other=0.0)


@triton.jit
def _coding(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return the codes of values, as FP32."""
    usable = scale > 0
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    code = tl.where(usable[:, None], x * inverse[:, None], 0.0)
    return (tl.minimum(tl.maximum(code, -LEVELS), LEVELS) + ROUNDER) - ROUNDER


@triton.jit
def _assess(scales: tl.tensor, escaped: tl.tensor, weights: _Weights, own: _Own, SIZE: tl.constexpr) -> None:
    """Compute the new scales of a tile of blocks, and which of them are sent whole."""
    n = weights.blocks >> 2
    mine = tl.program_id(0).to(tl.int64) * (TILE // SIZE) + tl.arange(0, TILE // SIZE)
    block = tl.minimum(mine, n - 1)
    codes, scales_at, row, first, left = _places(weights, block, own.member >> 2, SIZE)
    x = _values(own, row, first, left, SIZE)
    old = tl.load(_floats(weights.data + scales_at))
    top = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1).to(tl.float32, bitcast=True)
    fresh = tl.div_rn(top * RATIOS[0], tl.full(top.shape, LEVELS, tl.float32))
    fresh = tl.where(top < TINY, 0.0, tl.where(fresh < float("inf"), fresh, float("nan")))
    fits = (top >= old * RATIOS[1]) & (top <= old * RATIOS[2]) & (top < float("inf"))  # the product may be Inf
    scale = tl.where((old > 0) & fits, old, fresh)
    apart = tl.abs(_coding(x, scale) - tl.load(_bytes(weights.data, codes, SIZE)).to(tl.float32))
    moved = tl.max(apart, axis=1) > 1
    moved = moved | (scale.to(tl.int32, bitcast=True) != old.to(tl.int32, bitcast=True))
    tl.store(scales + mine, scale, mask=mine < n)
    tl.store(escaped + mine, moved, mask=mine < n)


@triton.jit
def _emit(changes: _Changes, weights: _Weights, own: _Own, SIZE: tl.constexpr, GROUPS: tl.constexpr) -> None:
    """Emit groups of five blocks as changes, or as many blocks whole; each program loops over such units."""
    n = tl.cast(weights.blocks >> 2, tl.int64)
    escaped = tl.minimum(tl.maximum(tl.load(changes.escaped), 0), n)
    groups = (n - escaped + FIVE - 1) // FIVE
    whole_at = (changes.scales_at >> 2) + (escaped * 4 + 127) // 128 * 128
    trits_at = whole_at + escaped * SIZE
    quiet = (groups + GROUPS - 1) // GROUPS
    if trits_at + groups * SIZE <= (changes.nbytes >> 2):
        for unit in tl.range(
            tl.program_id(0).to(tl.int64), quiet + (escaped + GROUPS - 1) // GROUPS, tl.num_programs(0)
        ):
            if unit < quiet:
                _emit_trits(changes, weights, own, (unit * GROUPS, n - escaped, trits_at), SIZE, GROUPS)
            else:
                at = ((unit - quiet) * GROUPS, escaped, changes.scales_at >> 2, whole_at)
                _emit_whole(changes, weights, own, at, SIZE, GROUPS)


@triton.jit
def _renewed(
    changes: _Changes, weights: _Weights, own: _Own, at: tl.tuple, WHOLE: tl.constexpr, SIZE: tl.constexpr
) -> tl.tuple:
    """Update the codes at some places of the order; return codes or steps, their scales and the scales' offsets.

    Codes that are not sent whole move by at most one towards their masters, which may have been edited since `_assess`.
    """
    place, exists = at
    block = tl.load(changes.order + place, mask=exists, other=0)
    codes, scales_at, row, first, left = _places(weights, block, own.member >> 2, SIZE)
    scale = tl.load(changes.scales + block)
    new = _coding(_values(own, row, first, left, SIZE), scale)
    pointers = _bytes(weights.data, codes, SIZE)
    sent = new
    if not WHOLE:
        old = tl.load(pointers).to(tl.float32)
        sent = tl.where(new > old, 1.0, 0.0) - tl.where(new < old, 1.0, 0.0)
        new = old + sent
    tl.store(pointers, new.to(tl.int8), mask=exists[:, None])
    return sent, scale, scales_at


@triton.jit
def _emit_trits(
    changes: _Changes, weights: _Weights, own: _Own, at: tl.tuple, SIZE: tl.constexpr, GROUPS: tl.constexpr
) -> None:
    first, stay, trits_at = at
    group = first + tl.arange(0, GROUPS)
    packed = tl.zeros((GROUPS, SIZE), tl.float32)
    for k in tl.static_range(FIVE):
        place = group * FIVE + k
        step, _, _ = _renewed(changes, weights, own, (place, place < stay), False, SIZE)
        packed += tl.where((place < stay)[:, None], (step + 1.0) * (3.0**k), 0.0)
    trits = _bytes(changes.message, tl.multiple_of(trits_at + group * SIZE, 16), SIZE)
    tl.store(trits, packed.to(tl.int32).to(tl.int8), mask=(group * FIVE < stay)[:, None])


@triton.jit
def _emit_whole(
    changes: _Changes, weights: _Weights, own: _Own, at: tl.tuple, SIZE: tl.constexpr, GROUPS: tl.constexpr
) -> None:
    first, escaped, scales, whole_at = at
    number = first + tl.arange(0, GROUPS)
    exists = number < escaped
    place = (weights.blocks >> 2) - escaped + number
    new, scale, scales_at = _renewed(changes, weights, own, (place, exists), True, SIZE)
    tl.store(_floats(weights.data + scales_at), scale, mask=exists)
    tl.store(_floats(changes.message + scales) + number, scale, mask=exists)
    whole = _bytes(changes.message, tl.multiple_of(whole_at + number * SIZE, 16), SIZE)
    tl.store(whole, new.to(tl.int8), mask=exists[:, None])


@triton.jit
def _ones(bits: tl.tensor) -> tl.tensor:
    """Return the number of set bits of 32-bit words."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return ((((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int64)


@triton.jit
def _third(packed: tl.tensor, k: tl.tensor) -> tl.tensor:
    """Divide bytes ``[blocks, block]`` by 3^k, ``[blocks]``, rounding down: the product's error is below 1 / 3^5."""
    factor = tl.where(k == 0, 65536, tl.where(k == 1, 21846, tl.where(k == 2, 7282, 2428)))
    factor = tl.where(k < 4, factor, tl.where(k == 4, 810, 270))
    return (packed * factor.to(tl.int32)[:, None]) >> 16


@triton.jit
def _apply(messages: Table, weights: _Weights, sizes: _Sizes, SIZE: tl.constexpr) -> None:
    """Update a tile of a member's blocks; blocks that its message does not hold stay unchanged."""
    n, nbytes, tiles, skipped = weights.blocks >> 2, sizes.nbytes >> 2, sizes.tiles >> 2, sizes.skipped >> 2
    member = tl.program_id(0) // tiles
    mine = (tl.program_id(0) - member * tiles).to(tl.int64) * (TILE // SIZE) + tl.arange(0, TILE // SIZE)
    member += (member >= skipped).to(tl.int32)
    message = tl.multiple_of(address(messages, 0, member), 16)
    block = tl.minimum(mine, n - 1)
    codes, scales_at, _, _, _ = _places(weights, block, member, SIZE)
    words = message.to(tl.pointer_type(tl.uint32))
    escaped = tl.minimum(tl.load(words).to(tl.int64), n)
    word, bit = block // 32, (block % 32).to(tl.uint32)
    bits = tl.load(words + HEAD // 4 + word)
    earlier = tl.load(words + HEAD // 4 + word - 1, mask=word % 2 == 1, other=0)
    before = tl.load(words + (sizes.before >> 2) // 4 + block // MASKED).to(tl.int64)
    before += _ones(earlier) + _ones(bits & ((tl.full(bit.shape, 1, tl.uint32) << bit) - 1))
    whole = ((bits >> bit) & 1) == 1
    rank = tl.where(whole, before, block - before)
    whole_at = (sizes.scales >> 2) + (escaped * 4 + 127) // 128 * 128
    at = tl.where(whole, whole_at + rank * SIZE, whole_at + escaped * SIZE + rank // FIVE * SIZE)
    there = (mine < n) & (rank >= 0) & (at + SIZE <= nbytes)
    received = tl.load(_bytes(message, tl.multiple_of(at, 16), SIZE), mask=there[:, None], other=0).to(tl.int32)
    pointers = _bytes(weights.data, codes, SIZE)
    old = tl.load(pointers).to(tl.int32)
    digit = _third(received & 255, rank % FIVE) - 3 * _third(received & 255, rank % FIVE + 1)
    tl.store(pointers, tl.where(whole[:, None], received, old + digit - 1).to(tl.int8), mask=there[:, None])
    scale = tl.load(_floats(message + (sizes.scales >> 2)) + rank, mask=there & whole, other=0.0)
    tl.store(_floats(weights.data + scales_at), scale, mask=there & whole)
