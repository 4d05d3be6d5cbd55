# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Elements picked from a vector: how they are chosen, written into messages, and added up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from zero_topo.quant.sparse_ops import SparseOps

TINY = 1e-45  # below every other positive FP32: a threshold that passes all but zeros
INDEX_BYTES = 4


@dataclass(frozen=True)
class Picked:
    """Some elements of a vector.

    Attributes:
        indices: int64, ascending, none twice.
        values: FP32, as many.
    """

    indices: Tensor
    values: Tensor

    def __len__(self) -> int:
        return self.indices.numel()

    def where(self, chosen: Tensor) -> Picked:
        """Those of a boolean mask or of ascending positions."""
        return Picked(self.indices[chosen], self.values[chosen])

    def rounded(self, dtype: torch.dtype) -> Picked:
        """With the values that a message of that type brings."""
        return Picked(self.indices, self.values.to(dtype).float())

    def cut(self, bounds: Sequence[int]) -> list[Picked]:
        """Those within each pair of neighbouring bounds, counted from the lower one."""
        edges = torch.searchsorted(self.indices, torch.tensor(bounds, device=self.indices.device)).tolist()
        return [
            Picked(self.indices[begin:end] - low, self.values[begin:end])
            for low, (begin, end) in zip(bounds, pairwise(edges), strict=False)
        ]

    def encode(self, dtype: torch.dtype) -> Tensor:
        """Indices as int32, then values, padded to 4 bytes: uint8, 1-D."""
        indices, values = self.indices.to(torch.int32).view(torch.uint8), self.values.to(dtype).view(torch.uint8)
        padding = values.new_zeros(-(indices.numel() + values.numel()) % INDEX_BYTES)
        return torch.cat([indices, values, padding])

    @classmethod
    def decode(cls, message: Tensor, dtype: torch.dtype) -> Picked:
        """The inverse of :meth:`encode`."""
        count = message.numel() // (INDEX_BYTES + dtype.itemsize)
        values = message[INDEX_BYTES * count : (INDEX_BYTES + dtype.itemsize) * count]
        return cls(message[: INDEX_BYTES * count].view(torch.int32).long(), values.clone().view(dtype).float())


def message_bytes(count: int, itemsize: int) -> int:
    """Bytes of :meth:`Picked.encode` of ``count`` elements."""
    return -(-count * (INDEX_BYTES + itemsize) // INDEX_BYTES) * INDEX_BYTES


def share(density: float, numel: int) -> int:
    """``k``: how many elements a density means, at least one."""
    return min(numel, max(1, math.ceil(density * numel)))


def kth_largest(x: Tensor, k: int) -> float:
    """The ``k``-th largest magnitude, but never zero; ``TINY`` if there are fewer elements."""
    if x.numel() < k or not k:
        return TINY
    return max(float(torch.topk(x.abs(), k, sorted=False).values.min()), TINY)


def largest(x: Tensor, k: int) -> Picked:
    """The ``k`` elements of largest magnitude, zeros left out."""
    indices = torch.topk(x.abs(), min(k, x.numel()), sorted=False).indices.sort().values
    picked = Picked(indices, x[indices])
    return picked.where(picked.values != 0)


def above(x: Tensor, threshold: float, ops: SparseOps) -> Picked:
    """The elements whose magnitude reaches a threshold."""
    room = int(ops.count_above(x, threshold))
    found = ops.compact_above(x, threshold, room)
    return Picked(found.indices, found.values.float())


def added(parts: Sequence[Picked], numel: int, like: Tensor) -> Tensor:
    """FP32 ``[numel]``: the sum of all parts, in their order."""
    total = torch.zeros(numel, device=like.device)
    for part in parts:
        total[part.indices] += part.values
    return total


def non_zero(x: Tensor) -> Picked:
    """All elements but zeros."""
    indices = x.nonzero()[:, 0]
    return Picked(indices, x[indices])
