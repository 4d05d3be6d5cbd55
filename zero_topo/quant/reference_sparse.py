# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Implements the operations of the sparse modes and of AgedAdamW in plain torch; ``reference.py``
has the others.

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

from zero_topo.quant.operands import FLOATS, counted

# In what GPUs do by torch's operations: their kernels serve parts of it
OPS: Any = torch.ops.zero_topo
SKETCH_WIDTH = 1024
UPDATED = 1 << 22  # elements that the optimizer updates at once: bounds the scratch memory
_MASK = (1 << 64) - 1


def mask_pack(mask: Tensor, bits: Tensor) -> None:
    """Pack booleans ``[n]`` into bytes ``[ceil(n / 8)]``; element ``i`` is bit ``i % 8`` of byte
    ``i // 8``.
    """
    padded = mask.new_zeros(8 * bits.numel())
    padded[: mask.numel()] = mask
    # torch has no packing of bits: a weighted sum of eight.
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=mask.device)
    weighted = padded.view(-1, 8) * weights
    bits.copy_(weighted.sum(dim=1, dtype=torch.uint8))


def mask_unpack(bits: Tensor, mask: Tensor) -> None:
    """Unpack the result of :func:`mask_pack` into booleans ``[n]``."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    flags = bits[:, None] >> places
    flags &= 1
    mask.copy_(flags.view(-1)[: mask.numel()])


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
    kth = size.topk(k, dim=1, sorted=False).values
    kth = kth.amin(dim=1, keepdim=True)
    largest = size > kth
    equal = size == kth
    del size
    counts = torch.int16 if x.shape[1] < 1 << 15 else torch.int32
    left = k - largest.sum(dim=1, keepdim=True)
    equal &= equal.cumsum(dim=1, dtype=counts) <= left
    largest |= equal
    columns = set_positions(largest, indices.numel())[:, 1]
    indices.copy_(columns.view_as(indices))


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
    mean = total / count.clamp(min=1)
    scale = mean.float().to(FLOATS[dtype])
    del sizes
    first = indices.masked_fill(void, block).amin(dim=1, keepdim=True)
    first %= block
    # A void repeats the position before it
    index = torch.where(void, first, indices)
    index = index.cummax(dim=1).values
    del void
    device = x.device
    rows = len(packets)
    # Elias-Fano: the upper bits in unary, as set bits of a bitmap; the lower ones as they are.
    ones = (index >> low) + counted(selections, x)
    width = selections + (block >> low)
    high = torch.zeros(len(x), width, dtype=torch.bool, device=device)
    high.scatter_(1, ones, 1)
    del ones
    places = torch.arange(low, dtype=torch.int16, device=device)
    lows = index.short()[..., None] >> places
    lows &= 1
    parts = high, lows, x.gather(1, index) < 0
    flags = torch.cat([part.bool().view(rows, -1) for part in parts], dim=1)
    del parts
    flags = pad(flags, (0, -flags.shape[1] % 8))
    bits = torch.empty(rows, flags.shape[1] // 8, dtype=torch.uint8, device=device)
    OPS.mask_pack.default(flags.view(-1), bits.view(-1))
    scales = scale.view(rows, -1).view(torch.uint8)
    torch.cat([bits, scales], dim=1, out=packets)
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
    sizes = selections + (block >> low), selections * low, selections
    parts = [of_row * bits for bits in sizes]
    split = -(-sum(parts) // 8)
    scales = packets[:, split:].clone(memory_format=torch.contiguous_format)
    bits = packets[:, :split].contiguous()
    flags = torch.empty(rows, 8 * bits.shape[1], dtype=torch.bool, device=device)
    OPS.mask_unpack.default(bits.view(-1), flags.view(-1))
    padding = flags.shape[1] - sum(parts)
    high, lows, signs, _ = flags.split([*parts, padding], dim=1)
    blocks = rows * of_row
    ones = set_positions(high.reshape(blocks, -1), blocks * selections)[:, 1]
    ones = ones.view(blocks, selections)
    places = torch.arange(low, dtype=torch.int16, device=device)
    lower = lows.reshape(blocks, selections, -1).short()
    lower <<= places
    index = ones - counted(selections, ones)
    index <<= low
    index += lower.sum(dim=2, dtype=torch.int16)
    scale = scales.view(FLOATS[dtype]).float().view(blocks, 1)
    signed = torch.where(signs.reshape(blocks, selections), -scale, scale)
    # A repeated position stands for an element that was void.
    signed[:, 1:].masked_fill_(index.diff(dim=1) == 0, 0)
    index += begins.reshape(blocks, 1)
    indices.copy_(index.view(-1))
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
        alone = torch.stack([counts[row] == 1 for row, _ in three])
        alone &= unresolved[block]
        resolved = alone.any(dim=0)
        if not resolved.any():
            return False
        chosen = alone.int().argmax(dim=0)
        value = values_of(three).gather(0, chosen[None])[0]
        values[block] = torch.where(resolved, value, values[block])
        unresolved[block] &= ~resolved
        for j, (row, sign) in enumerate(three):
            counts[row] -= resolved.int()
            other = chosen != j  # the row of the value is not read again
            table[row] -= torch.where(resolved & other, sign * value, 0.0)
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
    z ^= z >> 33
    z = z * 0xFF51AFD7ED558CCD & _MASK
    z ^= z >> 33
    z = z * 0xC4CEB9FE1A85EC53 & _MASK
    return z ^ (z >> 33)


def _hashed_rows(seed: int, block: int, rows: int) -> list[tuple[int, float]]:
    """Return the row of a block in each third of the sketch, and its sign."""
    three = []
    for j in range(3):
        key = seed + 0x9E3779B97F4A7C15 * (3 * block + j + 1)
        mixed = _mix(key & _MASK)
        first = rows * j // 3
        past = rows * (j + 1) // 3
        lower = mixed & 0xFFFFFFFF
        row = first + (lower * (past - first) >> 32)
        sign = -1.0 if mixed >> 63 else 1.0
        three.append((row, sign))
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
    parts = [part.split(UPDATED) for part in (p, g, mean, square, age)]
    for chunk in zip(*parts, strict=True):
        _update_aged(chunk, table, settings)


def _update_aged(chunk: tuple[Tensor, ...], table: Tensor, settings: Sequence[float]) -> None:
    """Update some elements, in the order of operations of ``AdamW``."""
    p, g, mean, square, age = chunk
    left, gain = table
    decay, correction, eps, rate, whole, weight = settings
    if decay != 1:
        p *= decay
    arrived = g != 0
    steps = age.int()
    steps += 1
    steps *= arrived  # since the last arrival; 0 without one now
    age.clamp_(max=254)
    age += 1
    age.masked_fill_(arrived, 0)
    g = g.to(p.dtype)
    waited = steps > 1
    mean.lerp_(g, arrived.to(p.dtype) * weight)
    change = torch.where(waited, whole * mean, rate * mean * arrived)
    mean.masked_fill_(waited, 0)
    square *= left.index_select(0, steps)
    square.addcmul_(gain.index_select(0, steps).mul_(g), g)
    norm = square.sqrt()
    norm /= correction
    norm += eps
    p += change / norm
