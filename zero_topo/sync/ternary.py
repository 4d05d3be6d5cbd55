# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ternary sync: the largest elements of each block, as signs with one scale, a third of a bit per element.

1. A rank divides the other owners' rows of its gradient plus residual into blocks, and selects each block's largest
   elements.
2. Their mean magnitude is the block's scale. The rank sends the scale, the positions, and one sign per position to the
   owner.
3. The rank subtracts the sent value, ``+scale`` or ``-scale``, from the residual. An element of larger magnitude will
   soon be selected again; for a smaller one the residual changes sign.
4. An owner adds the received values to its own row of gradient plus residual, which is not sent. It sends the sums in
   the same format to all ranks, or only to its own optimizer. The rest stays in its residual, so an element arrives
   seldom, when the sum of all peers is large. If each peer's selection were delivered directly, an element would arrive
   in many steps in small parts, and Adam would treat each part as the whole gradient.

A row's packet has the bits of all its blocks, part by part (Note [Positions] in ``config/sparse_config.py``), and then
the scales. No length depends on the data, so no host synchronization is needed.

Note [Voids]
    A block may have fewer non-zero elements than the number to select. The remaining entries repeat a position and its
    sign, and the receiver counts them as 0. They repeat the first element, or 0 if the block has no element that is
    not zero: a position beyond the end of the row is never sent.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from zero_topo.config.sparse_config import TERNARY_BLOCK as BLOCK
from zero_topo.config.sparse_config import TernarySync
from zero_topo.quant import ops
from zero_topo.sync.base import build_mode
from zero_topo.sync.picks import Picked, added
from zero_topo.sync.sparse import Exchange, Finish, Report, Run, Sparse


