# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the modes have in common whose mask all peers share, so that values travel packed and without indices.

Note [Rounding]
    Where values travel in fewer bits, what rounding takes from a rank's values stays in its residual, and what it takes
    from the sums in the owner's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zero_topo.sync.picks import positions
from zero_topo.sync.sparse import Report, Sparse


class Masked(Sparse):
    """A sparse mode with a common mask, in which all rows hold equally many elements: no lengths travel either."""

    def exchanged(self, total: Tensor) -> tuple[Tensor, Any, Report]:
        """What the mode makes of it; NaN if any rank has an element that is not finite, in the mask or not."""
        # Of the least and the largest, which NaN in any element makes NaN: nothing of the gradient's size is made.
        finite = torch.stack(total.aminmax()).isfinite().all()
        reduced, state, report = super().exchanged(total)
        flags = self.peers.gather(finite.to(torch.uint8).view(1))
        reduced.masked_fill_(flags.all().logical_not(), torch.nan)
        return reduced, state, report

    def reduce_masked(self, total: Tensor, mask: Tensor, kept: int) -> Tensor:
        """Sums over the peers of what the mask holds; collective.

        Args:
            total: FP32 ``[P * C]``; what rounding leaves takes the place of what is sent.
            mask: bool ``[P, C]``.
            kept: elements that it holds in each row.

        Returns:
            FP32, zero off the mask: ``[P * C]``, or the own row.
        """
        size, own = self.peers.size, self.peers.index
        if kept == self._columns:
            return self.reduce_rows(total.view(size, kept))
        indices = positions(mask.reshape(-1), size * kept)
        packed = total[indices].view(size, kept)
        sums = self.reduce_rows(packed)
        total[indices] = packed.view(-1)
        if self.everywhere:
            return self.zeros().index_copy_(0, indices, sums)
        places = indices.view(size, kept)[own] - own * self._columns
        return total.new_zeros(self._columns).index_copy_(0, places, sums)
