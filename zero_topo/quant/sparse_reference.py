# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the sparse modes do element by element, in plain torch and Python: the oracle of the kernels.

Note [Count sketch]
    A vector is cut into blocks of 1024 elements; a sketch has ``rows`` rows of 1024 lanes, in three thirds. Block ``b``
    is added into one row of each third, chosen and signed by a hash of ``(seed, b, third)``; an element's lane stays.
    Sketches of several ranks add up to the sketch of their sum (TAGC, EuroMLSys 2025, after lossless homomorphic
    compression). Given which elements are non-zero, peeling inverts it: an element alone in a row of its lane is known,
    and is taken out of its other two rows. What peeling leaves gets the median of its three rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 1024
_MASK = (1 << 64) - 1


def mask_pack(mask: Tensor, bits: Tensor) -> None:
    """Booleans ``[n]`` -> bytes ``[ceil(n / 8)]``; element ``i`` is bit ``i % 8`` of byte ``i // 8``."""
    padded = mask.new_zeros(8 * bits.numel())
    padded[: mask.numel()] = mask
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=mask.device)
    bits.copy_((padded.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8))


def mask_unpack(bits: Tensor, mask: Tensor) -> None:
    """The inverse of :func:`mask_pack`, into booleans ``[n]``."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    mask.copy_(((bits[:, None] >> places) & 1).view(-1)[: mask.numel()])


def count_above(x: Tensor, threshold: float) -> Tensor:
    """How many ``|x[i]| >= threshold`` (FP32 comparison; NaN always does), int64 ``[1]``."""
    return _above(x, threshold).sum().view(1)


def compact_above(x: Tensor, threshold: float, indices: Tensor, values: Tensor) -> Tensor:
    """Indices (int64) and values of those elements in ascending order, as many as there is room for.

    Returns:
        How many there are, int64 ``[1]``; the rest of ``indices`` and ``values`` is left as it was.
    """
    found = _above(x, threshold).nonzero()[:, 0]
    kept = found[: indices.numel()]
    indices[: kept.numel()] = kept
    values[: kept.numel()] = x[kept]
    return torch.tensor([found.numel()], device=x.device)


def row_largest(x: Tensor, indices: Tensor) -> None:
    """Of each row of ``x`` (FP32 ``[rows, n]``) the columns of the ``k`` largest magnitudes, int64 ``[rows, k]``.

    Ascending; NaN is larger than all, and of equal ones the first are taken.
    """
    size, k = x.view(torch.int32) & 0x7FFFFFFF, indices.shape[1]
    kth = size.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    taken, equal = size > kth, size == kth
    del size
    counts = torch.int16 if x.shape[1] < 1 << 15 else torch.int32
    taken |= equal & (equal.cumsum(dim=1, dtype=counts) <= k - taken.sum(dim=1, keepdim=True))
    indices.copy_(torch.nonzero_static(taken, size=indices.numel())[:, 1].view_as(indices))


def sketch_insert(x: Tensor, seed: int, sketch: Tensor) -> None:
    """Overwrite ``sketch`` (FP32 ``[members, rows, 1024]``) with those of ``x`` (FP32 ``[members, n]``).

    See Note [Count sketch].
    """
    sketch.zero_()
    for block, part in enumerate(x.split(LANES, dim=1)):
        for row, sign in _places(seed, block, sketch.shape[1]):
            sketch[:, row, : part.shape[1]] += sign * part


def sketch_peel(sketch: Tensor, bits: Tensor, seed: int, out: Tensor) -> Tensor:
    """Recover ``out`` (FP32 ``[n]``) from its sketch (used up) and the packed mask of its non-zero elements.

    Returns:
        How many elements peeling did not reach, int64 ``[1]``.
    """
    blocks = -(-out.numel() // LANES)
    present = torch.zeros(blocks * LANES, dtype=torch.bool)
    mask_unpack(bits.cpu(), present[: out.numel()])
    peeling = _Peeling(sketch.cpu(), present.view(blocks, LANES), seed)
    while any([peeling.visit(block) for block in range(blocks)]):
        pass
    left = int(peeling.unresolved.sum())
    peeling.guess()
    out.copy_(peeling.found.view(-1)[: out.numel()])
    return torch.tensor([left], device=out.device)


class _Peeling:
    """The state of one peeling, all lanes side by side; lanes know nothing of one another."""

    def __init__(self, table: Tensor, unresolved: Tensor, seed: int) -> None:
        self.table, self.unresolved = table, unresolved
        self.found = torch.zeros(unresolved.shape)
        self.places = [_places(seed, block, table.shape[0]) for block in range(unresolved.shape[0])]
        self.counts = torch.zeros(table.shape, dtype=torch.int32)
        for block, three in enumerate(self.places):
            for row, _ in three:
                self.counts[row] += unresolved[block]

    def visit(self, block: int) -> bool:
        """Resolve what is alone in one of its rows, by the first such row; whether there was anything."""
        three = self.places[block]
        alone = torch.stack([self.counts[row] == 1 for row, _ in three]) & self.unresolved[block]
        resolved = alone.any(dim=0)
        if not resolved.any():
            return False
        chosen = alone.int().argmax(dim=0)
        values = torch.stack([sign * self.table[row] for row, sign in three]).gather(0, chosen[None])[0]
        self.found[block] = torch.where(resolved, values, self.found[block])
        self.unresolved[block] &= ~resolved
        for j, (row, sign) in enumerate(three):
            self.counts[row] -= resolved.int()
            self.table[row] -= torch.where(resolved & (chosen != j), sign * values, 0.0)
        return True

    def guess(self) -> None:
        """The median of its three rows for whatever is left."""
        for block, three in enumerate(self.places):
            guesses = torch.stack([sign * self.table[row] for row, sign in three]).median(dim=0).values
            self.found[block] = torch.where(self.unresolved[block], guesses, self.found[block])


def _above(x: Tensor, threshold: float) -> Tensor:
    return (x.float().abs() < torch.tensor(threshold, dtype=torch.float32, device=x.device)).logical_not()


def _mix(z: int) -> int:
    z = ((z ^ (z >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    z = ((z ^ (z >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK
    return z ^ (z >> 33)


def _places(seed: int, block: int, rows: int) -> list[tuple[int, float]]:
    """The row in each third of the sketch, and the sign."""
    three = []
    for j in range(3):
        mixed = _mix((seed + 0x9E3779B97F4A7C15 * (3 * block + j + 1)) & _MASK)
        first, past = rows * j // 3, rows * (j + 1) // 3
        row = first + (((mixed & 0xFFFFFFFF) * (past - first)) >> 32)
        three.append((row, -1.0 if mixed >> 63 else 1.0))
    return three
