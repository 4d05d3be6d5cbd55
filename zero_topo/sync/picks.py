# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Elements picked from a vector: how they are chosen, written into messages, and added up.

Note [In order]
    Sums of picks depend on their order, so what several peers sent is added up peer after peer: one element at a time
    on a CPU, where ``index_add_`` goes through its arguments in order. On a GPU that would be atomic additions in any
    order. There equal positions come together by a stable sort, and each run is added up by one thread in order, as
    ``segment_reduce`` does with rows of two dimensions. Either way the bits are those of a loop over the peers.

Note [Selection]
    On CPUs torch's selection takes five times as long as ours of a row, which also needs no sort. On GPUs torch selects
    and sorts up to 2**31 - 1 elements: a longer vector is selected from part by part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_topo.collectives.transport import Group
from zero_topo.config.sparse_config import index_bytes
from zero_topo.quant import ops

TINY = 1e-45  # below every other positive FP32: a threshold that passes all but zeros
LONGEST = 2**31 - 1
WORDS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Picked:
    """Some elements of a vector.

    Attributes:
        indices: int64; of one rank's own picks ascending, none twice.
        values: FP32, as many.
    """

    indices: Tensor
    values: Tensor

    def __len__(self) -> int:
        return self.indices.numel()

    def where(self, chosen: Tensor) -> Picked:
        """Those of ascending positions."""
        return Picked(self.indices[chosen], self.values[chosen])

    def non_zero(self, count: int) -> Picked:
        """Those that are not zero, known to be so many."""
        return self if count == len(self) else self.where(positions(self.values != 0, count))

    def rounded(self, dtype: torch.dtype) -> Picked:
        """With the values that a message of that type brings."""
        return Picked(self.indices, self.values.to(dtype).float())

    def counts(self, bounds: Tensor) -> Tensor:
        """How many lie between each pair of neighbouring bounds (int64 ``[P + 1]``), int64 ``[P]``."""
        return torch.searchsorted(self.indices, bounds).diff()


@dataclass(frozen=True)
class Records:
    """How picks travel: one after the other, each an index and then a value, so that messages can be cut anywhere.

    Attributes:
        dtype: of the values.
        numel: of the vector that indices count in.
    """

    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """Of a record."""
        return index_bytes(self.numel) + self.dtype.itemsize

    def encode(self, picked: Picked) -> Tensor:
        """``[picks, nbytes / 4]`` of int32, or int16 if values are of 2 bytes. Indices of 4 bytes are unsigned."""
        (head, tail), word = self._words, self._word
        message = torch.empty(len(picked), head + tail, dtype=word, device=picked.values.device)
        message[:, :head] = picked.indices.to(self._index).view(word).view(-1, head)
        message[:, head:] = picked.values.to(self.dtype).view(word).view(-1, tail)
        return message

    def decode(self, message: Tensor) -> Picked:
        """The inverse of :meth:`encode`, of any number of messages one after the other."""
        indices, values = message.split(self._words, dim=1)
        places = indices.contiguous().view(-1).view(self._index).long()
        if self._index is torch.int32 and self.numel > LONGEST:
            places.bitwise_and_(0xFFFFFFFF)
        return Picked(places, values.contiguous().view(-1).view(self.dtype).float())

    def scatter(self, peers: Group, picked: Picked, sizes: Sequence[int], expected: Sequence[int]) -> Picked:
        """Send the next ``sizes[p]`` picks to each peer ``p``; those that the peers send here, one after the other."""
        return self.decode(peers.scatter_known(self.encode(picked), sizes, expected))

    def gather(self, peers: Group, picked: Picked, counts: Sequence[int]) -> Picked:
        """The picks of all peers, one after the other; all peers know how many each has."""
        return self.decode(peers.gather_known(self.encode(picked), counts))

    @property
    def _index(self) -> torch.dtype:
        return torch.int32 if index_bytes(self.numel) == 4 else torch.int64

    @property
    def _word(self) -> torch.dtype:
        """As wide as both parts of a record allow: wide ones are copied much faster."""
        return WORDS[min(4, self.dtype.itemsize)]

    @property
    def _words(self) -> tuple[int, int]:
        """Of an index, and of a value."""
        return index_bytes(self.numel) // self._word.itemsize, self.dtype.itemsize // self._word.itemsize


def share(density: float, numel: int) -> int:
    """``k``: how many elements a density means, at least one."""
    return min(numel, max(1, math.ceil(density * numel)))


