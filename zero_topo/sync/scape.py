# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""SCAPE: sparse momentum by masks that are chosen a step ahead (Zheng et al., "SCAPE", arXiv 2607.01678).

With ``m`` the momentum that AdamS keeps, ``b`` its decay rate, ``g`` this peer's part of the mean gradient, ``e`` its
residual and ``P`` peers, at each step:

1. ``a = g + e``. The peers sum ``a`` on the mask selected at the last step; the first mask contains all elements.
2. AdamS gets that sum as its gradient on the mask, and zero off it. The norm by which DeepSpeed clips gradients is
   therefore the masked one, and AdamS updates the momentum with clipped gradients.
3. Off the mask ``e' = a + b / (1 - b) * m / P``, on it zero. Before AdamS steps, its momentum is zeroed off the mask:
   AdamS moves nothing there, and weights only decay.
4. The owner of a row selects the ``k = d * C`` elements of that row with the largest ``|e'|``, computed without a mask,
   or as large a share of each parameter. The bits are sent while the next forward and backward passes compute, and are
   the next mask.

Note [Units of the gradient]
    The paper keeps ``e`` in units of the momentum, ``(1 - b)`` times ours, and sends ``mt = b m + (1 - b) g + e``. But
    ``m`` is equal on all peers, so it need not be sent: on the mask the sum of ``mt`` minus ``b m``, over ``1 - b``, is
    the sum of ``a``. There is no cancellation, and at density 1 AdamS gets the bits of the dense gradient.

Note [Where the momentum lives]
    The momentum is stored in the optimizer only. The mode reads it before each sync, and zeroes it off the mask when
    the step is known not to be skipped. This needs the momentum of the whole gradient shard, so the optimizer shard
    must equal the gradient shard (``"optimizer": "node"``). Then weights stay equal on all nodes without crossing them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.config.sparse_config import ScapeSync
from zero_topo.quant import ops
from zero_topo.quant.operands import Range
from zero_topo.sync.base import Moment, SyncContext, build_mode
from zero_topo.sync.optimizers import AdamS
from zero_topo.sync.picks import largest, largest_of_each, share
from zero_topo.sync.sparse import Masked, Report


@dataclass(frozen=True)
class ScapeState:
    """The state of SCAPE.

    Attributes:
        bits: the mask of the next step, uint8 ``[N / G, ceil(C / 8)]``, equal on all ranks with this gradient shard.
        kept: masked elements in each row; in a state before ``commit``, those of ``chosen``.
        chosen: this rank's own row of the following mask, to be sent to the others; None once it is being sent.
    """

    bits: Handle[Tensor]
    kept: int
    chosen: Tensor | None


