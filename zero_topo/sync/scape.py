# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""SCAPE: sparse momentum by masks that are chosen a step ahead (Zheng et al., "SCAPE", arXiv
2607.01678).

With ``m`` the momentum that AdamS keeps, ``b`` its decay rate, ``g`` this peer's part of the mean
gradient, ``e`` its residual and ``P`` peers, at each step:

1. ``a = g + e``. The peers sum ``a`` on the mask selected at the last step; the first mask contains
   all elements.
2. AdamS gets that sum as its gradient on the mask, and zero off it. The norm by which DeepSpeed
   clips gradients is therefore the masked one, and AdamS updates the momentum with clipped
   gradients.
3. Off the mask ``e' = a``, on it zero. Before AdamS steps, the owner of a row moves
   ``b / (1 - b) * m`` off the mask from AdamS to ``r``: AdamS moves nothing there, and weights only
   decay. When the element is in a mask again, the owner adds ``r`` to its sum.
4. The owner selects the ``k = d * C`` elements of its row with the largest
   ``|a + (r + b / (1 - b) * m) / P|``, or as large a share of each parameter. The bits are sent
   while the next forward and backward passes compute, and are the next mask.

Units of the gradient
    The paper keeps ``e`` in units of the momentum, ``(1 - b)`` times ours, and sends
    ``mt = b m + (1 - b) g + e``. But ``m`` is equal on all peers, so it need not be sent: on the
    mask the sum of ``mt`` minus ``b m``, over ``1 - b``, is the sum of ``a``. There is no
    cancellation, and at density 1 AdamS gets the bits of the dense gradient.