def kth_largest(x: Tensor, k: int) -> Tensor:
    """The ``k``-th largest magnitude, but never zero, FP64 ``[]``; ``TINY`` if there are fewer elements.

    Infinity, which NaN reaches, if NaN is among the largest.
    """
    if x.numel() < k or not k:
        return torch.full((), TINY, dtype=torch.float64, device=x.device)
    magnitudes = largest(x, k).values.abs() if _on_cpu(x) else _topk(x, k)[0]
    return magnitudes.min().double().clamp_(min=TINY).nan_to_num_(torch.inf, torch.inf)


def largest(x: Tensor, k: int) -> Picked:
    """The ``k`` elements of largest magnitude, some of which may be zero; see Note [Selection]."""
    k = min(k, x.numel())
    indices = ops.row_largest(x[None], k)[0] if k and _on_cpu(x) else _topk(x, k)[1].sort().values
    return Picked(indices, x[indices])


def largest_of_each(x: Tensor, widths: Tensor, counts: Tensor) -> Tensor:
    """Which elements are, of each part of a vector, so many of largest magnitude; of equal ones the first.

    Args:
        x: ``[n]``.
        widths: of the parts, one after the other, int64 ``[parts]``, ``n`` in all.
        counts: how many of each, the same.

    Returns:
        Bool ``[n]``.
    """
    part = torch.arange(len(widths), dtype=torch.int32, device=x.device).repeat_interleave(widths, output_size=len(x))
    order = x.abs().argsort(descending=True, stable=True)
    order = order[part[order].argsort(stable=True)]  # part by part, each from its largest
    place = torch.arange(len(x), device=x.device) - (widths.cumsum(0) - widths)[part]
    return torch.zeros_like(part, dtype=torch.bool).index_put_((order,), place < counts[part])


def _topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest magnitudes, in any order, and where they are; Note [Selection]."""
    if x.numel() <= LONGEST:
        values, indices = torch.topk(x.abs(), k, sorted=False)
        return values, indices
    parts = [torch.topk(part.abs(), min(k, part.numel()), sorted=False) for part in x.split(LONGEST)]
    values = torch.cat([part.values for part in parts])
    indices = torch.cat([part.indices + LONGEST * number for number, part in enumerate(parts)])
    best = torch.topk(values, k, sorted=False)
    return best.values, indices[best.indices]


def count_reaching(x: Tensor, threshold: Tensor) -> Tensor:
    """How many magnitudes reach a threshold that is on the device (``[]``), as NaN does; int64 ``[]``."""
    if _on_cpu(x):
        return ops.count_above(x, float(threshold))[0]
    return x.numel() - (x < threshold).sum() + (x <= -threshold).sum()


def above(x: Tensor, threshold: float, count: int) -> Picked:
    """The elements whose magnitude reaches a threshold, known to be so many; of those that are not finite one."""
    room = count if math.isfinite(threshold) else min(count, 1)
    indices, values, _ = ops.compact_above(x, threshold, room)
    return Picked(indices, values.float())


def positions(mask: Tensor, count: int) -> Tensor:
    """Where a mask ``[n]`` holds, known to be at so many places; int64, ascending. Nobody waits for the device."""
    return torch.nonzero_static(mask, size=count)[:, 0]


def added(picked: Picked, zeros: Callable[[], Tensor]) -> Tensor:
    """The sums of what is picked, of each element in the order given; Note [In order].

    Args:
        picked: of one or more peers.
        zeros: makes FP32 ``[n]``, which is returned; not before there is room for it.
    """
    if not _on_cpu(picked.values):
        picked = in_runs(picked)
    return zeros().index_add_(0, picked.indices, picked.values)


def _on_cpu(x: Tensor) -> bool:
    """Where ``index_add_`` goes in order, numbers are at hand, and we select."""
    return x.device.type == "cpu"


def in_runs(picked: Picked) -> Picked:
    """As many, in ascending order: the sum of what has one index at its first place, zeros at its others."""
    indices, order = picked.indices.sort(stable=True)
    values = picked.values[order][:, None]
    del order
    lengths = torch.searchsorted(indices, indices, right=True).sub_(torch.arange(len(picked), device=indices.device))
    lengths[1:] *= indices.diff() != 0
    return Picked(indices, torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)[:, 0])


def added_rows(rows: Tensor) -> Tensor:
    """``[P, K]`` -> FP32 ``[K]``: the sum of the rows, in their order; Note [In order]."""
    rows = rows.float()
    if _on_cpu(rows):
        total = torch.zeros(1, rows.shape[1])
        return total.index_add_(0, torch.zeros(len(rows), dtype=torch.int64), rows)[0]
    lengths = torch.full((1,), len(rows), device=rows.device)
    return torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True)[0]
