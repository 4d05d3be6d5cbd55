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

Note [Count sketch]
    A vector is cut into blocks of 1024 elements; a sketch has ``rows`` rows of 1024 lanes, in three
    thirds. Block ``b`` is added into one row of each third, chosen and signed by a hash of
    ``(seed, b, third)``. An element stays in its lane. Sketches of several ranks add up to the
    sketch of their sum (TAGC, EuroMLSys 2025, after lossless homomorphic compression). Given which
    elements are non-zero, peeling inverts it: an element alone in a row of its lane is known, and
    is subtracted from its other two rows. Each remaining element gets the median of its three rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from zero_topo.quant.operands import (
    DTYPES,
    FLOATS,
    Change,
    Codes,
    Masters,
    Messages,
    Part,
    View,
    counted,
    read_all,
    total_numel,
    write_all,
)
from zero_topo.quant.spec import (
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
)

# In what GPUs do by torch's operations: their kernels serve parts of it
OPS: Any = torch.ops.zero_topo
SMALLEST = 2.0**-100
INT8_LEVELS = 127
SKETCH_WIDTH = 1024
UPDATED = 1 << 22  # elements that the optimizer updates at once: bounds the scratch memory
_MASK = (1 << 64) - 1


def quantize(views: Sequence[View], spec: Format, out: Messages) -> None:
    """Quantize the concatenated views of each member into its wire message."""
    for member in out.kept():
        _encode(read_all([view.member(member) for view in views])[0], spec, *out.of(member))


