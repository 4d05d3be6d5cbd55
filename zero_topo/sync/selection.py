# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Selected elements of a vector: their selection, their encoding in packed buffers, and their
summation.

Note [Order of sums]
    Floating-point sums depend on their order, so the elements of several peers are added peer by
    peer. On a CPU ``index_add_`` processes its arguments in order. On a GPU it would use atomic
    additions in any order; there a stable sort brings equal positions together, and
    ``segment_reduce`` of two-dimensional rows adds each run in order, in one thread. Both results
    are bit-identical to a loop over the peers.

Note [Selection]
    On CPUs torch's selection takes five times as long as our ``row_largest``, which also needs no
    sort. On GPUs torch selects and sorts at most 2**31 - 1 elements, so a longer vector is
    processed in parts. On ROCm it sorts a long vector, with 28 bytes of scratch per element. There,
    a sample gives a threshold that somewhat more than ``k`` elements reach, and the ``k`` largest
    are selected from these. This costs two host synchronizations.
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
from zero_topo.quant.operands import counted
from zero_topo.quant.reference_sparse import set_positions

TINY = 1e-45  # the least positive FP32: every element but zero reaches this threshold
LONGEST = 2**31 - 1
SAMPLE = 1 << 16
WORDS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Selected:
    """Some elements of a vector.

    Attributes:
        indices: int64; one rank's own selection is ascending, without duplicates.
        values: FP32, one per index.
    """

    indices: Tensor
    values: Tensor

    def __len__(self) -> int:
        return self.indices.numel()

    def where(self, chosen: Tensor) -> Selected:
        """Return the elements at ``chosen``, ascending positions in this selection."""
        return Selected(self.indices[chosen], self.values[chosen])

    def non_zero(self, count: int) -> Selected:
        """Return the elements that are not zero, of which there are ``count``."""
        if count == len(self):
            return self
        return self.where(positions(self.values != 0, count))

    def subtract_from(self, x: Tensor) -> None:
        """Subtract the elements from a vector in place."""
        x.index_add_(0, self.indices, self.values, alpha=-1)

    def rounded(self, dtype: torch.dtype) -> Selected:
        """Return the elements with values rounded to ``dtype``, as a receiver gets them."""
        return Selected(self.indices, self.values.to(dtype).float())

    def counts(self, bounds: Tensor) -> Tensor:
        """Return the number of elements between neighbouring bounds (int64 ``[P + 1]``), as int64
        ``[P]``.
        """
        return torch.searchsorted(self.indices, bounds).diff()


@dataclass(frozen=True)
class Records:
    """The wire format of selected elements: records of an index and a value, so that a buffer can
    be cut anywhere.

    Attributes:
        dtype: dtype of the values.
        numel: length of the vector that the indices refer to.
    """

    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """The bytes of one selected element as sent."""
        return index_bytes(self.numel) + self.dtype.itemsize

    def encode(self, selected: Selected) -> Tensor:
        """Encode as int32 ``[selections, nbytes / 4]``, or int16 if values have 2 bytes.

        4-byte indices are unsigned.
        """
        head, tail = self._words
        word = self._word
        device = selected.values.device
        message = torch.empty(len(selected), head + tail, dtype=word, device=device)
        # An index and its value side by side: a message can be cut after any record.
        message[:, :head] = selected.indices.to(self._index).view(word).view(-1, head)
        message[:, head:] = selected.values.to(self.dtype).view(word).view(-1, tail)
        return message

    def decode(self, message: Tensor) -> Selected:
        """Invert :meth:`encode`, for any number of concatenated buffers."""
        indices, values = message.split(self._words, dim=1)
        places = indices.contiguous().view(-1).view(self._index).long()
        if self._index is torch.int32 and self.numel > LONGEST:
            # Indices from 2**31 on were negative as int32.
            places.bitwise_and_(0xFFFFFFFF)
        return Selected(places, values.contiguous().view(-1).view(self.dtype).float())

    def all_to_all(
        self,
        peers: Group,
        selected: Selected,
        sizes: Sequence[int],
        expected: Sequence[int],
    ) -> Selected:
        """Send the next ``sizes[p]`` elements to each peer ``p``; return those received, in the
        order of the peers.
        """
        message = self.encode(selected)
        return self.decode(peers.begin("all_to_all", message, sizes, expected).wait())

    def gather(self, peers: Group, selected: Selected, counts: Sequence[int]) -> Selected:
        """Gather the elements of all peers, in the order of the peers; ``counts`` is equal on
        all.
        """
        return self.decode(peers.begin("all_gather", self.encode(selected), counts).wait())

    @property
    def _index(self) -> torch.dtype:
        return torch.int32 if index_bytes(self.numel) == 4 else torch.int64

    @property
    def _word(self) -> torch.dtype:
        """The widest integer dtype that divides both parts of a record: wide words are copied much
        faster.
        """
        return WORDS[min(4, self.dtype.itemsize)]

    @property
    def _words(self) -> tuple[int, int]:
        """Words of an index, and of a value."""
        size = self._word.itemsize
        return index_bytes(self.numel) // size, self.dtype.itemsize // size