Where the momentum lives
    In the paper every peer adds ``b m`` to its residual off the mask. Their mean is the same, but
    then every peer needs ``m``. Here the owner of a row keeps all of it, so the optimizer may be
    sharded over the world (the paper's algorithm 2). In place of the selected weights in 16 bits,
    the post-step all-gather sends the changes of all INT8 weights, 0.6 bits each at a learning rate
    of 1e-4. That is lossless, so ranks need no FP32 replica of the weights to apply decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.config.sparse_config import ScapeSync, share
from zero_topo.quant import ops
from zero_topo.quant.operands import Range, merged, packed_ranges
from zero_topo.sync.base import Moment, SyncContext, build_mode
from zero_topo.sync.masked import Masked, masked_of_rows, unpacked
from zero_topo.sync.optimizers import AdamS
from zero_topo.sync.selection import largest, largest_of_each
from zero_topo.sync.sparse import Exchange, Run, Started


@dataclass(frozen=True)
class ScapeState:
    """The state of SCAPE.

    Attributes:
        bits: the mask of the next step, uint8 ``[N / G, ceil(C / 8)]``, equal on all ranks with
            this gradient shard.
        kept: by run, the masked elements in each row.
        momentum: ``r``, the own row's momentum that waits for a mask, FP32 ``[C]``; `before_update`
            adds to it.
        sent: the own row of `bits` and the handle of its gather, which began on the computation's
            stream. The queue's stream waits for the gather, and the computation's for the queue in
            the next sync. Freed before, their memory would be taken again while it is sent.
    """

    bits: Handle[Tensor]
    kept: tuple[int, ...]
    momentum: Tensor
    sent: tuple[object, ...] = ()


class Scape(Masked):
    """Reduces the elements of masks that the peers select one step ahead, each for its own rows."""

    config: ScapeSync

    def __init__(self, config: ScapeSync, context: SyncContext) -> None:
        groups = context.across(context.plan.gradients).groups
        # The group inside the node, if gradient domains are smaller: the shard's mask has the rows
        # of all its ranks.
        self._inside = groups[0] if len(groups) > 1 else None
        # Rows of an optimizer shard are every such row of the gradient shard.
        self._stride = context.plan.optimizer // context.plan.gradients
        super().__init__(config, context)
        # By run, this rank's own row of the next mask, bool ``[m]``, and its elements; until
        # `decided` sends it, or the next step replaces it.
        self._chosen: dict[int, tuple[Tensor, int]] = {}

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError for any optimizer but AdamS."""
        if not isinstance(optimizer, AdamS):
            raise ValueError(
                f'sync.mode = "scape" with optimizer {type(optimizer).__name__}: it rebuilds the '
                "momentum of AdamS; "
                'set "optimizer": {"type": "AdamS"}, or pass zero_topo.AdamS'
            )

    def exchange(self, total: Tensor, run: Run) -> Started:
        """Select the own row of the next mask, and begin to reduce the elements of this one."""
        own = self.peers.index
        state = self._state
        row = total.view(self.peers.size, -1)[own]
        momentum = self._momentum(run)
        chosen, count = self._choose(self._score(row, momentum, run), run)
        self._chosen[run.number] = chosen, count
        on_mask = partial(self._own_row, run.low, run.past)
        overlap = chosen.logical_and(on_mask()).sum() / count  # of the next mask with this one
        row += momentum
        bits = state.bits.wait()

        def mask() -> Tensor:
            return self.rows(unpacked(bits, run.low, run.past))

        finish, exchange = self.reduce_masked(total, run, mask, state.kept[run.number])
        settle_masked = exchange.settle

        def settle(again: Tensor) -> None:
            rows = again.view(self.peers.size, -1)
            rows[own] += torch.where(on_mask(), self._momentum(run), 0.0)
            settle_masked(again)

        exchange.settle = settle
        exchange.report["overlap"] = overlap
        return finish, exchange

    def _score(self, row: Tensor, momentum: Tensor, run: Run) -> Tensor:
        """Return by what the next mask is selected, FP32 ``[m]``: the momentum that the own row
        would have.
        """
        score = row.add(momentum, alpha=1 / self.peers.size)
        for moment in self.context.moments():
            mean = moment.mean[self.context.own_row // self._stride]
            factor = self._factor(moment) / self.peers.size
            for columns, places in self._within(moment.begin, len(mean), run):
                score[places] += mean[columns].to(score) * factor
        return score

    def _own_row(self, begin: int, end: int) -> Tensor:
        """Return some columns of the own row of this step's mask, bool ``[end - begin]``."""
        own = self.context.own_row
        return unpacked(self._state.bits.wait()[own : own + 1], begin, end)[0]

    def _momentum(self, run: Run) -> Tensor:
        """Return the part of ``r`` of a run; zeros if this step has sent it before the run was
        reopened.
        """
        momentum = self._state.momentum[run.low : run.past]
        if run.number in self._reopened:
            return torch.zeros_like(momentum)
        return momentum

    def _choose(self, score: Tensor, run: Run) -> tuple[Tensor, int]:
        """Select a run's part of the own row of the next mask, bool ``[m]``; also return its number
        of elements.
        """
        density = self.config.density_at(self.steps + 1)
        if self.config.select == "parameter":
            parts, count = self.shares(density, 1, run)
            return largest_of_each(score, *parts), count
        chosen = largest(score, share(density, run.width)).indices
        mask = torch.zeros_like(score, dtype=torch.bool)
        return mask.index_fill_(0, chosen, True), len(chosen)

    def _factor(self, moment: Moment) -> float:
        """Return ``b / (1 - b)``, by which the momentum is multiplied in units of the gradient."""
        return moment.beta / (1 - moment.beta)

    def _within(self, begin: int, width: int, run: Run) -> list[tuple[slice, slice]]:
        """Return the columns of a run's parameters that take part, relative to ``begin`` and in the
        run.

        Neighbouring parameters are merged.
        """
        found = []
        before = sum(past - first for first, past in run.ranges if first < begin)
        columns = merged(x for x in run.ranges if begin <= x[0] < begin + width)
        for (first, past), (low, high) in zip(columns, packed_ranges(columns), strict=True):
            within = slice(first - begin, past - begin)
            found.append((within, slice(before + low, before + high)))
        return found

    def before_update(self, begin: int, width: int) -> None:
        """Move the momentum off the mask out of AdamS, run by run."""
        own, first = divmod(self.context.own_row, self._stride)
        for run in self.runs.values() if self._exchanges else ():
            within = self._within(begin, width, run)
            if not within:
                continue
            rows = self._state.bits.wait()[first :: self._stride]
            mask = unpacked(rows, run.low, run.past)
            waiting = self._state.momentum[run.low : run.past]
            for moment in self.context.moments():
                for columns, places in within if moment.begin == begin else ():
                    mean = moment.mean[:, columns]
                    on_mask = mask[:, places].to(mean.device)
                    if self.residual.numel():
                        off_mask = mean[own].masked_fill(on_mask[own], 0) * self._factor(moment)
                        waiting[places] += off_mask.to(mask.device)
                    mean.masked_fill_(on_mask.logical_not(), 0)

    def start(self, shard: Tensor, ranges: Sequence[Range], scale: float) -> Handle[None]:
        """Exchange the elements of the mask that the last step selected."""
        # Collective inside a node: all ranks call it here, before they send anything else
        self.drain()
        return super().start(shard, ranges, scale)

    def drain(self) -> None:
        """Wait for the mask that is being sent; collective inside a node."""
        self._state.bits.wait()

    def decided(self, exchanges: Sequence[Exchange]) -> ScapeState:
        """Begin to gather the next mask, and clear the momentum that was sent."""
        if self.since_start < 0:
            return super().decided(exchanges)
        momentum = self._state.momentum.masked_fill_(self._own_row(0, self._columns), 0)
        empty = momentum.new_zeros(0, dtype=torch.bool), 0
        parts = [self._chosen.get(run.number, empty) for run in self.runs.values()]
        self._chosen = {}
        chosen = ops.pack(torch.cat([mask for mask, _ in parts]))
        across = self.peers.begin("all_gather", chosen)
        bits = Handle().then(lambda _: self._whole(across.wait()))
        kept = tuple(count for _, count in parts)
        return ScapeState(bits, kept, momentum, sent=(chosen, across))

    def _whole(self, bits: Tensor) -> Tensor:
        """Gather the rows of all tables inside the node to the rows of the gradient shard;
        collective there.
        """
        if self._inside is None:
            return bits
        rows = self._inside.gather(bits).transpose(0, 1)
        return rows.reshape(-1, bits.shape[1])

    # -- state -------------------------------------------------------------------------------------

    def fresh(self) -> ScapeState:
        """Return a state whose mask contains all elements, without momentum."""
        rows = self.peers.size
        if self._inside is not None:
            rows *= self._inside.size
        ones = torch.ones(self._columns, dtype=torch.bool, device=self.context.device)
        bits = ops.pack(ones).expand(rows, -1).contiguous()
        momentum = torch.zeros(self._columns, dtype=torch.float32, device=self.context.device)
        kept = tuple(run.width for run in self.runs.values())
        return ScapeState(Handle(bits), kept, momentum)

    def state_bytes(self) -> int:
        """Return the bytes of residual and momentum, the current mask and the next one, and their
        own rows as sent.
        """
        if not self.active:
            return 0
        rows = len(self.context.plan.rows(0, self.context.plan.gradients))
        masks = 2 * (rows + 1) * -(-self._columns // 8)
        return super().state_bytes() + self._state.momentum.nbytes + masks

    def save(self, state: ScapeState) -> dict[str, Tensor]:
        """Wait for the current mask; return it with the momentum."""
        return {"mask": state.bits.wait(), "momentum": state.momentum}

    def restored(self, saved: Mapping[str, Tensor]) -> ScapeState:
        """Read mask and momentum from a checkpoint."""
        bits = saved["mask"].to(self.context.device, torch.uint8, copy=True)
        kept = masked_of_rows(bits, ((run.low, run.past) for run in self.runs.values()))
        momentum = saved["momentum"].to(self.context.device, copy=True)
        return ScapeState(Handle(bits), kept, momentum)


build_mode.register(ScapeSync, Scape)
