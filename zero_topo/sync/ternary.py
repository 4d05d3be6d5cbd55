# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ternary sync: the largest elements of each block, as signs with one scale, a third of a bit per
element.

1. A rank divides the other owners' rows of its gradient plus residual into blocks, and selects each
   block's largest elements.
2. Their mean magnitude is the block's scale. The rank sends the scale, the positions, and one sign
   per position to the owner.
3. The rank subtracts the sent value, ``+scale`` or ``-scale``, from the residual. An element of
   larger magnitude will soon be selected again; for a smaller one the residual changes sign.
4. An owner adds the received values to its own row of gradient plus residual, which is not sent. It
   sends the sums in the same format to all ranks, or only to its own optimizer. The rest stays in
   its residual, so an element arrives seldom, when the sum of all peers is large. If each peer's
   selection were delivered directly, an element would arrive in many steps in small parts, and Adam
   would treat each part as the whole gradient.

A row's packet has the bits of all its blocks, part by part (Note [Positions] in
``config/sparse_config.py``), and then the scales. No length depends on the data, so no host
synchronization is needed.

Voids
    A block may have fewer non-zero elements than the number to select. The remaining entries repeat
    a position and its sign, and the receiver counts them as 0. They repeat the first element, or 0
    if the block has no element that is
    not zero: a position beyond the end of the row is never sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_topo.config.sparse_config import TERNARY_BLOCK as BLOCK
from zero_topo.config.sparse_config import TernarySync
from zero_topo.quant import ops
from zero_topo.quant.operands import counted
from zero_topo.sync.base import build_mode
from zero_topo.sync.selection import Selected, added
from zero_topo.sync.sparse import Exchange, Report, Run, Sparse, Started


class Ternary(Sparse):
    """Sends signs of the largest elements of every block with one scale, and uses error
    feedback.
    """

    config: TernarySync

    @property
    def now(self) -> TernarySync:
        """The settings with this step's density."""
        if not self.config.warmup:
            return self.config
        return self.config.model_copy(update={"density": self.density})

    def exchange(self, total: Tensor, run: Run) -> Started:
        """Send signs to the owners of their rows, who add them to their own row and send the sums
        as signs again.
        """
        size = self.peers.size
        own = self.peers.index
        width = run.width
        now = self.now
        mine, others = self._in_blocks(total.view(size, width))
        sent, count = self._encoded(others, now)
        del others
        # Nobody reads the own entry
        entries = torch.cat([sent[:own], sent[:1], sent[own:]])
        received = self.peers.begin("all_to_all", entries)
        # Of each block in a table of all rows.
        firsts = torch.arange(0, width, BLOCK, dtype=torch.int64, device=total.device)
        begins = counted(size, total)[:, None] * width + firsts
        report = Report(density=count.double() / (len(total) - width))

        def finish() -> Tensor:
            messages = self._others(received.wait())
            own_begins = begins[:1].expand(size - 1, -1)
            selected = self._decoded(messages, now, own_begins)
            mine[0, :width] += added(selected, lambda: mine.new_zeros(width))
            sums = self._spread(mine, begins, now)
            rows = size if self.everywhere else 1
            reduced = mine.new_zeros(rows * width)
            # Indices do not repeat, but for voids, whose value is 0: the order of sums does not
            # matter.
            reduced.index_add_(0, sums.indices, sums.values)
            # What of the sums was not delivered waits with the owner.
            place = own if self.everywhere else 0
            mine[0, :width] -= reduced.view(-1, width)[place]
            report["union"] = sums.values.count_nonzero().double() / len(reduced)
            return reduced

        def settle(again: Tensor) -> None:
            self._decoded(sent, now, self._others(begins)).subtract_from(again)
            again.view(size, width)[own] = mine[0, :width]

        return finish, Exchange(settle, report, settles_own_row=True)

    def _in_blocks(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the own row and the others, each a table padded to whole blocks.

        The own row is not sent: its owner adds to it, exactly.
        """
        own = self.peers.index
        width = rows.shape[1]
        padded = -(-width // BLOCK) * BLOCK
        mine = rows.new_empty(1, padded)
        others = rows.new_empty(len(rows) - 1, padded)
        # Written in place: a copy of all rows less at the peak.
        mine[:, :width] = rows[own]
        others[:own, :width] = rows[:own]
        others[own:, :width] = rows[own + 1 :]
        for table in (mine, others):
            table[:, width:].zero_()
        return mine, others

    def _others(self, table: Tensor) -> Tensor:
        """Return a copy of a table without the own row."""
        own = self.peers.index
        return torch.cat([table[:own], table[own + 1 :]])

    def _spread(self, sums: Tensor, begins: Tensor, now: TernarySync) -> Selected:
        """Send the sums to the ranks that need them, in the same format, so that the wire has a
        third of a bit there too; return what arrives, of all rows or of the own one.
        """
        sent, _ = self._encoded(sums, now)
        if self.everywhere:
            sent = self.peers.gather(sent[0])
        return self._decoded(sent, now, begins[: len(sent)])

    def _encoded(self, rows: Tensor, now: TernarySync) -> tuple[Tensor, Tensor]:
        """Return packets of the largest elements of each block of some rows, uint8
        ``[rows, bytes]``, and how many were sent.
        """
        blocks = rows.view(-1, BLOCK)
        indices = ops.row_largest(blocks, now.selections)
        return ops.ternary_encode(blocks, len(rows), indices, now.low_bits, self.dtype)

    def _decoded(self, packets: Tensor, now: TernarySync, begins: Tensor) -> Selected:
        """Decode packets; ``begins``, int64 ``[packets, blocks]``, says where in a table each block
        begins.
        """
        form = BLOCK, now.selections, now.low_bits, self.dtype
        return Selected(*ops.ternary_decode(packets, begins, *form))


build_mode.register(TernarySync, Ternary)