def kth_largest(x: Tensor, k: int) -> Tensor:
    """Return the ``k``-th largest magnitude, at least ``TINY``, FP64 ``[]``; ``TINY`` if there are
    fewer elements.

    It is infinity if NaN is among the largest; NaN reaches that threshold.
    """
    if x.numel() < k or not k:
        return x.new_full((), TINY, dtype=torch.float64)
    magnitudes = largest(x, k).values.abs() if _on_cpu(x) else _topk(x, k)[0]
    kth = magnitudes.min().double()
    kth.clamp_(min=TINY)
    return kth.nan_to_num_(torch.inf, torch.inf)


def largest(x: Tensor, k: int) -> Selected:
    """Select the ``k`` elements of largest magnitude, some of which may be zero; see Note
    [Selection].
    """
    k = min(k, x.numel())
    if k and _on_cpu(x):
        indices = ops.row_largest(x[None], k)[0]
        return Selected(indices, x[indices])
    _, found = _topk(x, k)
    indices = found.sort().values
    return Selected(indices, x[indices])


def largest_of_rows(x: Tensor, k: int) -> Tensor:
    """Return the columns of the ``k`` largest magnitudes of each row of ``x``, ascending, int64
    ``[rows, k]``.
    """
    if _on_cpu(x):
        return ops.row_largest(x, k)
    indices = torch.topk(x.abs(), k, sorted=False).indices
    return indices.sort(dim=1).values


def largest_of_each(x: Tensor, widths: Tensor, counts: Tensor) -> Tensor:
    """Mark the elements of largest magnitude in each part of a vector; among equal ones the first.

    Args:
        x: ``[n]``.
        widths: widths of the consecutive parts, int64 ``[parts]``, with sum ``n``.
        counts: number of elements to mark in each part, int64 ``[parts]``.

    Returns:
        Bool ``[n]``.
    """
    part = torch.arange(len(widths), dtype=torch.int32, device=x.device)
    part = part.repeat_interleave(widths, output_size=len(x))
    order = x.abs().argsort(descending=True, stable=True)
    # Stable sorts: first by magnitude, then by part, so that ties keep the order of the elements.
    order = order[part[order].argsort(stable=True)]  # by part, in descending magnitude
    begins = widths.cumsum(0) - widths
    place = counted(len(x), x) - begins[part]
    marked = torch.zeros_like(part, dtype=torch.bool)
    return marked.index_put_((order,), place < counts[part])