class Scape(Masked):
    """Reduces the elements of masks that the peers select one step ahead, each for its own rows."""

    config: ScapeSync

    def __init__(self, config: ScapeSync, context: SyncContext) -> None:
        hops = context.across(context.plan.gradients).hops
        # The group inside the node, if gradient domains are smaller: the shard's mask has the rows of all its ranks.
        self._inside = hops[0].metered(context.counted) if len(hops) > 1 else None
        super().__init__(config, context)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError for any optimizer but AdamS."""
        if not isinstance(optimizer, AdamS):
            raise ValueError(
                f'sync.mode = "scape" with optimizer {type(optimizer).__name__}: it rebuilds the momentum of AdamS; '
                'set "optimizer": {"type": "AdamS"}, or pass zero_topo.AdamS'
            )

    def exchange(self, total: Tensor, state: ScapeState) -> tuple[Tensor, ScapeState, Report]:
        """Reduce the masked elements, add the momentum off the mask to the residual, and select the next mask."""
        own, table = self.peers.index, total.view(self.peers.size, -1)
        mask = self._of_table(self.mask(state))
        momentum = self._momentum(self.context.moments())
        chosen, count = self._chosen(table[own] + momentum[own])
        reduced = self.reduce_masked(total, mask, state.kept)
        table += momentum.masked_fill_(mask, 0)
        report = {"density_asked": self.density, "density": state.kept / self._columns}
        return reduced, ScapeState(state.bits, count, ops.pack(chosen)), report

    def _chosen(self, score: Tensor) -> tuple[Tensor, int]:
        """Select the own row of the next mask, bool ``[C]``; also return its number of elements."""
        density = self.config.density_at(self.steps + 1)
        if self.config.per_parameter:
            parts, count = self.shares(density, 1)
            return largest_of_each(score, *parts), count
        count = share(density, self._columns)
        chosen = largest(score, count).indices
        return torch.zeros_like(score, dtype=torch.bool).index_fill_(0, chosen, True), count

    def _momentum(self, moments: Sequence[Moment]) -> Tensor:
        """Return ``b / (1 - b) * m / P`` of the table, FP32 ``[P, C]``; zero before the optimizer's first step."""
        kept = torch.zeros(self.peers.size, self._columns, device=self.context.device)
        for moment in moments:
            rows = self.rows(moment.mean)
            factor = moment.beta / (1 - moment.beta) / self.peers.size
            for columns, places in self._within(moment.begin, moment.mean.shape[1]):
                kept[:, places] = rows[:, columns].to(kept) * factor
        return kept

    def _within(self, begin: int, width: int) -> list[tuple[slice, slice]]:
        """Return the columns of the parameters that take part, relative to ``begin`` and in the table.

        Neighbouring parameters are merged.
        """
        parts: list[tuple[slice, slice]] = []
        for (first, past), (low, high) in zip(self._ranges, self._places, strict=True):
            if begin <= first < begin + width:
                if parts and parts[-1][0].stop == first - begin:
                    columns, places = parts.pop()
                    first, low = begin + columns.start, places.start
                parts.append((slice(first - begin, past - begin), slice(low, high)))
        return parts

    def _of_table(self, rows: Tensor) -> Tensor:
        """Return the rows of a gradient shard that the table has."""
        return rows if self._inside is None else rows[self._inside.index :: self._inside.size]

    def mask(self, state: ScapeState) -> Tensor:
        """Wait for the mask of the next step, and return it, bool ``[N / G, C]``; collective inside a node."""
        return self.unpacked(state.bits.wait())

    def before_update(self, begin: int, width: int) -> None:
        """Zero the momentum off the mask, where it was added to the residuals."""
        if self._undecided is None:
            return
        within = self._within(begin, width)
        if not within:
            return
        low, high = within[0][1].start, within[-1][1].stop
        mask = self.unpacked(self._state.bits.wait(), low, high)
        for moment in self.context.moments():
            if moment.begin == begin:
                for columns, places in within:
                    moment.mean[:, columns] *= mask[:, places.start - low : places.stop - low].to(moment.mean)

    def start(self, shard: Tensor, ranges: Sequence[Range], scale: float) -> Handle[None]:
        """Exchange the elements of the mask that the last step selected."""
        self.drain()  # collective inside a node: all ranks call it here, before they send anything else
        return super().start(shard, ranges, scale)

    def drain(self) -> None:
        """Wait for the mask that is being sent; collective inside a node."""
        self._state.bits.wait()

    def commit(self, skipped: bool) -> None:
        """Apply the step; unless it was skipped, begin to gather the next mask."""
        super().commit(skipped)
        chosen = self._state.chosen
        if chosen is None:
            return
        across = self.peers.gather_later(chosen)
        bits = Handle(None, (chosen,), lambda: self._whole(across.wait()))
        self._state = ScapeState(bits, self._state.kept, None)

    def _whole(self, bits: Tensor) -> Tensor:
        """Gather the rows of all tables inside the node to the rows of the gradient shard; collective there."""
        if self._inside is None:
            return bits
        return self._inside.gather(bits).transpose(0, 1).reshape(-1, bits.shape[1])

    # -- state -----------------------------------------------------------------------------------------------------

    def fresh(self) -> ScapeState:
        """Return a state whose mask contains all elements."""
        rows = self.peers.size * (1 if self._inside is None else self._inside.size)
        ones = torch.ones(self._columns, dtype=torch.bool, device=self.context.device)
        bits = ops.pack(ones).expand(rows, -1).contiguous()
        return ScapeState(Handle(None, (), lambda: bits), self._columns, None)

    def state_bytes(self) -> int:
        """Return the bytes of the residual, the current mask and the next one."""
        masks = 2 * len(self.context.plan.rows(0, self.context.plan.gradients)) * -(-self._columns // 8)
        return super().state_bytes() + masks if self.active else 0

    def save(self, state: ScapeState) -> dict[str, Tensor]:
        """Wait for the current mask and return it."""
        return {"mask": state.bits.wait()}

    def restored(self, saved: Mapping[str, Tensor]) -> ScapeState:
        """Read the mask from a checkpoint."""
        bits = saved["mask"].to(self.context.device, torch.uint8, copy=True)
        kept = int(self.unpacked(bits[:1]).sum())
        return ScapeState(Handle(None, (), lambda: bits), kept, None)


build_mode.register(ScapeSync, Scape)