class Ternary(Sparse):
    """Sends signs of the largest elements of every block with one scale, and uses error feedback."""

    config: TernarySync

    @property
    def now(self) -> TernarySync:
        """The settings with this step's density."""
        return self.config.model_copy(update={"density": self.density}) if self.config.warmup else self.config

    def exchange(self, total: Tensor, run: Run) -> tuple[Finish, Exchange]:
        """Send signs to the owners of their rows, who add them to their own row and send the sums as signs again."""
        size, own, width = self.peers.size, self.peers.index, run.width
        rows, blocks, now = total.view(size, width), -(-width // BLOCK), self.now
        mine, others = rows.new_empty(1, blocks * BLOCK), rows.new_empty(size - 1, blocks * BLOCK)
        mine[:, :width], others[:own, :width], others[own:, :width] = rows[own], rows[:own], rows[own + 1 :]
        for padded in (mine, others):
            padded[:, width:].zero_()
        begins = torch.arange(size, device=total.device)[:, None] * width
        begins = begins + torch.arange(0, width, BLOCK, device=total.device)  # of each block in a table of all rows
        sent, count = self._send_largest(others.view(-1, BLOCK), size - 1)
        received = self.peers.scatter_later(torch.cat([sent[:own], sent[:1], sent[own:]]))  # nobody reads the own entry
        report = Report(density=count.double() / (len(total) - width))

        def finish() -> Tensor:
            messages = received.wait()
            messages = torch.cat([messages[:own], messages[own + 1 :]])
            picked = self._decoded(messages, now, begins[:1].expand(size - 1, -1))
            mine[0, :width] += added(picked, lambda: mine.new_zeros(width))
            sums_sent, _ = self._send_largest(mine.view(-1, BLOCK), 1)
            gathered = self.peers.gather(sums_sent[0]) if self.everywhere else sums_sent
            sums = self._decoded(gathered, now, begins[: len(gathered)])
            reduced = mine.new_zeros(len(gathered) * width).index_add_(0, sums.indices, sums.values)
            report["union"] = reduced.count_nonzero().double() / len(reduced)
            return reduced

        def settle(again: Tensor) -> None:
            self._decoded(sent, now, torch.cat([begins[:own], begins[own + 1 :]])).subtract_from(again)
            again.view(size, width)[own] = mine[0, :width]

        return finish, Exchange(settle, report, settles_own_row=True)

    def _send_largest(self, blocks: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Encode the largest elements of blocks ``[rows * blocks of a row, 4096]``, and subtract the sent values.

        Return the packets, uint8 ``[rows, bytes]``, and the number of elements sent, int64 ``[]``.
        """
        index = ops.row_largest(blocks, self.now.picks)
        sizes = blocks.gather(1, index).abs_()
        count = sizes.count_nonzero(dim=1)[:, None]
        scale = (sizes.sum(dim=1, keepdim=True) / count.clamp(min=1)).to(self.dtype)
        void = sizes == 0
        first = index.masked_fill(void, BLOCK).amin(dim=1, keepdim=True) % BLOCK
        index = torch.where(void, first, index).cummax(dim=1).values  # a void repeats the position before it
        picked = blocks.gather(1, index)
        signs = picked < 0
        blocks.scatter_(1, index, picked - _signed(signs, scale))
        return self._encoded(index, signs, scale, rows), count.sum()

    def _encoded(self, index: Tensor, signs: Tensor, scale: Tensor, rows: int) -> Tensor:
        """Encode packets, uint8 ``[rows, bytes]``, from ascending positions in each block and scales in wire dtype."""
        config, device = self.now, index.device
        low = config.low_bits
        ones = (index >> low) + torch.arange(config.picks, device=device)
        high = torch.zeros(len(index), config.high_bits, dtype=torch.bool, device=device).scatter_(1, ones, 1)
        lows = (index.short()[..., None] >> torch.arange(low, dtype=torch.int16, device=device)) & 1
        flags = torch.cat([part.bool().view(rows, -1) for part in (high, lows, signs)], dim=1)
        bits = ops.pack(pad(flags, (0, -flags.shape[1] % 8)).view(-1))
        return torch.cat([bits.view(rows, -1), scale.view(rows, -1).view(torch.uint8)], dim=1)

    def _decoded(self, messages: Tensor, config: TernarySync, begins: Tensor) -> Picked:
        """Decode packets; ``begins``, int64 ``[packets, blocks]``, says where in a table each block begins.

        Voids are 0 (Note [Voids]), so a packet has each element once, and its values may be added.
        """
        (size, of_row), picks, device = begins.shape, config.picks, messages.device
        bits, scales = messages.tensor_split([-(-of_row * config.block_bits // 8)], dim=1)
        flags = ops.unpack(bits.contiguous().view(-1), 8 * bits.numel()).view(size, -1)
        parts = (config.high_bits, picks * config.low_bits, picks)
        padding = flags.shape[1] - of_row * config.block_bits
        high, lows, signs, _ = flags.split([*(of_row * part for part in parts), padding], dim=1)
        blocks = size * of_row
        ones = torch.nonzero_static(high.reshape(blocks, -1), size=blocks * picks)[:, 1].view(blocks, picks)
        places = torch.arange(config.low_bits, dtype=torch.int16, device=device)
        low = (lows.reshape(blocks, picks, -1).short() << places).sum(dim=2, dtype=torch.int16)
        index = ((ones - torch.arange(picks, device=device)) << config.low_bits) + low
        scale = scales.clone(memory_format=torch.contiguous_format).view(self.dtype).float().view(blocks, 1)
        values = _signed(signs.reshape(blocks, picks), scale)
        values[:, 1:].masked_fill_(index.diff(dim=1) == 0, 0)
        index += begins.reshape(blocks, 1)
        return Picked(index.view(-1), values.view(-1))


def _signed(signs: Tensor, scale: Tensor) -> Tensor:
    """Return ``-scale`` where a sign is set, else ``+scale``, FP32."""
    return torch.where(signs, -scale.float(), scale.float())


build_mode.register(TernarySync, Ternary)
