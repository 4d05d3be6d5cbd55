# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the modes have in common whose mask all peers share, so that values travel packed and without indices.

Note [Rounding]
    Where values travel in fewer bits, what rounding takes from a rank's values stays in its residual, and what it takes
    from the sums in the owner's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_topo.config import SparseSync
from zero_topo.quant.pieces import DTYPES
from zero_topo.sync.base import SyncContext
from zero_topo.sync.sparse import Sparse, State


class Masked(Sparse[State]):
    """A sparse mode with a common mask, in which all rows hold equally many elements: no lengths travel either."""

    def __init__(self, config: SparseSync, context: SyncContext) -> None:
        super().__init__(config, context)
        self.dtype = DTYPES[config.value_dtype]

    def reduce_masked(self, table: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, int]:
        """Sums over the peers of what the mask holds; collective.

        Args:
            table: FP32 ``[P, C]``; overwritten.
            mask: bool ``[P, C]``, as many in each row.

        Returns:
            The sums, FP32 ``[P, C]``, zero off the mask, of the own row or of all; the table with what rounding left in
            place of what was sent; and how many elements the mask holds.
        """
        reduced = torch.zeros_like(table)
        sums, left = self.reduce_rows(table[mask].view(self.peers.size, -1))
        reduced[mask], table[mask] = sums.view(-1), left.view(-1)
        return reduced, table, left.numel()

    def reduce_rows(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over the peers of ``[P, K]`` values, of the own row or of all, and what rounding left; collective."""
        own, width = self.peers.index, packed.shape[1]
        sent = packed.to(self.dtype)
        left = packed - sent.float()
        total = packed.new_zeros(width)
        for message in self.peers.scatter_known(list(sent), [width] * self.peers.size):
            total += message.float()
        if self.everywhere:
            told = total.to(self.dtype)
            left[own] += total - told.float()
            return self.peers.gather(told).float(), left
        sums = torch.zeros_like(packed)
        sums[own] = total
        return sums, left

    def packed(self, mask: Tensor) -> Tensor:
        """Bool ``[C]`` as bits, uint8 ``[ceil(C / 8)]``."""
        return self.context.sparse.pack(mask)

    def unpacked(self, bits: Tensor, begin: int = 0, end: int | None = None) -> Tensor:
        """Bits ``[rows, ceil(C / 8)]`` as bool ``[rows, end - begin]``, all columns by default."""
        end = self._columns if end is None else end
        first = begin // 8 * 8
        rows = [self.context.sparse.unpack(row[first // 8 : -(-end // 8)], end - first) for row in bits]
        return torch.stack(rows)[:, begin - first :]
