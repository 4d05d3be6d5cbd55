# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Implements the operations in plain torch: the reference that every other backend equals bit for
bit.

Note [Arithmetic contract]
    ``absmax`` of a block: if it is Inf or NaN, scale = NaN and q = 0, so overflow detection still
    works after dequantization; if it is below 2**-100, scale = 0 and q = 0; else
    ``scale = absmax / L``, ``inv = L / absmax``, ``q = clamp(round_half_even(x * inv), -L, L)``.
    Divisions are correctly rounded: two tensors are divided, never a Python scalar by a tensor.
    Dequantized value: ``q * scale`` in FP32, one rounding to the output type. Reduction: FP32
    accumulator, sources in rank order, one rounding per product and per sum, no FMA.

    NF4: the scale's byte ``b`` is ``(bits(absmax / 127) + NF4_NEAREST - NF4_SCALE) >> 21``, at
    least 0. If ``b`` is above 254, or ``absmax`` is Inf or NaN, it is 255: scale = NaN and q = 0.
    Else ``scale`` has the bits ``NF4_SCALE + (b << 21)``, ``inv = 1 / scale``, and ``q + 8`` is the
    number of ``NF4_BOUNDS`` below ``x * inv``. Dequantized value: ``NF4_LEVELS[q + 8] * scale``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_topo.quant.operands import (
    DTYPES,
    Change,
    Codes,
    Masters,
    Messages,
    counted,
    read_all,
    total_numel,
    views_of,
    write_all,
)
from zero_topo.quant.reference_sparse import (  # noqa: F401  (of the backend)
    aged_adamw,
    compact_above,
    count_above,
    mask_pack,
    mask_unpack,
    row_largest,
    sketch_insert,
    sketch_peel,
    ternary_decode,
    ternary_encode,
)
from zero_topo.quant.spec import (
    CHUNK,
    HEADROOM,
    KEPT_FROM,
    KEPT_TO,
    LARGE,
    NF4_BOUNDS,
    NF4_LEVELS,
    NF4_NEAREST,
    NF4_SCALE,
    WHOLE,
    BlockSpec,
    Cast,
    ChangeSpec,
    Format,
    format_of,
)

SMALLEST = 2.0**-100
INT8_LEVELS = 127


def quantize(
    flats: Sequence[Tensor], shapes: Sequence[int], code: Sequence[int], table: Tensor, without: int
) -> None:
    """Quantize the concatenated views of each member into its wire message."""
    out = Messages(table, -1, without)
    for member in out.kept():
        own = [view.member(member) for view in views_of(flats, shapes, out.members)]
        _encode(read_all(own)[0], format_of(code), *out.of(member))