def _topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest magnitudes, in any order, and their indices; Note [Selection]."""
    if (likely := _likely(x, k)) is not None:
        values, indices = _topk(x[likely], k)
        return values, likely[indices]
    if x.numel() <= LONGEST:
        values, indices = torch.topk(x.abs(), k, sorted=False)
        return values, indices
    values_of = []
    indices_of = []
    for number, part in enumerate(x.split(LONGEST)):
        found = torch.topk(part.abs(), min(k, part.numel()), sorted=False)
        values_of.append(found.values)
        indices_of.append(found.indices + LONGEST * number)
    # The largest of all are among the largest of the parts.
    values, best = torch.topk(torch.cat(values_of), k, sorted=False)
    return values, torch.cat(indices_of)[best]


def _likely(x: Tensor, k: int) -> Tensor | None:
    """Return ascending indices that include those of the ``k`` largest magnitudes; None if all may
    be; ROCm only.
    """
    stride = x.numel() // SAMPLE
    if torch.version.hip is None or stride < 16 or k > x.numel() // 8:
        return None
    rank = _surely(k / stride)
    within = counted(SAMPLE, x)
    # Scattered, so that no period is missed.
    places = within * stride + within * 2654435761 % stride
    sample = x[places].abs()
    room = stride * _surely(rank)
    threshold = float(sample.topk(rank).values[-1])
    indices, _, found = ops.compact_above(x, threshold, room)
    count = int(found)
    # A sample that misled: all elements are looked at.
    return indices[:count] if k <= count <= room else None


def _surely(count: float) -> int:
    """Return a number that a random count of this mean almost never exceeds."""
    return int(count + 4 * math.sqrt(count) + 4)


def count_reaching(x: Tensor, threshold: Tensor) -> Tensor:
    """Count the magnitudes that reach a threshold on the device (``[]``), NaN included; int64
    ``[]``.
    """
    if _on_cpu(x):
        return ops.count_above(x, float(threshold))[0]
    # Without a copy of magnitudes; NaN is below nothing, so it counts.
    return x.numel() - (x < threshold).sum() + (x <= -threshold).sum()


def above(x: Tensor, threshold: float, count: int) -> Selected:
    """Select the ``count`` elements that reach a threshold; at most one if the threshold is not
    finite.
    """
    room = count if math.isfinite(threshold) else min(count, 1)
    indices, values, _ = ops.compact_above(x, threshold, room)
    return Selected(indices, values.float())


def positions(mask: Tensor, count: int) -> Tensor:
    """Return the first ``count`` indices at which a mask ``[n]`` is set, int64, ascending, and 0
    where there are fewer.

    This needs no host synchronization.
    """
    return set_positions(mask, count)[:, 0]


def added(selected: Selected, zeros: Callable[[], Tensor]) -> Tensor:
    """Add up selected elements, those of equal index in their given order; Note [Order of sums].

    Args:
        selected: elements of one or more peers.
        zeros: creates the result, FP32 ``[n]``; called after temporary buffers are freed.
    """
    if not _on_cpu(selected.values):
        selected = in_runs(selected)
    return zeros().index_add_(0, selected.indices, selected.values)


def _on_cpu(x: Tensor) -> bool:
    """Return whether a tensor is on the CPU: ``index_add_`` is ordered there, reads are free, and
    we select.
    """
    return x.device.type == "cpu"


def in_runs(selected: Selected) -> Selected:
    """Sort elements by index; the first of an index gets the sum, its duplicates zero. The length
    stays.
    """
    indices, order = selected.indices.sort(stable=True)
    values = selected.values[order][:, None]
    del order
    # How many elements from here on have this index.
    lengths = torch.searchsorted(indices, indices, right=True)
    lengths -= counted(len(selected), lengths)
    # Only the first of an index has a run; those behind it are empty, and sum to zero.
    lengths[1:] *= indices.diff() != 0
    sums = torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
    return Selected(indices, sums[:, 0])


def added_rows(rows: Tensor) -> Tensor:
    """Sum rows ``[P, K]`` in their order to FP32 ``[K]``; Note [Order of sums]."""
    rows = rows.float()
    if _on_cpu(rows):
        total = torch.zeros(1, rows.shape[1], dtype=torch.float32, device="cpu")
        # All rows are added to row 0, in order.
        places = torch.zeros(len(rows), dtype=torch.int64, device="cpu")
        return total.index_add_(0, places, rows)[0]
    lengths = rows.new_full((1,), len(rows), dtype=torch.int64)
    return torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True)[0]
