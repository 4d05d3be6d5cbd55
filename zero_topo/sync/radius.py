# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Radius: a mask shared by all ranks and kept for an interval of steps (Zheng & Zhang, "Radius",
MLSys 2025).

1. The first ``start`` steps reduce all elements.
2. A step that resamples, one in ``interval``, also reduces all elements, including the residual.
   The elements that the optimizer's update changes most, in each parameter, are the new mask.
3. The steps between reduce the masked elements, packed and without indices. The rest is added to
   the residual.

The update as the score
    The paper scores an element by its corrected gradient, the direction of AdamW's step at learning
    rate 1. This is the difference of a master before and after the step, divided by the learning
    rate; a common factor does not change the order of magnitudes. The optimizer therefore runs
    once, and may be any. At a rate of zero (a warm-up may begin with it) there is no score: such a
    resampling keeps the mask, and if there is none yet, the next step resamples.

One chooser
    The owner of a row selects ``max(1, int(density * width))`` elements in each parameter's slice
    of that row, and sends them to its peers as a bitmap. Ranks with replicas of an optimizer shard
    compute the same updates, but ties may break differently on other devices, so no rank selects
    for a row of another. A parameter's slices are equally wide in all rows, so all rows of the mask
    have equally many elements, and no lengths are sent either.

In FP32 a step that resamples leaves a residual of zero; otherwise see Note [Rounding] in
``sparse.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zero_topo.config.sparse_config import RadiusSync
from zero_topo.quant import ops
from zero_topo.sync.base import SyncContext, build_mode
from zero_topo.sync.masked import Masked, masked_of_rows, unpacked
from zero_topo.sync.sparse import Run, Started


@dataclass(frozen=True)
class RadiusState:
    """The state of Radius, equal on all peers.

    Attributes:
        kept: by parameter that takes part, the masked elements in each row; empty if there is no
            mask.
        bits: the mask, each row packed separately, uint8 ``[P, ceil(C / 8)]``.
    """

    kept: tuple[int, ...]
    bits: Tensor


@dataclass
class _Choice:
    """This rank's selection in its own row, filled parameter by parameter as they are updated.

    Attributes:
        mask: bool ``[C]``.
        kept: by parameter, the number of masked elements; 0 before its selection.
        moved: whether any of the learning rates was not zero.
    """

    mask: Tensor
    kept: list[int]
    moved: bool


class Radius(Masked):
    """Reduces the elements of one mask shared by all ranks, and all elements in steps that select a
    new mask.
    """

    config: RadiusSync

    def __init__(self, config: RadiusSync, context: SyncContext) -> None:
        super().__init__(config, context)
        # Set from the first `after_update` of a step that resamples until its `commit`, which sends
        # it to the peers: the optimizer may update parameter by parameter, and a skipped step drops
        # it.
        self._choice: _Choice | None = None

    def exchange(self, total: Tensor, run: Run) -> Started:
        """Begin to reduce the masked elements, or all elements in a step that resamples."""
        state: RadiusState = self._state
        resamples = self._resamples(state)
        if resamples:
            finish, exchange = self._exchange_all(total, run)
        else:
            kept = sum(state.kept[run.first : run.first + len(run.ranges)])
            mask = partial(unpacked, state.bits, run.low, run.past)
            finish, exchange = self.reduce_masked(total, run, mask, kept)
        exchange.report["resampled"] = float(resamples)
        return finish, exchange

    def _resamples(self, state: RadiusState) -> bool:
        """Return whether the step reduces all elements and selects a new mask."""
        return self.since_start >= 0 and (
            not state.kept or self.since_start % self.config.interval == 0
        )

    def mask(self, state: RadiusState) -> Tensor:
        """Return the mask, bool ``[P, C]``."""
        return unpacked(state.bits, 0, self._columns)

    # -- the choice --------------------------------------------------------------------------------

    @property
    def wants_updates(self) -> bool:
        """Whether this step resamples."""
        return bool(self._exchanges) and self._resamples(self._state)

    def after_update(self, begin: int, old: Tensor, new: Tensor, rate: float) -> None:
        """Select the elements of the own row that the update changed most; a learning rate of zero
        keeps the mask.
        """
        if self._choice is None:
            kept = list(self._state.kept) or [0] * len(self._included)
            self._choice = _Choice(self.mask(self._state)[self.peers.index], kept, False)
        # The update says nothing about the gradients.
        if rate == 0 and self._state.kept:
            return
        self._choice.moved |= rate != 0
        score = (new - old).abs().to(self.context.device)
        for index, (low, high) in enumerate(self._places):
            first, past = self._included[index].shard_range
            if begin <= first < begin + score.numel():
                count = max(1, int(self.density * (past - first)))
                own = score[first - begin : past - begin]
                largest = torch.topk(own, count, sorted=False).indices
                self._choice.mask[low:high].zero_().index_fill_(0, largest, True)
                self._choice.kept[index] = count

    def commit(self, skipped: bool) -> None:
        """Apply the step; after one that resamples, gather the owners' selections (collective)."""
        choice = self._choice
        self._choice = None
        super().commit(skipped)
        if skipped or choice is None or not choice.moved:
            return
        # Only after a step that was not skipped: the mask becomes that of all peers.
        old = self.mask(self._state)[self.peers.index]
        for _, report in self._reports:  # of the new mask with the old one
            report["overlap"] = old.logical_and(choice.mask).sum() / sum(choice.kept)
        bits = self.peers.gather(ops.pack(choice.mask))
        self._state = RadiusState(tuple(choice.kept), bits)

    # -- state -------------------------------------------------------------------------------------

    def fresh(self) -> RadiusState:
        """Return a state without a mask."""
        bits = torch.zeros(
            self.peers.size, -(-self._columns // 8), dtype=torch.uint8, device=self.context.device
        )
        return RadiusState((), bits)

    def state_bytes(self) -> int:
        """Return the bytes of the residual and the mask."""
        if not self.active:
            return 0
        return super().state_bytes() + self._state.bits.nbytes

    def save(self, state: RadiusState) -> dict[str, Tensor]:
        """Convert the mask to tensors."""
        return {
            "chosen": torch.tensor(bool(state.kept), dtype=torch.bool, device="cpu"),
            "mask": state.bits,
        }

    def restored(self, saved: Mapping[str, Tensor]) -> RadiusState:
        """Read the mask from a checkpoint."""
        bits = saved["mask"].to(self.context.device, torch.uint8, copy=True)
        if not saved["chosen"]:
            return RadiusState((), bits)
        return RadiusState(masked_of_rows(bits, self._places), bits)


build_mode.register(RadiusSync, Radius)