def dequantize_reduce(
    table: Tensor,
    without_source: int,
    without_member: int,
    code: Sequence[int],
    flats: Sequence[Tensor],
    shapes: Sequence[int],
    factor: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Write the sum of each member's dequantized messages, in order of the sources, to its
    views.
    """
    messages = Messages(table, without_source, without_member)
    for member in messages.kept():
        own = [view.member(member) for view in views_of(flats, shapes, messages.members)]
        total = _sum(messages.of(member), format_of(code), total_numel(own), factor)
        if accumulate:
            total = read_all(own)[0].add_(total)
        write_all(total[None], own)


def requantize(
    table: Tensor,
    without_source: int,
    source: Sequence[int],
    out: Tensor,
    without_member: int,
    code: Sequence[int],
    numel: int,
    factor: float = 1.0,
) -> None:
    """Sum each member's dequantized messages, and quantize the sum into one message."""
    messages = Messages(table, without_source)
    sums = Messages(out, -1, without_member)
    for member in sums.kept():
        total = _sum(messages.of(member), format_of(source), numel, factor)
        _encode(total, format_of(code), *sums.of(member))


def _sum(messages: Sequence[Tensor], spec: Format, numel: int, factor: float) -> Tensor:
    total = _values(messages[0], numel, spec)
    # In the order given, one rounding a sum: every backend adds in this order.
    for message in messages[1:]:
        total += _values(message, numel, spec)
    if factor != 1:
        rounded = torch.tensor(factor, dtype=torch.float32, device="cpu")
        total *= rounded.item()
    return total


def _encode(x: Tensor, spec: Format, out: Tensor) -> None:
    if isinstance(spec, Cast):
        floats = x.to(DTYPES[spec.dtype])
        out.copy_(floats.view(torch.uint8))
        return
    numel = x.numel()
    # The planes are padded with zeros, so that equal values are equal bytes.
    quantized = _nf4_quantized if spec.name == "nf4" else _quantized
    q, scale = quantized(_blocks(x, spec), spec)
    blocks = spec.blocks(numel)
    values_end = blocks * spec.block_bytes
    scales = spec.scales_offset(numel)
    scales_end = scales + blocks * spec.scale_bytes
    out[:values_end].copy_(_pack(q, spec.bits))
    out[values_end:scales].zero_()
    out[scales:scales_end].copy_(scale.view(torch.uint8))
    out[scales_end:].zero_()


def _blocks(x: Tensor, spec: BlockSpec) -> Tensor:
    # The tail of the last block counts as zeros.
    blocks = x.new_zeros(spec.blocks(x.numel()) * spec.block_size)
    blocks[: x.numel()].copy_(x)
    return blocks.view(-1, spec.block_size)


def _quantized(blocks: Tensor, spec: BlockSpec) -> tuple[Tensor, Tensor]:
    absmax = blocks.abs().amax(dim=1)
    # A tensor: on a GPU torch divides by a Python number through its reciprocal.
    levels = torch.full_like(absmax, spec.levels)
    bad = ~torch.isfinite(absmax)
    tiny = absmax < SMALLEST
    scale = absmax / levels
    scale.masked_fill_(tiny, 0.0)
    scale.masked_fill_(bad, torch.nan)
    inverse = levels / absmax
    inverse.masked_fill_(tiny, 0.0)
    blocks *= inverse[:, None]
    q = blocks.round_().clamp_(-spec.levels, spec.levels)
    q.masked_fill_(bad[:, None], 0.0)
    return q.to(torch.int8), scale


def _nf4_quantized(blocks: Tensor, spec: BlockSpec) -> tuple[Tensor, Tensor]:
    absmax = blocks.abs().amax(dim=1)
    # The upper bits of a float are its exponent and two bits of mantissa: the byte of the scale.
    unit = absmax / torch.full_like(absmax, INT8_LEVELS)
    bits = unit.view(torch.int32)
    bits -= NF4_SCALE - NF4_NEAREST
    steps = (bits >> 21).clamp_(min=0)
    bad = ~torch.isfinite(absmax)
    bad |= steps > 254
    steps.masked_fill_(bad, 255)
    scale = _nf4_scale(steps)
    bounds = torch.tensor(NF4_BOUNDS, dtype=torch.float32, device=blocks.device)
    inverse = torch.ones_like(scale) / scale
    # The number of bounds below a value; on a bound, that of the level below.
    blocks *= inverse[:, None]
    q = torch.bucketize(blocks, bounds) - 8
    q.masked_fill_(bad[:, None], 0)
    return q.to(torch.int8), steps.to(torch.uint8)


def _nf4_scale(steps: Tensor) -> Tensor:
    bits = steps.to(torch.int32) << 21
    bits += NF4_SCALE
    return bits.view(torch.float32).masked_fill_(steps == 255, torch.nan)


def _pack(q: Tensor, bits: int) -> Tensor:
    flat = q.view(-1)
    if bits == 8:
        return flat.view(torch.uint8)
    # The low nibble is the even element.
    even, odd = flat.view(torch.uint8).view(-1, 2).unbind(1)
    return (even & 0xF) | (odd << 4)


def _unpack(values: Tensor, bits: int) -> Tensor:
    signed = values.view(torch.int8)
    if bits == 8:
        return signed.to(torch.float32)
    out = values.new_empty(values.numel(), 2, dtype=torch.float32)
    # Shifts of signed bytes extend the sign.
    out[:, 0] = (signed << 4) >> 4
    out[:, 1] = signed >> 4
    return out.view(-1)


def _values(message: Tensor, numel: int, spec: Format) -> Tensor:
    if isinstance(spec, Cast):
        # A message may begin at any byte: a copy is aligned.
        return message.clone().view(DTYPES[spec.dtype]).to(torch.float32)
    blocks = spec.blocks(numel)
    packed = message[: blocks * spec.block_bytes]
    q = _unpack(packed, spec.bits).view(blocks, spec.block_size)
    scales = message[spec.scales_offset(numel) :]
    scale = scales[: blocks * spec.scale_bytes]
    if spec.name == "nf4":
        levels = torch.tensor(NF4_LEVELS, device=q.device, dtype=q.dtype)
        q = levels[q.long() + 8]
        scale = _nf4_scale(scale)
    q *= scale.view(torch.float32)[:, None]
    return q.view(-1)[:numel]


# -- INT8 weights; see Note [Codes] in ``ops.py`` --------------------------------------------------


def codes_assess(table: Tensor, own: Sequence[int], *rest: Any) -> None:
    """Compute each block's new scale, the counts of its tiles, which codes change, and its part of
    the message.

    Args:
        table: masters.
        own: the other numbers of `Masters`.
        rest: `Codes`, then what is written: scales, counts and steps of `Change`, and of each block
            whether it is sent whole and the bytes of its changes.
    """
    masters = Masters(table, *own)
    *stored, scales, counts, steps, sizes = rest
    codes = Codes(*stored)
    spec = ChangeSpec(codes.block)
    x = _masters_in_blocks(masters, codes)
    places = _places(codes, masters.member)
    old_codes, old = _stored(codes, places)
    top = x.abs().amax(1)
    scales.copy_(scales_from_now(top, old))
    # What would change: an element changes where its code does.
    change = _coded(x, scales) - old_codes
    tiles = change.view(*counts.shape, -1)
    number = (tiles != 0).sum(2)
    large = tiles.abs().amax(2) > 1
    # Bits are compared: a scale that is NaN equals itself here.
    whole = scales.view(torch.int32) != old.view(torch.int32)
    whole |= (number > spec.most).any(1)
    counts.copy_(number + LARGE * large)
    counts.masked_fill_(whole[:, None], WHOLE)
    sizes[:, 0] = whole
    tile_sizes = _Tiles(counts.view(-1), spec.tile).sizes
    block_sizes = tile_sizes.view(counts.shape).sum(1)
    sizes[:, 1] = block_sizes.masked_fill_(whole, 0)
    # Two masks of each tile, one behind the other.
    masks = torch.stack([tiles != 0, tiles < 0], 2)
    mask_pack(masks.view(-1), steps.view(-1))


def scales_from_now(top: Tensor, old: Tensor) -> Tensor:
    """Return the new scales of blocks from their largest ``|x|`` and their old scales, FP32
    each.
    """
    fresh = top * HEADROOM
    fresh /= torch.full_like(top, INT8_LEVELS)
    fresh.masked_fill_(top < SMALLEST, 0.0)
    fresh.masked_fill_(~torch.isfinite(fresh), torch.nan)
    kept = old > 0
    kept &= top >= old * KEPT_FROM
    kept &= top <= old * KEPT_TO
    kept &= torch.isfinite(top)  # the product may be Inf
    return torch.where(kept, old, fresh)


def codes_emit(table: Tensor, own: Sequence[int], *rest: Any) -> None:
    """Update codes and scales, and write the message.

    Args:
        table: masters.
        own: the other numbers of `Masters`.
        rest: `Codes`, `Change`, and the message.
    """
    masters = Masters(table, *own)
    codes = Codes(*rest[:4])
    *made, message = rest[4:]
    change = Change(*made)
    spec = ChangeSpec(codes.block)
    n = codes.blocks
    block = codes.block
    whole = change.counts[:, 0] == WHOLE
    count = int(change.ends[-1, 0])
    masks = message.new_empty(8 * change.steps.numel(), dtype=torch.bool)
    mask_unpack(change.steps.view(-1), masks)
    changed, less = masks.view(-1, 2, spec.tile).unbind(1)
    # Small changes are steps of the stored codes, so that an edit of the masters in between changes
    # none.
    places = _places(codes, masters.member)
    new = _stored(codes, places)[0].view(-1, spec.tile)
    fresh = _coded(_masters_in_blocks(masters, codes), change.scales)
    fresh = fresh.view(-1, spec.tile)
    counts = change.counts.view(-1)
    large = (counts >= LARGE)[:, None]
    stepped = new + changed.to(torch.int8) - 2 * less.to(torch.int8)
    stepped = torch.where(large, fresh, stepped)
    new = torch.where(changed, stepped, new)
    # From here on in the order of the message: ends, counts, scales, whole blocks, changes.
    new.view(n, block)[whole] = fresh.view(n, block)[whole]
    at = spec.offsets(n, count)
    # Sums after every 32nd block; the last entry is that of the last block.
    chunks = -(-n // CHUNK)
    ends = message[: 8 * chunks].view(torch.int32).view(chunks, 2)
    ends[: n // CHUNK].copy_(change.ends[CHUNK - 1 :: CHUNK])
    ends[-1:].copy_(change.ends[-1:])
    message[at.counts :][: counts.numel()].copy_(counts)
    scales = change.scales[whole]
    message[at.scales :][: 4 * count].copy_(scales.view(torch.uint8))
    new = new.to(torch.int8).view(torch.uint8)
    whole_codes = new.view(n, block)[whole]
    message[at.codes : at.changes].copy_(whole_codes.view(-1))
    # Tiles of the blocks that are not sent whole.
    sent = ~whole.repeat_interleave(spec.tiles)
    tiles = _Tiles(counts[sent], spec.tile)
    packed = tiles.packed(changed[sent], less[sent], new[sent])
    message[at.changes :][: packed.numel()].copy_(packed)
    _store(codes, places, new.view(n, block), change.scales)


def codes_apply(table: Tensor, without_member: int, *stored: Any) -> None:
    """Update the rows of all members except the one left out."""
    messages = Messages(table, -1, without_member)
    codes = Codes(*stored)
    for member in messages.kept():
        places = _places(codes, member)
        message = messages.of(member)[0]
        decoded = _decoded(message, codes.block, *_stored(codes, places))
        _store(codes, places, *decoded)


def _decoded(message: Tensor, block: int, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    spec = ChangeSpec(block)
    n = len(codes)
    begin = spec.offsets(n).counts
    counts = message[begin : begin + n * spec.tiles].view(n, spec.tiles)
    whole = counts[:, 0] == WHOLE
    count = int(whole.sum())
    tiles = _Tiles(counts[~whole].view(-1), spec.tile)
    stored = codes[~whole].view(-1, spec.tile)
    at = spec.offsets(n, count)
    changed = tiles.unpacked(message, at.changes, stored)
    codes[~whole] = changed.view(-1, block)
    sent = message[at.codes : at.changes].view(count, block)
    codes[whole] = sent.view(torch.int8).to(torch.float32)
    scales[whole] = message[at.scales :][: 4 * count].view(torch.float32)
    return codes, scales


class _Tiles:
    """Encodes and decodes tiles of ``size`` values with given counts ``[tiles]``."""

    def __init__(self, counts: Tensor, size: int) -> None:
        counts = counts.to(torch.int64)
        self._size = size
        self._large = counts >= LARGE
        self._number = counts % LARGE
        # Bytes behind the positions: new codes of large changes; of small ones the signs, if a
        # mask.
        values = torch.where(self._large, self._number, (self._number + 7) // 8)
        signs = values.masked_fill(self._large, 0)
        self._listed = self._number <= size // 8 + signs
        self._positions = torch.where(self._listed, self._number, size // 8)  # bytes
        only_positions = self._listed & ~self._large
        self.sizes = self._positions + values.masked_fill(only_positions, 0)
        # Where each tile begins: the sizes of those before it.
        self._starts = self.sizes.cumsum(0) - self.sizes

    def packed(self, changed: Tensor, less: Tensor, new: Tensor) -> Tensor:
        """Encode two masks ``[tiles, T]``, which values change and which decrease, and the new
        codes.
        """
        # One entry for each change, tile after tile, in ascending position.
        tile, position = changed.nonzero(as_tuple=True)
        start = self._starts[tile]
        listed = self._listed[tile]
        large = self._large[tile]
        rank = changed.cumsum(1)[tile, position] - 1
        minus = less[tile, position].long()
        minus.masked_fill_(large, 0)
        values = start + self._positions[tile]
        nbytes = int(self.sizes.sum())
        out = changed.new_zeros(nbytes, dtype=torch.int64)
        # A list: a byte for each change.
        entry = position + 128 * minus
        out[(start + rank)[listed]] = entry[listed]
        # The new codes of tiles with large changes.
        codes = new[tile, position].to(torch.int64)
        out[(values + rank)[large]] = codes[large]
        masked = ~listed
        byte = start + position // 8
        bit = torch.ones_like(minus) << position % 8
        out.index_add_(0, byte[masked], bit[masked])
        # A mask of small changes: signs, eight to a byte, in the order of the changes.
        signed = masked & ~large
        byte = values + rank // 8
        bit = minus << rank % 8
        out.index_add_(0, byte[signed], bit[signed])
        return out.to(torch.uint8)

    def unpacked(self, message: Tensor, at: int, codes: Tensor) -> Tensor:
        """Apply the changes that begin at a byte of a message to codes ``[tiles, T]``, in place."""
        size = self._size
        starts = self._starts + at

        def byte(index: Tensor) -> Tensor:
            # A message from another rank never leads a read out of it.
            return message[index.clamp(max=len(message) - 1)].to(torch.int64)

        # Lists: entry number `rank` of each tile.
        lengths = self._number.masked_fill(~self._listed, 0)[:, None]
        position = counted(size, codes)
        tile, rank = (position < lengths).nonzero(as_tuple=True)
        entry = byte(starts[tile] + rank)
        # Masks: all positions of all tiles, of which those of lists are left out.
        mask = byte(starts[:, None] + position // 8)
        mask >>= position % 8
        mask &= 1
        ranks = mask.cumsum(1) - 1
        masked = mask.bool() & ~self._listed[:, None]
        masked &= ranks < self._number[:, None]
        of, place = masked.nonzero(as_tuple=True)
        ranked = ranks[of, place]
        sign = byte(starts[of] + size // 8 + ranked // 8)
        sign >>= ranked % 8
        sign &= 1
        tile = torch.cat([tile, of])
        position = torch.cat([entry % size, place])
        rank = torch.cat([rank, ranked])
        # Both forms together: a step by the sign, or the new code.
        minus = torch.cat([entry // 128, sign])
        fresh = byte(starts[tile] + self._positions[tile] + rank)
        fresh = fresh.to(torch.uint8).view(torch.int8)
        stepped = codes[tile, position] + 1 - 2 * minus
        codes[tile, position] = torch.where(self._large[tile], fresh, stepped)
        return codes


def _coded(x: Tensor, scales: Tensor) -> Tensor:
    """Return the codes, as FP32, of values ``[blocks, block]`` with given scales."""
    usable = (scales > 0)[:, None]  # neither 0 nor NaN
    inverse = torch.ones_like(scales) / scales
    codes = torch.where(usable, x * inverse[:, None], 0.0)
    return codes.round_().clamp_(-INT8_LEVELS, INT8_LEVELS)


def _columns(codes: Codes) -> tuple[Tensor, ...]:
    """Return for each block column the six numbers of its parameter, and its index among the
    parameter's columns.
    """
    _, begin, end, *_ = codes.numbers
    index_of = codes.param_index_of[begin:end]
    param_index = codes.param_indices[index_of.long()]
    columns = counted(len(param_index), param_index) + begin
    return (*param_index.unbind(1), columns - param_index[:, 3])


def _places(codes: Codes, member: int) -> tuple[Tensor, Tensor]:
    """Return the places of each block's codes, ``[blocks, block]``, and of its scale in the bytes
    viewed as FP32.
    """
    codes_at, scales_at, blocks, *_, here = _columns(codes)
    *_, part_rows, members = codes.numbers
    # Row r of a member is row m + r * members of the shard.
    rows = counted(part_rows, here)[:, None] * members + member
    index = rows * blocks + here
    begins = codes_at + index * codes.block
    codes_places = begins.view(-1, 1) + counted(codes.block, here)
    scales_places = scales_at // 4 + index
    return codes_places, scales_places.view(-1)


def _stored(codes: Codes, places: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return copies of the codes, as FP32 ``[blocks, block]``, and of the scales."""
    codes_at, scales_at = places
    values = codes.stored[codes_at].view(torch.int8).to(torch.float32)
    return values, codes.stored.view(torch.float32)[scales_at]


def _store(codes: Codes, places: tuple[Tensor, Tensor], new: Tensor, scales: Tensor) -> None:
    codes_at, scales_at = places
    codes.stored[codes_at] = new.to(torch.int8).view(torch.uint8)
    codes.stored.view(torch.float32)[scales_at] = scales


def _masters_in_blocks(masters: Masters, codes: Codes) -> Tensor:
    """Return the masters as FP32 ``[blocks, block]``, zero beyond a parameter's columns."""
    *_, first, width, here = _columns(codes)
    inside = here[:, None] * codes.block + counted(codes.block, here)
    exists = inside < width[:, None]
    index = first[:, None] + inside - masters.first
    index = torch.where(exists, index, 0)
    x = torch.where(exists, masters.table[:, index], 0.0)
    return x.view(codes.blocks, codes.block)
