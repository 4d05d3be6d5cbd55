# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Implements the operations on INT8 weights (codes) as Triton kernels; Note [Codes] in ``ops.py``
defines codes.

A program works on whole blocks, ``[blocks, block]``. It reads the placement of the blocks from
tables on the device, so no size of a model is compiled in.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from zero_topo.quant.operands import Change, Codes, Masters, Messages, Part
from zero_topo.quant.spec import CHUNK, HEADROOM, KEPT_FROM, KEPT_TO, LARGE, WHOLE, ChangeSpec
from zero_topo.quant.triton_blocks import (
    ALIGNED,
    MAGNITUDE,
    ROUNDER,
    TILE,
    TINY,
    Table,
    address,
    member_of,
    programs_of,
    table_of,
)
from zero_topo.quant.triton_sparse import launch

LEVELS = tl.constexpr(127.0)
CHUNKED = tl.constexpr(CHUNK)
WHOLLY = tl.constexpr(WHOLE)
LARGELY = tl.constexpr(LARGE)
# Values of a program that emits or applies: so many need no spills
FEWER = tl.constexpr(TILE.value // 2)
RATIOS = tl.constexpr((HEADROOM, KEPT_FROM, KEPT_TO))


class _Weights(NamedTuple):
    """Holds INT8 weights and the part that a launch processes. Integers are ``4 n + 2``, see
    `triton_blocks.Work`.
    """

    data: Tensor
    param_indices: Tensor
    param_index_of: Tensor
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
    """Holds a message, the `Change` it encodes, its length in bytes, and the offset of its
    scales.
    """

    message: Tensor
    scales: Tensor
    counts: Tensor
    steps: Tensor
    ends: Tensor
    nbytes: int
    scales_at: int


class _Sizes(NamedTuple):
    """Holds the tiles per member, and the offsets in a message that do not depend on the blocks
    sent whole.
    """

    tiles: int
    skipped: int
    nbytes: int
    counts: int
    scales: int


def codes_assess(
    masters: Masters,
    codes: Codes,
    part: Part,
    scales: Tensor,
    counts: Tensor,
    steps: Tensor,
    sizes: Tensor,
) -> None:
    """Compute each block's new scale, the counts of its tiles, which codes change, and its part of
    the message.
    """
    if part.blocks:
        programs = triton.cdiv(part.blocks, TILE.value // codes.block)
        tile = ChangeSpec(codes.block).tile
        arguments = _weights(codes, part), _own(masters), codes.block, tile
        launch(_assess, programs, scales, counts, steps, sizes, *arguments)


def codes_emit(masters: Masters, codes: Codes, part: Part, change: Change, message: Tensor) -> None:
    """Update codes and scales, and write the scales, codes and changes of the message.

    Raises:
        ValueError: if the message is not aligned for the kernels, or is too small for any change.
    """
    spec = ChangeSpec(codes.block)
    n = part.blocks
    least = spec.nbytes(n, 0, 0)
    if message.numel() < least or message.data_ptr() % ALIGNED.value:
        raise ValueError(
            f"a message of {n} blocks is {least} bytes or more, at a multiple of 16 bytes"
        )
    if n:
        sizes = _coded(message.numel()), _coded(spec.scales_offset(n))
        changes = _Changes(message, change.scales, change.counts, change.steps, change.ends, *sizes)
        programs = triton.cdiv(n, FEWER.value // codes.block)
        arguments = _weights(codes, part), _own(masters), codes.block, spec.tile
        # The second launch follows the first on the same stream: both write codes, of different
        # tiles.
        for kernel in (_emit, _emit_new):
            launch(kernel, programs, changes, *arguments)


def codes_apply(messages: Messages, codes: Codes, part: Part) -> None:
    """Update the rows of all members except the one left out.

    Raises:
        ValueError: if messages are not aligned for the kernels, or are too small for any change.
    """
    spec = ChangeSpec(codes.block)
    n = part.blocks
    nbytes = messages.table.shape[-1]
    scales = spec.scales_offset(n)
    if nbytes < scales:
        raise ValueError(f"messages must be larger than their {n} blocks' counts")
    table = table_of(messages.table, ALIGNED.value, "changes")
    tiles = triton.cdiv(n, FEWER.value // codes.block)
    skipped, programs = programs_of(messages, tiles)
    if programs:
        numbers = tiles, skipped, nbytes, spec.counts_offset(n), scales
        sizes = _Sizes._make(map(_coded, numbers))
        launch(_apply, programs, table, _weights(codes, part), sizes, codes.block, spec.tile)


def _coded(number: int) -> int:
    return 4 * number + 2


def _weights(codes: Codes, part: Part) -> _Weights:
    numbers = part.begin, part.end - part.begin, part.blocks, part.members
    return _Weights(codes.stored, codes.param_indices, codes.param_index_of, *map(_coded, numbers))


def _own(masters: Masters) -> _Own:
    numbers = masters.first, masters.table.shape[1], masters.member
    return _Own(masters.table, masters.table.stride(0), *map(_coded, numbers))


@triton.jit
def _places(weights: _Weights, block: tl.tensor, member: tl.tensor, SIZE: tl.constexpr) -> tl.tuple:
    """Return for ``[blocks]``: byte offsets of codes and scales, row, first master, and number of
    masters left.
    """
    width = weights.width >> 2
    row = block // width
    column = block - row * width + (weights.begin >> 2)
    index_of = tl.load(weights.param_index_of + column).to(tl.int64)
    param_index = weights.param_indices + index_of * 6
    here = column - tl.load(param_index + 3)
    # Row r of member m is row m + r * members of the shard.
    shard_row = row * (weights.members >> 2) + member
    index = shard_row * tl.load(param_index + 2) + here
    # A block has a multiple of 64 codes, so each thread may read 16 bytes at once.
    codes = tl.multiple_of(tl.load(param_index) + index * SIZE, 16)
    scales = tl.load(param_index + 1) + index * 4
    inside = here * SIZE
    first = tl.load(param_index + 4) + inside
    left = tl.load(param_index + 5) - inside
    return codes, scales, row, first, left


@triton.jit
def _blocks(weights: _Weights, program: int, COUNT: tl.constexpr) -> tl.tuple:
    """Return a program's blocks, int64 ``[COUNT]``, and which exist; the others are the last block,
    which is read again.
    """
    n = weights.blocks >> 2
    first = tl.cast(program, tl.int64) * COUNT
    block = first + tl.arange(0, COUNT)
    return tl.minimum(block, n - 1), block < n


@triton.jit
def _values_of(VALUES: tl.constexpr) -> tl.tensor:
    """Return the positions in a tile, ``[1, 1, VALUES]``."""
    return tl.arange(0, VALUES)[None, None, :]


@triton.jit
def _codes_of(
    data: tl.tensor,
    codes: tl.tensor,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
) -> tl.tensor:
    """Return pointers to codes ``[blocks, tiles, VALUES]``, from byte offsets ``[blocks]`` on."""
    tile = tl.arange(0, SIZE // VALUES)[None, :, None]
    first = (data + codes).to(tl.pointer_type(tl.int8))
    tiles = first[:, None, None] + tile * VALUES
    return tiles + _values_of(VALUES)


@triton.jit
def _counts(
    counts: tl.tensor,
    block: tl.tensor,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
) -> tl.tensor:
    """Load the counts of blocks' tiles, int32 ``[blocks, tiles]``."""
    TILES: tl.constexpr = SIZE // VALUES
    at = counts + block[:, None] * TILES
    at += tl.arange(0, TILES)[None, :]
    return tl.load(at).to(tl.int32)


@triton.jit
def _masks(
    changes: _Changes,
    block: tl.tensor,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
) -> tl.tensor:
    """Return pointers to the first byte of each tile's masks, ``[blocks, tiles]``."""
    tile = tl.arange(0, SIZE // VALUES)[None, :]
    steps = changes.steps + block[:, None] * (SIZE // 4)
    return steps + tile * (VALUES // 4)


@triton.jit
def _bits(bytes_at: tl.tensor, VALUES: tl.constexpr) -> tl.tensor:
    """Return each value's bit of the byte that has it, int32 ``[blocks, tiles, VALUES]``."""
    bits = tl.load(bytes_at) >> _values_of(VALUES) % 8
    return (bits & 1).to(tl.int32)


@triton.jit
def _largest(x: tl.tensor) -> tl.tensor:
    """Return the largest of ``[blocks, tiles]`` numbers."""
    return tl.max(tl.max(x, axis=1), axis=0)


@triton.jit
def _floats(at: tl.tensor) -> tl.tensor:
    return at.to(tl.pointer_type(tl.float32))


@triton.jit
def _bytes(at: tl.tensor, block: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return pointers ``[blocks, block]`` to signed bytes, from offsets ``[blocks]`` on."""
    pointer = at.to(tl.pointer_type(tl.int8))
    offsets = block[:, None] + tl.arange(0, SIZE)[None, :]
    return pointer + offsets


@triton.jit
def _values(
    own: _Own,
    row: tl.tensor,
    first: tl.tensor,
    left: tl.tensor,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Load the masters ``[blocks, block]``, zero where there are none."""
    inside = tl.arange(0, SIZE)[None, :]
    at = (first - (own.first >> 2))[:, None] + inside
    exists = (inside < left[:, None]) & (at >= 0)
    exists &= at < (own.columns >> 2)
    rows = own.data + row[:, None] * own.step
    return tl.load(rows + at, mask=exists, other=0.0)


@triton.jit
def _coding(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return the codes of values, as FP32."""
    usable = scale > 0
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    code = tl.where(usable[:, None], x * inverse[:, None], 0.0)
    clamped = tl.minimum(tl.maximum(code, -LEVELS), LEVELS)
    # Adding and subtracting the number rounds to an integer, half to even.
    return clamped + ROUNDER - ROUNDER


@triton.jit
def _assess(
    scales: tl.tensor,
    counts: tl.tensor,
    steps: tl.tensor,
    sizes: tl.tensor,
    weights: _Weights,
    own: _Own,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Compute of some blocks the new scales, the counts of their tiles of ``VALUES``, which codes
    change, and sizes.
    """
    block, exists = _blocks(weights, tl.program_id(0), TILE // SIZE)
    codes, scales_at, row, first, left = _places(weights, block, own.member >> 2, SIZE)
    x = _values(own, row, first, left, SIZE)
    old = tl.load(_floats(weights.data + scales_at))
    # Magnitudes of floats are ordered as their bits are, and NaN is the largest of all.
    magnitude = x.to(tl.int32, bitcast=True) & MAGNITUDE
    top = tl.max(magnitude, axis=1).to(tl.float32, bitcast=True)
    scale = _scale_from_now(top, old)
    change = _coding(x, scale)
    change -= tl.load(_bytes(weights.data, codes, SIZE)).to(tl.float32)
    changed = (change != 0).to(tl.int32)
    less = (change < 0).to(tl.int32)
    tile = tl.arange(0, SIZE // VALUES)[None, :]
    present = exists[:, None]
    # By tile: how many codes change, and whether one of them by more than 1.
    changed_tiles = tl.reshape(changed, (TILE // SIZE, SIZE // VALUES, VALUES))
    number = tl.sum(changed_tiles, axis=2)
    distances = tl.reshape(tl.abs(change), (TILE // SIZE, SIZE // VALUES, VALUES))
    far = tl.max(distances, axis=2) > 1
    whole = tl.max(number, axis=1) > VALUES - VALUES // 8
    # Bits are compared: a scale that is NaN differs from itself, yet the copies have it already.
    whole |= scale.to(tl.int32, bitcast=True) != old.to(tl.int32, bitcast=True)
    count = number + LARGELY * far.to(tl.int32)
    count = tl.where(whole[:, None], WHOLLY, count)
    at = counts + block[:, None] * (SIZE // VALUES) + tile
    tl.store(at, count.to(tl.uint8), mask=present)
    size = tl.sum(_tile_bytes(count, VALUES), axis=1)
    size = tl.where(whole, 0, size)
    tl.store(sizes + 2 * block, whole.to(tl.int64), mask=exists)
    tl.store(sizes + 2 * block + 1, size.to(tl.int64), mask=exists)
    # Two masks of each tile, one behind the other: which codes change, and which decrease.
    byte = tl.arange(0, SIZE // 8)[None, :]
    tile = byte // (VALUES // 8)
    at = steps + block[:, None] * (SIZE // 4)
    at += tile * (VALUES // 4) + byte % (VALUES // 8)
    tl.store(at, _packed(changed, SIZE), mask=present)
    tl.store(at + VALUES // 8, _packed(less, SIZE), mask=present)
    tl.store(scales + block, scale, mask=exists)


@triton.jit
def _scale_from_now(top: tl.tensor, old: tl.tensor) -> tl.tensor:
    """Return the new scales of blocks from their largest magnitudes and their old scales."""
    fresh = tl.div_rn(top * RATIOS[0], tl.full(top.shape, LEVELS, tl.float32))
    # A quotient that is Inf or NaN makes the scale NaN, so that overflow is seen after a gather.
    fresh = tl.where(fresh < float("inf"), fresh, float("nan"))
    fresh = tl.where(top < TINY, 0.0, fresh)
    kept = old > 0
    kept &= top >= old * RATIOS[1]
    kept &= top <= old * RATIOS[2]
    kept &= top < float("inf")  # the product may be Inf
    return tl.where(kept, old, fresh)


@triton.jit
def _packed(bits: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Pack bits ``[blocks, block]`` into bytes ``[blocks, block / 8]``."""
    eight = tl.reshape(bits, (TILE // SIZE, SIZE // 8, 8))
    eight <<= tl.arange(0, 8)[None, None, :]
    return tl.sum(eight, axis=2).to(tl.uint8)


@triton.jit
def _tile_bytes(count: tl.tensor, VALUES: tl.constexpr) -> tl.tensor:
    """Return the bytes of tiles with given counts."""
    number = count % LARGELY
    small = tl.minimum(number, VALUES // 8 + (number + 7) // 8)
    large = tl.minimum(number, VALUES // 8) + number
    return tl.where(count < LARGELY, small, large)


@triton.jit
def _listed(count: tl.tensor, VALUES: tl.constexpr) -> tl.tensor:
    """Return whether positions are a list, for tiles with given counts."""
    number = count % LARGELY
    signs = tl.where(count < LARGELY, (number + 7) // 8, 0)
    return number <= VALUES // 8 + signs


@triton.jit
def _possible(count: tl.tensor, VALUES: tl.constexpr) -> tl.tensor:
    """Return counts that tiles may have."""
    number = tl.minimum(count % LARGELY, VALUES - VALUES // 8)
    return count // LARGELY * LARGELY + number


@triton.jit
def _room(changes: _Changes, weights: _Weights, SIZE: tl.constexpr) -> tl.tuple:
    """Return where codes and changes begin, and whether the message has room for all of them."""
    n = tl.cast(weights.blocks >> 2, tl.int64)
    nbytes = tl.cast(changes.nbytes >> 2, tl.int64)
    # The last entry has the sums over all blocks: those sent whole, and the bytes of changes.
    every = tl.load(changes.ends + 2 * n - 2)
    total = tl.load(changes.ends + 2 * n - 1)
    whole_at = (changes.scales_at >> 2) + (every * 4 + 127) // 128 * 128
    tiles_at = whole_at + every * SIZE
    fits = (every >= 0) & (every <= n)
    fits = fits & (total >= 0) & (tiles_at + total <= nbytes)
    return whole_at, tiles_at, fits


@triton.jit
def _emit(
    changes: _Changes,
    weights: _Weights,
    own: _Own,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Emit some blocks, unless the message is too small for all."""
    n = weights.blocks >> 2
    whole_at, tiles_at, fits = _room(changes, weights, SIZE)
    if fits:
        COUNT: tl.constexpr = FEWER // SIZE
        mine = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
        block = tl.minimum(mine, n - 1)
        whole = tl.load(changes.counts + block * (SIZE // VALUES)) == WHOLLY
        # The sums up to the block before this one say where its part of the message begins.
        before = changes.ends + 2 * block - 2
        # Most programs have no such block, and skip its loads. Which blocks exist is compared in
        # both places: kept for the second one it would need more registers than a gfx90a has.
        if tl.max(whole.to(tl.int32), axis=0) > 0:
            rank = tl.load(before, mask=block > 0, other=0)
            sent = block, (mine < n) & whole, rank, whole_at
            _emit_whole(changes, weights, own, sent, SIZE)
        start = tiles_at + tl.load(before + 1, mask=block > 0, other=0)
        coded = block, (mine < n) & (whole == 0), start
        _emit_tiles(changes, weights, own, coded, SIZE, VALUES)


@triton.jit
def _emit_whole(
    changes: _Changes,
    weights: _Weights,
    own: _Own,
    at: tl.tuple,
    SIZE: tl.constexpr,
) -> None:
    """Emit the blocks that are sent whole."""
    block, exists, rank, whole_at = at
    codes, scales_at, row, first, left = _places(weights, block, own.member >> 2, SIZE)
    scale = tl.load(changes.scales + block)
    x = _values(own, row, first, left, SIZE)
    new = _coding(x, scale).to(tl.int8)
    tl.store(_bytes(weights.data, codes, SIZE), new, mask=exists[:, None])
    tl.store(_floats(weights.data + scales_at), scale, mask=exists)
    scales = _floats(changes.message + (changes.scales_at >> 2))
    tl.store(scales + rank, scale, mask=exists)
    sent = _bytes(changes.message, tl.multiple_of(whole_at + rank * SIZE, 16), SIZE)
    tl.store(sent, new, mask=exists[:, None])


@triton.jit
def _emit_tiles(
    changes: _Changes,
    weights: _Weights,
    own: _Own,
    at: tl.tuple,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Apply the steps of blocks that are not sent whole, and encode them; of large changes only the
    positions.
    """
    block, exists, start = at
    count = _counts(changes.counts, block, SIZE, VALUES)
    count = tl.where(exists[:, None], count, 0)
    small = (count < LARGELY)[:, :, None]
    size = _tile_bytes(count, VALUES)
    number = count % LARGELY
    listed = _listed(count, VALUES)
    # Tiles of a block follow each other: the exclusive sum of their bytes is where each begins.
    begin = tl.cumsum(size, axis=1) - size
    out = changes.message + (start[:, None] + begin)
    masks = _masks(changes, block, SIZE, VALUES)
    bytes_at = masks[:, :, None] + _values_of(VALUES) // 8
    has_changes = (count > 0).to(tl.int32)
    changed = _bits(bytes_at, VALUES) * has_changes[:, :, None]
    less = _bits(bytes_at + VALUES // 8, VALUES) & changed
    less = tl.where(small, less, 0)
    # Small changes are applied here; `_emit_new` stores the others, of which it has the values.
    codes, _, _, _, _ = _places(weights, block, own.member >> 2, SIZE)
    pointers = _codes_of(weights.data, codes, SIZE, VALUES)
    new = tl.load(pointers).to(tl.int32)
    new += changed - 2 * less
    tl.store(pointers, new.to(tl.int8), mask=(changed == 1) & small)
    rank = tl.cumsum(changed, axis=2) - changed
    fits = (changed == 1) & (rank < number[:, :, None])
    entry = (_values_of(VALUES) | less << 7).to(tl.uint8)
    tl.store(out[:, :, None] + rank, entry, mask=fits & listed[:, :, None])
    # A mask of a tile is copied as it was assessed; then follow the signs, eight to a byte.
    masked = listed == 0
    if _largest(masked.to(tl.int32)) > 0:
        byte = tl.arange(0, VALUES // 8)[None, None, :]
        mask = tl.load(masks[:, :, None] + byte)
        tl.store(out[:, :, None] + byte, mask, mask=masked[:, :, None])
        signed = masked & (count < LARGELY)
        for k in tl.range(0, VALUES // 8):
            bits = tl.where(rank // 8 == k, less << rank % 8, 0)
            signs = tl.sum(bits, axis=2).to(tl.uint8)
            tl.store(out + (VALUES // 8 + k), signs, mask=signed & (8 * k < number))


@triton.jit
def _emit_new(
    changes: _Changes,
    weights: _Weights,
    own: _Own,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Store and send the new codes of some blocks' tiles with large changes, unless the message is
    too small for all.

    This is a kernel of its own because together with the others it would need more registers than
    GPUs have.
    """
    _whole_at, tiles_at, fits = _room(changes, weights, SIZE)
    block, exists = _blocks(weights, tl.program_id(0), FEWER // SIZE)
    count = _counts(changes.counts, block, SIZE, VALUES)
    count = tl.where(exists[:, None] & (count != WHOLLY), count, 0)
    if fits & (_largest(count) >= LARGELY):
        size = _tile_bytes(count, VALUES)
        number = count % LARGELY
        start = tiles_at + tl.load(changes.ends + 2 * block - 1, mask=block > 0, other=0)
        # The new codes are the last bytes of a tile: they begin their number before its end.
        begin = tl.cumsum(size, axis=1) - number
        out = changes.message + (start[:, None] + begin)
        masks = _masks(changes, block, SIZE, VALUES)
        changed = _bits(masks[:, :, None] + _values_of(VALUES) // 8, VALUES)
        rank = tl.cumsum(changed, axis=2) - changed
        codes, _, row, first, left = _places(weights, block, own.member >> 2, SIZE)
        scale = tl.load(changes.scales + block)
        x = _values(own, row, first, left, SIZE)
        new = _coding(x, scale).to(tl.int8)
        new = tl.reshape(new, (FEWER // SIZE, SIZE // VALUES, VALUES))
        large = tl.where(count >= LARGELY, number, 0)
        sent = (changed == 1) & (rank < large[:, :, None])
        tl.store(out[:, :, None] + rank, new.to(tl.uint8, bitcast=True), mask=sent)
        tl.store(_codes_of(weights.data, codes, SIZE, VALUES), new, mask=sent)


@triton.jit
def _apply(
    messages: Table,
    weights: _Weights,
    sizes: _Sizes,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Update some blocks of a member; blocks that its message does not hold stay unchanged."""
    TILES: tl.constexpr = SIZE // VALUES
    nbytes = sizes.nbytes >> 2
    # Programs of all members share one axis; those behind the member left out are one number ahead.
    program, member = member_of(sizes.tiles, sizes.skipped)
    block, exists = _blocks(weights, program, FEWER // SIZE)
    message = tl.multiple_of(address(messages, 0, member), 16)
    chunk = block // CHUNKED
    counts = message + (sizes.counts >> 2)
    at = chunk[:, None] * (CHUNKED * TILES)
    at += tl.arange(0, CHUNKED * TILES)[None, :]
    # The header has sums for every 32 blocks only: the counts of the blocks since then are added
    # up.
    earlier = tl.load(counts + at, mask=at < block[:, None] * TILES, other=0)
    earlier = earlier.to(tl.int32)
    count = _counts(counts, block, SIZE, VALUES)
    header = message.to(tl.pointer_type(tl.uint32))
    ends = header + 2 * chunk
    rank = tl.load(ends - 2, mask=chunk > 0, other=0).to(tl.int64)
    rank += tl.sum((earlier == WHOLLY).to(tl.int32), axis=1) // TILES
    begin = tl.load(ends - 1, mask=chunk > 0, other=0).to(tl.int64)
    skipped = _tile_bytes(_possible(earlier, VALUES), VALUES)
    skipped = tl.where(earlier == WHOLLY, 0, skipped)
    begin += tl.sum(skipped, axis=1)
    last = ((weights.blocks >> 2) - 1) // CHUNKED
    every = tl.load(header + 2 * last).to(tl.int64)
    whole_at = (sizes.scales >> 2) + (every * 4 + 127) // 128 * 128
    # Counts come from another rank: none may lead a read or a write out of its memory.
    whole = tl.max((count == WHOLLY).to(tl.int32), axis=1) > 0
    count = tl.where(whole[:, None], 0, _possible(count, VALUES))
    begin += whole_at + every * SIZE
    codes, scales_at, _, _, _ = _places(weights, block, member, SIZE)
    # A message too short for a block leaves it unchanged.
    there = whole & exists & (whole_at + (rank + 1) * SIZE <= nbytes)
    if tl.max(there.to(tl.int32), axis=0) > 0:
        sent = tl.multiple_of(tl.where(there, whole_at + rank * SIZE, 0), 16)
        received = tl.load(_bytes(message, sent, SIZE), mask=there[:, None], other=0)
        tl.store(_bytes(weights.data, codes, SIZE), received, mask=there[:, None])
        scales = _floats(message + (sizes.scales >> 2))
        scale = tl.load(scales + rank, mask=there, other=0.0)
        tl.store(_floats(weights.data + scales_at), scale, mask=there)
    # The same for changes that would end behind the message.
    size = tl.sum(_tile_bytes(count, VALUES), axis=1)
    there = exists & (begin + size <= nbytes)
    count = tl.where(there[:, None], count, 0)
    if _largest(count) > 0:
        _apply_tiles(message, weights.data, (begin, codes, count), SIZE, VALUES)


@triton.jit
def _apply_tiles(
    message: tl.tensor,
    data: tl.tensor,
    at: tl.tuple,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """Apply encoded tiles with given counts to their codes."""
    begin, codes, count = at
    size = _tile_bytes(count, VALUES)
    number = count % LARGELY
    is_list = _listed(count, VALUES)
    large = (count >= LARGELY)[:, :, None]
    before = tl.cumsum(size, axis=1) - size
    start = message + (begin[:, None] + before)
    value = _values_of(VALUES)
    listed = tl.where(is_list, number, 0)
    # Steps or, of large changes, new codes
    by = tl.zeros((FEWER // SIZE, SIZE // VALUES, VALUES), tl.int32)
    changed = by
    # Lists: the k-th entry of every tile at once, up to the longest list.
    for k in tl.range(0, _largest(listed)):
        some = k < listed
        entry = tl.load(start + k, mask=some, other=0)
        entry = entry.to(tl.int32)[:, :, None]
        code = tl.load(start + number + k, mask=some & (count >= LARGELY), other=0)
        code = code.to(tl.int32)[:, :, None]
        hit = (value == entry % VALUES) & some[:, :, None]
        stepped = by + 1 - 2 * (entry >> 7)
        by = tl.where(hit, tl.where(large, code, stepped), by)
        changed = tl.where(hit, 1, changed)
    # Masks: an element finds its sign or its code by its rank among the set bits.
    if _largest(number - listed) > 0:
        masked = (listed < number)[:, :, None]
        byte = tl.load(start[:, :, None] + value // 8, mask=masked, other=0)
        bit = byte.to(tl.int32) >> value % 8 & 1
        rank = tl.cumsum(bit, axis=2) - bit
        bit = tl.where(rank < number[:, :, None], bit, 0)
        at_rank = start[:, :, None] + VALUES // 8
        at_rank += tl.where(large, rank, rank // 8)
        sent = tl.load(at_rank, mask=bit == 1, other=0).to(tl.int32)
        less = sent >> rank % 8 & 1
        change = tl.where(large, sent, 1 - 2 * less)
        by = tl.where(bit == 1, change, by)
        changed += bit
    pointers = _codes_of(data, codes, SIZE, VALUES)
    old = tl.load(pointers, mask=changed == 1, other=0).to(tl.int32)
    new = tl.where(large, by, old + by)
    tl.store(pointers, new.to(tl.int8), mask=changed == 1)