def dequantize_reduce(
    messages: Messages,
    spec: Format,
    views: Sequence[View],
    factor: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Write the sum of each member's dequantized messages, in order of the sources, to its
    views.
    """
    for member in messages.kept():
        own = [view.member(member) for view in views]
        total = _sum(messages.of(member), spec, total_numel(own), factor)
        write_all((read_all(own).add_(total) if accumulate else total[None]), own)


def requantize(
    messages: Messages,
    source: Format,
    spec: Format,
    out: Messages,
    numel: int,
    factor: float = 1.0,
) -> None:
    """Sum each member's dequantized messages, and quantize the sum into one message."""
    for member in out.kept():
        _encode(_sum(messages.of(member), source, numel, factor), spec, *out.of(member))


def _sum(messages: Sequence[Tensor], spec: Format, numel: int, factor: float) -> Tensor:
    total = _values(messages[0], numel, spec)
    # In the order given, one rounding a sum: every backend adds in this order.
    for message in messages[1:]:
        total.add_(_values(message, numel, spec))
    if factor != 1:
        total.mul_(torch.tensor(factor, dtype=torch.float32, device="cpu").item())
    return total


def _encode(x: Tensor, spec: Format, out: Tensor) -> None:
    if isinstance(spec, Cast):
        out.copy_(x.to(DTYPES[spec.dtype]).view(torch.uint8))
        return
    numel = x.numel()
    # The planes are padded with zeros, so that equal values are equal bytes.
    quantized = _nf4_quantized if spec.name == "nf4" else _quantized
    q, scale = quantized(_blocks(x, spec), spec)
    values_end = spec.blocks(numel) * spec.block_bytes
    scales = spec.scales_offset(numel)
    scales_end = scales + spec.blocks(numel) * spec.scale_bytes
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
    scale = (absmax / levels).masked_fill_(tiny, 0.0).masked_fill_(bad, torch.nan)
    inverse = (levels / absmax).masked_fill_(tiny, 0.0)
    q = blocks.mul_(inverse[:, None]).round_().clamp_(-spec.levels, spec.levels)
    return q.masked_fill_(bad[:, None], 0.0).to(torch.int8), scale


def _nf4_quantized(blocks: Tensor, spec: BlockSpec) -> tuple[Tensor, Tensor]:
    absmax = blocks.abs().amax(dim=1)
    # The upper bits of a float are its exponent and two bits of mantissa: the byte of the scale.
    bits = (absmax / torch.full_like(absmax, INT8_LEVELS)).view(torch.int32)
    steps = ((bits - (NF4_SCALE - NF4_NEAREST)) >> 21).clamp_(min=0)
    steps = steps.masked_fill_(~torch.isfinite(absmax) | (steps > 254), 255)
    scale = _nf4_scale(steps)
    bounds = torch.tensor(NF4_BOUNDS, dtype=torch.float32, device=blocks.device)
    inverse = torch.ones_like(scale) / scale
    # The number of bounds below a value; on a bound, that of the level below.
    q = torch.bucketize(blocks.mul_(inverse[:, None]), bounds) - 8
    return q.masked_fill_((steps == 255)[:, None], 0).to(torch.int8), steps.to(torch.uint8)


def _nf4_scale(steps: Tensor) -> Tensor:
    bits = (steps.to(torch.int32) << 21) + NF4_SCALE
    return bits.view(torch.float32).masked_fill_(steps == 255, torch.nan)


def _pack(q: Tensor, bits: int) -> Tensor:
    flat = q.view(-1)
    if bits == 8:
        return flat.view(torch.uint8)
    # The low nibble is the even element.
    pairs = flat.view(torch.uint8).view(-1, 2)
    return (pairs[:, 0] & 0xF) | (pairs[:, 1] << 4)


def _unpack(values: Tensor, bits: int) -> Tensor:
    signed = values.view(torch.int8)
    if bits == 8:
        return signed.to(torch.float32)
    out = torch.empty(values.numel(), 2, dtype=torch.float32, device=values.device)
    # Shifts of signed bytes extend the sign.
    out[:, 0] = (signed << 4) >> 4
    out[:, 1] = signed >> 4
    return out.view(-1)


def _values(message: Tensor, numel: int, spec: Format) -> Tensor:
    if isinstance(spec, Cast):
        # A message may begin at any byte: a copy is aligned.
        return message.clone().view(DTYPES[spec.dtype]).to(torch.float32)
    blocks = spec.blocks(numel)
    q = _unpack(message[: blocks * spec.block_bytes], spec.bits).view(blocks, spec.block_size)
    scale = message[spec.scales_offset(numel) :][: blocks * spec.scale_bytes]
    if spec.name == "nf4":
        q = torch.tensor(NF4_LEVELS, device=q.device, dtype=q.dtype)[q.long() + 8]
        scale = _nf4_scale(scale)
    return q.mul_(scale.view(torch.float32)[:, None]).view(-1)[:numel]


# -- INT8 weights; see Note [Codes] in ``ops.py`` --------------------------------------------------


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
    spec = ChangeSpec(codes.block)
    x = _masters_in_blocks(masters, codes, part)
    old_codes, old = _stored(codes, _places(codes, part, masters.member))
    scales.copy_(scales_from_now(x.abs().amax(1), old))
    # What would change: an element changes where its code does.
    tiles = (_coded(x, scales) - old_codes).view(*counts.shape, -1)
    number = (tiles != 0).sum(2)
    large = tiles.abs().amax(2) > 1
    # Bits are compared: a scale that is NaN equals itself here.
    whole = (number > spec.most).any(1) | (scales.view(torch.int32) != old.view(torch.int32))
    counts.copy_(number + LARGE * large).masked_fill_(whole[:, None], WHOLE)
    sizes[:, 0] = whole
    tile_sizes = _Tiles(counts.view(-1), spec.tile).sizes.view(counts.shape)
    sizes[:, 1] = tile_sizes.sum(1).masked_fill_(whole, 0)
    # Two masks of each tile, one behind the other.
    mask_pack(torch.stack([tiles != 0, tiles < 0], 2).view(-1), steps.view(-1))


def scales_from_now(top: Tensor, old: Tensor) -> Tensor:
    """Return the new scales of blocks from their largest ``|x|`` and their old scales, FP32
    each.
    """
    fresh = (top * HEADROOM).div_(torch.full_like(top, INT8_LEVELS))
    fresh = fresh.masked_fill_(top < SMALLEST, 0.0).masked_fill_(~torch.isfinite(fresh), torch.nan)
    # The product may be Inf
    fits = (top >= old * KEPT_FROM) & (top <= old * KEPT_TO) & torch.isfinite(top)
    kept = (old > 0) & fits
    return torch.where(kept, old, fresh)


def codes_emit(masters: Masters, codes: Codes, part: Part, change: Change, message: Tensor) -> None:
    """Update codes and scales, and write the scales, codes and changes of the message."""
    spec = ChangeSpec(codes.block)
    n = part.blocks
    block = codes.block
    whole = change.counts[:, 0] == WHOLE
    count = int(change.ends[-1, 0])
    masks = torch.empty(8 * change.steps.numel(), dtype=torch.bool, device=message.device)
    mask_unpack(change.steps.view(-1), masks)
    changed, less = masks.view(-1, 2, spec.tile).unbind(1)
    # Small changes are steps of the stored codes, so that an edit of the masters in between changes
    # none.
    places = _places(codes, part, masters.member)
    new = _stored(codes, places)[0].view(-1, spec.tile)
    fresh = _coded(_masters_in_blocks(masters, codes, part), change.scales).view(-1, spec.tile)
    large = (change.counts.view(-1) >= LARGE)[:, None]
    stepped = new + changed.to(torch.int8) - 2 * less.to(torch.int8)
    new = torch.where(changed, torch.where(large, fresh, stepped), new)
    # From here on in the order of the message: scales, whole blocks, changes.
    new.view(n, block)[whole] = fresh.view(n, block)[whole]
    at = spec.scales_offset(n)
    message[at : at + 4 * count].copy_(change.scales[whole].view(torch.uint8))
    new = new.to(torch.int8).view(torch.uint8)
    at = spec.codes_offset(n, count)
    message[at : at + block * count].copy_(new.view(n, block)[whole].view(-1))
    # Tiles of the blocks that are not sent whole.
    sent = ~whole.repeat_interleave(spec.tiles)
    tiles = _Tiles(change.counts.view(-1)[sent], spec.tile)
    packed = tiles.packed(changed[sent], less[sent], new[sent])
    at = spec.changes_offset(n, count)
    message[at : at + packed.numel()].copy_(packed)
    _store(codes, places, new.view(n, block), change.scales)


def codes_apply(messages: Messages, codes: Codes, part: Part) -> None:
    """Update the rows of all members except the one left out."""
    for member in messages.kept():
        places = _places(codes, part, member)
        stored = _stored(codes, places)
        _store(codes, places, *_decoded(messages.of(member)[0], codes.block, *stored))


def _decoded(message: Tensor, block: int, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    spec = ChangeSpec(block)
    n = len(codes)
    at = spec.counts_offset(n)
    counts = message[at : at + n * spec.tiles].view(n, spec.tiles)
    whole = counts[:, 0] == WHOLE
    count = int(whole.sum())
    tiles = _Tiles(counts[~whole].view(-1), spec.tile)
    stored = codes[~whole].view(-1, spec.tile)
    changed = tiles.unpacked(message, spec.changes_offset(n, count), stored)
    codes[~whole] = changed.view(-1, block)
    at = spec.codes_offset(n, count)
    sent = message[at : at + count * block].view(count, block)
    codes[whole] = sent.view(torch.int8).to(torch.float32)
    at = spec.scales_offset(n)
    scales[whole] = message[at : at + 4 * count].view(torch.float32)
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
        self._listed = self._number <= size // 8 + values.masked_fill(self._large, 0)
        self._positions = torch.where(self._listed, self._number, size // 8)  # bytes
        self.sizes = self._positions + values.masked_fill(self._listed & ~self._large, 0)
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
        minus = less[tile, position].long().masked_fill(large, 0)
        values = start + self._positions[tile]
        out = torch.zeros(int(self.sizes.sum()), dtype=torch.int64, device=changed.device)
        # A list: a byte for each change.
        out[(start + rank)[listed]] = (position + 128 * minus)[listed]
        # The new codes of tiles with large changes.
        out[(values + rank)[large]] = new[tile, position][large].to(torch.int64)
        bits = torch.ones_like(minus) << position % 8
        out.index_add_(0, (start + position // 8)[~listed], bits[~listed])
        # A mask of small changes: signs, eight to a byte, in the order of the changes.
        signed = ~listed & ~large
        out.index_add_(0, (values + rank // 8)[signed], (minus << rank % 8)[signed])
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
        mask = byte(starts[:, None] + position // 8) >> position % 8 & 1
        ranks = mask.cumsum(1) - 1
        masked = mask.bool() & ~self._listed[:, None] & (ranks < self._number[:, None])
        of, place = masked.nonzero(as_tuple=True)
        ranked = ranks[of, place]
        sign = byte(starts[of] + size // 8 + ranked // 8) >> ranked % 8 & 1
        tile = torch.cat([tile, of])
        position = torch.cat([entry % size, place])
        rank = torch.cat([rank, ranked])
        # Both forms together: a step by the sign, or the new code.
        minus = torch.cat([entry // 128, sign])
        fresh = byte(starts[tile] + self._positions[tile] + rank).to(torch.uint8).view(torch.int8)
        stepped = codes[tile, position] + 1 - 2 * minus
        codes[tile, position] = torch.where(self._large[tile], fresh, stepped)
        return codes


def _coded(x: Tensor, scales: Tensor) -> Tensor:
    """Return the codes, as FP32, of values ``[blocks, block]`` with given scales."""
    usable = (scales > 0)[:, None]  # neither 0 nor NaN
    inverse = torch.ones_like(scales).div_(scales)[:, None]
    return torch.where(usable, x * inverse, 0.0).round_().clamp_(-INT8_LEVELS, INT8_LEVELS)


def _columns(codes: Codes, part: Part) -> tuple[Tensor, ...]:
    """Return for each block column the six numbers of its parameter, and its index among the
    parameter's columns.
    """
    param_index = codes.param_indices[codes.param_index_of[part.begin : part.end].long()]
    columns = counted(len(param_index), param_index) + part.begin
    return (*param_index.unbind(1), columns - param_index[:, 3])


def _places(codes: Codes, part: Part, member: int) -> tuple[Tensor, Tensor]:
    """Return the places of each block's codes, ``[blocks, block]``, and of its scale in the bytes
    viewed as FP32.
    """
    codes_at, scales_at, blocks, *_, here = _columns(codes, part)
    # Row r of a member is row m + r * members of the shard.
    rows = counted(part.rows, here)[:, None] * part.members + member
    index = rows * blocks + here
    places = (codes_at + index * codes.block).view(-1, 1) + counted(codes.block, here)
    return places, (scales_at // 4 + index).view(-1)


def _stored(codes: Codes, places: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return copies of the codes, as FP32 ``[blocks, block]``, and of the scales."""
    codes_at, scales_at = places
    values = codes.stored[codes_at].view(torch.int8).to(torch.float32)
    return values, codes.stored.view(torch.float32)[scales_at]


def _store(codes: Codes, places: tuple[Tensor, Tensor], new: Tensor, scales: Tensor) -> None:
    codes_at, scales_at = places
    codes.stored[codes_at] = new.to(torch.int8).view(torch.uint8)
    codes.stored.view(torch.float32)[scales_at] = scales


def _masters_in_blocks(masters: Masters, codes: Codes, part: Part) -> Tensor:
    """Return the masters as FP32 ``[blocks, block]``, zero beyond a parameter's columns."""
    _, _, _, _, first, width, here = _columns(codes, part)
    inside = here[:, None] * codes.block + counted(codes.block, here)
    exists = inside < width[:, None]
    index = torch.where(exists, first[:, None] + inside - masters.first, 0)
    return torch.where(exists, masters.table[:, index], 0.0).view(part.blocks, codes.block)


# -- sparse modes ----------------------------------------------------------------------------------


def mask_pack(mask: Tensor, bits: Tensor) -> None:
    """Pack booleans ``[n]`` into bytes ``[ceil(n / 8)]``; element ``i`` is bit ``i % 8`` of byte
    ``i // 8``.
    """
    padded = mask.new_zeros(8 * bits.numel())
    padded[: mask.numel()] = mask
    # torch has no packing of bits: a weighted sum of eight.
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=mask.device)
    bits.copy_((padded.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8))


def mask_unpack(bits: Tensor, mask: Tensor) -> None:
    """Unpack the result of :func:`mask_pack` into booleans ``[n]``."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    mask.copy_(((bits[:, None] >> places) & 1).view(-1)[: mask.numel()])


def count_above(x: Tensor, threshold: float) -> Tensor:
    """Count the elements with ``|x[i]| >= threshold`` (FP32 comparison; NaN counts), int64
    ``[1]``.
    """
    return _above(x, threshold).sum().view(1)


def compact_above(x: Tensor, threshold: float, indices: Tensor, values: Tensor) -> Tensor:
    """Write the indices (int64) and values of the elements with ``|x[i]| >= threshold``, ascending,
    up to the room.

    Returns:
        The number of such elements, int64 ``[1]``; the rest of ``indices`` and ``values`` is
        unchanged.
    """
    reaching = _above(x, threshold).nonzero()[:, 0]
    kept = reaching[: indices.numel()]
    indices[: kept.numel()] = kept
    values[: kept.numel()] = x[kept]
    return torch.tensor([reaching.numel()], dtype=torch.int64, device=x.device)


def set_positions(mask: Tensor, count: int) -> Tensor:
    """Return the first ``count`` positions at which a mask is set, int64 ``[count, dimensions]``; 0
    beyond the last.

    This needs no host synchronization.
    """
    if _scans_half(mask.device):
        mask = mask.short()
    return torch.nonzero_static(mask, size=count, fill_value=0)


@lru_cache(maxsize=64)
def _scans_half(device: torch.device) -> bool:
    """Return whether `torch.nonzero_static` of one-byte elements leaves out offsets on a device.

    One block of 512 threads computes the offsets of all blocks. For one-byte elements there are up
    to two blocks per multiprocessor (608 on MI300X), for wider elements one.
    """
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).multi_processor_count > 256


def row_largest(x: Tensor, indices: Tensor) -> None:
    """Write the columns of the ``k`` largest magnitudes of each row of ``x`` (FP32 ``[rows, n]``),
    int64 ``[rows, k]``.

    Columns are ascending. NaN counts as the largest; among equal magnitudes the first are taken.
    """
    size = x.view(torch.int32) & 0x7FFFFFFF
    k = indices.shape[1]
    # All above the k-th largest, then the first that equal it, as many as are left.
    kth = size.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    largest = size > kth
    equal = size == kth
    del size
    counts = torch.int16 if x.shape[1] < 1 << 15 else torch.int32
    largest |= equal & (equal.cumsum(dim=1, dtype=counts) <= k - largest.sum(dim=1, keepdim=True))
    indices.copy_(set_positions(largest, indices.numel())[:, 1].view_as(indices))


def ternary_encode(x: Tensor, indices: Tensor, form: Sequence[int], packets: Tensor) -> Tensor:
    """Write the packets of the elements at ``indices``; the arguments are those of
    ``ops.ternary_encode``.

    Returns:
        The number of elements that are sent, int64 ``[1]``.
    """
    block, selections, low, dtype = form
    # A zero is void: it is counted, and not sent.
    sizes = x.gather(1, indices).abs_()
    void = sizes == 0
    count = selections - void.sum(dim=1, keepdim=True)
    total = sizes.sum(dim=1, keepdim=True, dtype=torch.float64)
    scale = (total / count.clamp(min=1)).float().to(FLOATS[dtype])
    del sizes
    first = indices.masked_fill(void, block).amin(dim=1, keepdim=True) % block
    # A void repeats the position before it
    index = torch.where(void, first, indices).cummax(dim=1).values
    del void
    device = x.device
    rows = len(packets)
    # Elias-Fano: the upper bits in unary, as set bits of a bitmap; the lower ones as they are.
    ones = (index >> low) + counted(selections, x)
    width = selections + (block >> low)
    high = torch.zeros(len(x), width, dtype=torch.bool, device=device).scatter_(1, ones, 1)
    del ones
    lows = (index.short()[..., None] >> torch.arange(low, dtype=torch.int16, device=device)) & 1
    parts = high, lows, x.gather(1, index) < 0
    flags = torch.cat([part.bool().view(rows, -1) for part in parts], dim=1)
    del parts
    bits = torch.empty(rows, -(-flags.shape[1] // 8), dtype=torch.uint8, device=device)
    OPS.mask_pack.default(pad(flags, (0, -flags.shape[1] % 8)).view(-1), bits.view(-1))
    torch.cat([bits, scale.view(rows, -1).view(torch.uint8)], dim=1, out=packets)
    return count.sum().view(1)


def ternary_decode(
    packets: Tensor,
    begins: Tensor,
    form: Sequence[int],
    indices: Tensor,
    values: Tensor,
) -> None:
    """Write the positions and values of packets; the arguments are those of
    ``ops.ternary_decode``.
    """
    block, selections, low, dtype = form
    rows, of_row = begins.shape
    device = packets.device
    parts = [of_row * bits for bits in (selections + (block >> low), selections * low, selections)]
    split = -(-sum(parts) // 8)
    scales = packets[:, split:].clone(memory_format=torch.contiguous_format).view(FLOATS[dtype])
    bits = packets[:, :split].contiguous()
    flags = torch.empty(rows, 8 * bits.shape[1], dtype=torch.bool, device=device)
    OPS.mask_unpack.default(bits.view(-1), flags.view(-1))
    high, lows, signs, _ = flags.split([*parts, flags.shape[1] - sum(parts)], dim=1)
    blocks = rows * of_row
    ones = set_positions(high.reshape(blocks, -1), blocks * selections)[:, 1]
    ones = ones.view(blocks, selections)
    places = torch.arange(low, dtype=torch.int16, device=device)
    lower = (lows.reshape(blocks, selections, -1).short() << places).sum(dim=2, dtype=torch.int16)
    index = ((ones - counted(selections, ones)) << low) + lower
    scale = scales.float().view(blocks, 1)
    signed = torch.where(signs.reshape(blocks, selections), -scale, scale)
    # A repeated position stands for an element that was void.
    signed[:, 1:].masked_fill_(index.diff(dim=1) == 0, 0)
    indices.copy_((index + begins.reshape(blocks, 1)).view(-1))
    values.copy_(signed.view(-1))


def sketch_insert(x: Tensor, seed: int, sketch: Tensor) -> None:
    """Overwrite ``sketch`` (FP32 ``[members, rows, 1024]``) with the sketches of ``x`` (FP32
    ``[members, n]``).

    See Note [Count sketch].
    """
    sketch.zero_()
    for block, part in enumerate(x.split(SKETCH_WIDTH, dim=1)):
        for row, sign in _hashed_rows(seed, block, sketch.shape[1]):
            sketch[:, row, : part.shape[1]] += sign * part


def sketch_peel(sketch: Tensor, bits: Tensor, seed: int, out: Tensor) -> Tensor:
    """Recover ``out`` (FP32 ``[n]``) from its sketch (overwritten) and the packed mask of its
    non-zero elements.

    Returns:
        The number of elements that peeling did not resolve, int64 ``[1]``.
    """
    blocks = -(-out.numel() // SKETCH_WIDTH)
    # All lanes in parallel: a lane does not depend on the others.
    table = sketch.cpu()
    unresolved = torch.zeros(blocks, SKETCH_WIDTH, dtype=torch.bool, device="cpu")
    mask_unpack(bits.cpu(), unresolved.view(-1)[: out.numel()])
    values = torch.zeros(blocks, SKETCH_WIDTH, dtype=torch.float32, device="cpu")
    places = [_hashed_rows(seed, block, len(table)) for block in range(blocks)]
    counts = torch.zeros(table.shape, dtype=torch.int32, device="cpu")
    for block, three in enumerate(places):
        for row, _ in three:
            counts[row] += unresolved[block]

    def values_of(three: list[tuple[int, float]]) -> Tensor:
        return torch.stack([sign * table[row] for row, sign in three])

    def visit(block: int) -> bool:
        """Resolve each element alone in one of its rows, from the first such row; return whether
        there was any.
        """
        three = places[block]
        alone = torch.stack([counts[row] == 1 for row, _ in three]) & unresolved[block]
        resolved = alone.any(dim=0)
        if not resolved.any():
            return False
        chosen = alone.int().argmax(dim=0)
        value = values_of(three).gather(0, chosen[None])[0]
        values[block] = torch.where(resolved, value, values[block])
        unresolved[block] &= ~resolved
        for j, (row, sign) in enumerate(three):
            counts[row] -= resolved.int()
            table[row] -= torch.where(resolved & (chosen != j), sign * value, 0.0)
        return True

    # A list, so that every block is visited in every pass.
    while any([visit(block) for block in range(blocks)]):
        pass
    # The remaining elements get the median of their three rows
    for block, three in enumerate(places):
        guess = values_of(three).median(dim=0).values
        values[block] = torch.where(unresolved[block], guess, values[block])
    out.copy_(values.view(-1)[: out.numel()])
    return torch.tensor([int(unresolved.sum())], dtype=torch.int64, device=out.device)


def _above(x: Tensor, threshold: float) -> Tensor:
    bound = torch.tensor(threshold, dtype=torch.float32, device=x.device)
    return (x.float().abs() < bound).logical_not()


def _mix(z: int) -> int:
    z = ((z ^ (z >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    z = ((z ^ (z >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK
    return z ^ (z >> 33)


def _hashed_rows(seed: int, block: int, rows: int) -> list[tuple[int, float]]:
    """Return the row of a block in each third of the sketch, and its sign."""
    three = []
    for j in range(3):
        mixed = _mix((seed + 0x9E3779B97F4A7C15 * (3 * block + j + 1)) & _MASK)
        first = rows * j // 3
        past = rows * (j + 1) // 3
        row = first + (((mixed & 0xFFFFFFFF) * (past - first)) >> 32)
        three.append((row, -1.0 if mixed >> 63 else 1.0))
    return three


# -- AgedAdamW -------------------------------------------------------------------------------------


def aged_adamw(
    p: Tensor,
    g: Tensor,
    mean: Tensor,
    square: Tensor,
    age: Tensor,
    table: Tensor,
    settings: Sequence[float],
) -> None:
    """Update weights ``p``, both moments and ages, ``[n]`` each; see ``ops.aged_adamw``."""
    # In chunks, as each step below makes a temporary of its length.
    for chunk in zip(*(part.split(UPDATED) for part in (p, g, mean, square, age)), strict=True):
        _update_aged(chunk, table, settings)


def _update_aged(chunk: tuple[Tensor, ...], table: Tensor, settings: Sequence[float]) -> None:
    """Update some elements, in the order of operations of ``AdamW``."""
    p, g, mean, square, age = chunk
    share, weight, left, gain = table
    decay, correction, eps, rate = settings
    if decay != 1:
        p.mul_(decay)
    arrived = g != 0
    steps = age.int().add_(1).mul_(arrived)  # since the last arrival; 0 without one now
    age.clamp_(max=254).add_(1).masked_fill_(arrived, 0)
    g = g.to(p.dtype)
    mean.lerp_(share.index_select(0, steps).mul_(g), weight.index_select(0, steps))
    square.mul_(left.index_select(0, steps)).addcmul_(gain.index_select(0, steps).mul_(g), g)
    norm = square.sqrt().div_(correction).add_(eps)
    p.addcdiv_(mean * steps, norm, value=rate)
