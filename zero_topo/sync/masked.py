# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The base of sparse modes whose peers share a mask, and masks whose rows are packed separately."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from zero_topo.quant import ops
from zero_topo.quant.operands import Range
from zero_topo.sync.selection import positions
from zero_topo.sync.sparse import Exchange, Run, Sparse, Started


class Masked(Sparse):
    """A sparse mode with a mask that all peers share: values are sent packed, without indices.

    All rows of the mask have equally many elements in each run, so no lengths are sent either.
    """

    def reduce_masked(
        self,
        total: Tensor,
        run: Run,
        mask: Callable[[], Tensor],
        kept: int,
    ) -> Started:
        """Begin to sum the masked elements over the peers; collective.

        Args:
            total: FP32 ``[P * m]``.
            run: the run.
            mask: returns the mask, bool ``[P, m]``.
            kept: number of elements that are set in each row of the mask.

        Returns:
            The function that ends it, with the result FP32, zero off the mask: ``[P * m]``, or the
            own row ``[m]`` if this rank needs no others; and the record.
        """
        size = self.peers.size
        own = self.peers.index
        width = run.width
        # A mask of all elements is a dense sum.
        if kept == width:
            return self._exchange_all(total, run)
        indices = positions(mask().reshape(-1), size * kept)
        packed = total[indices].view(size, kept)
        # Minimum and maximum are NaN if any element is: this needs no temporary of the gradient's
        # size.
        finite = torch.stack(total.aminmax()).isfinite().all()
        packed[:, 0].masked_fill_(finite.logical_not(), torch.nan)
        end, settle_packed = self.reduce_rows(packed)
        if not self.everywhere:
            indices = indices.view(size, kept)[own] - own * width
        numel = len(total) if self.everywhere else width

        def finish() -> Tensor:
            sums = end()
            return sums.new_zeros(numel).index_copy_(0, indices, sums)

        def settle(again: Tensor) -> None:
            # The mask is unpacked again rather than kept: it has a byte for each element.
            places = positions(mask().reshape(-1), size * kept)
            sent = again[places].view(size, kept)
            settle_packed(sent)
            again[places] = sent.view(-1)

        return finish, Exchange(settle, {"density": kept / width})


def masked_of_rows(bits: Tensor, parts: Iterable[Range]) -> tuple[int, ...]:
    """Return by part (columns) the number of elements that a saved mask has in each row.

    Args:
        bits: the mask, each row packed separately.
        parts: the columns of each part.

    Raises:
        ValueError: if rows differ or a part has no element, because the mask was selected of other
            parts.
    """
    kept = []
    for begin, end in parts:
        # Each row must have as many, or messages of the peers differ in length.
        least, *others = sorted(set(unpacked(bits, begin, end).sum(dim=1).tolist()))
        if others or least < min(1, end - begin):
            raise ValueError(
                "its mask was selected of other parts; set sync.select and reduce_bucket_size as "
                "it had"
            )
        kept.append(least)
    return tuple(kept)


def unpacked(bits: Tensor, begin: int, end: int) -> Tensor:
    """Unpack the columns from ``begin`` to ``end`` of rows that are packed separately: bool
    ``[rows, end - begin]``.
    """
    first = begin // 8
    past = -(-end // 8)
    part = bits[:, first:past].contiguous()
    flags = ops.unpack(part.view(-1), 8 * part.numel())
    rows = flags.view(len(bits), -1)
    return rows[:, begin - 8 * first : end - 8 * first]


def packed(rows: Tensor) -> Tensor:
    """Pack bool ``[rows, m]`` to uint8 ``[rows, ceil(m / 8)]``, each row separately."""
    # Whole bytes a row, since each row goes to another owner.
    missing = -rows.shape[1] % 8
    rows = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
    return ops.pack(rows.reshape(-1)).view(len(rows), -1)
