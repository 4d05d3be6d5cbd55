# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Radius: a mask that all ranks share, held for an interval (Zheng & Zhang, "Radius", MLSys 2025).

1. In the first ``start`` steps everything is reduced.
2. A step that resamples, one in ``interval``, reduces everything too, what was held back since the last one included.
   Of the update that the optimizer makes of it, each parameter's largest elements are the new mask.
3. The steps between reduce what the mask holds, packed. No indices travel. The rest is added to the residual.

Note [The update as the score]
    The paper scores an element by its corrected gradient, the direction of AdamW's step at learning rate 1. That is
    the difference of a master before and after the step, divided by the learning rate, and the order of magnitudes
    does not depend on a factor. So the optimizer runs once, and need not be known. A rate of zero tells nothing (a
    warm-up may begin with it): such a resampling keeps the mask, and if there is none yet, the next step resamples.

Note [One chooser]
    The owner of a row chooses in each parameter's slice of that row, ``max(1, int(density * width))`` elements, and its
    peers get the choice as bits. Ranks that hold replicas of an optimizer shard see the same updates, but ties may
    break differently on other devices, so none chooses for a row that is not its own. As slices of a parameter are
    equally wide in all rows, all rows of the mask hold equally many elements, and no lengths travel either.

In FP32 a step that resamples leaves a residual of zero; else see Note [Rounding] in ``sparse.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zero_topo.config import RadiusSync
from zero_topo.quant import ops
from zero_topo.sync.base import SyncContext, build_mode
from zero_topo.sync.sparse import Masked, Report


@dataclass(frozen=True)
class RadiusState:
    """What Radius remembers, alike on all peers.

    Attributes:
        kept: elements that the mask holds in each row, of each parameter that takes part; none if there is no mask.
        bits: uint8 ``[P, ceil(C / 8)]``, the mask, each row packed by itself.
    """

    kept: tuple[int, ...]
    bits: Tensor


@dataclass
class _Choice:
    """What this rank chooses in its own row, parameter by parameter as they are updated.

    Attributes:
        mask: bool ``[C]``.
        kept: how many elements of each parameter it holds; 0 of one that has not been chosen yet.
        moved: whether any of the learning rates was not zero.
    """

    mask: Tensor
    kept: list[int]
    moved: bool


class Radius(Masked):
    """Reduces what one mask of all ranks holds, and everything where the mask is chosen anew."""

    config: RadiusSync

    def __init__(self, config: RadiusSync, context: SyncContext) -> None:
        super().__init__(config, context)
        # From the first `after_update` of a step that resamples until its `commit`, which sends it to the peers: the
        # optimizer may update parameter by parameter, and a skipped step drops it.
        self._choice: _Choice | None = None

    def exchange(self, total: Tensor, state: RadiusState) -> tuple[Tensor, RadiusState, Report]:
        """Reduce what the mask holds, or everything in a step that resamples."""
        if self._resamples(state):
            reduced = self.reduce_rows(total.view(self.peers.size, -1))
            return reduced, state, self._numbers(self.numel, resampled=True)
        kept = sum(state.kept)
        reduced = self.reduce_masked(total, self.mask(state), kept)
        return reduced, state, self._numbers(self.peers.size * kept, resampled=False)

    def _resamples(self, state: RadiusState) -> bool:
        """Whether the step reduces everything and chooses a mask."""
        return self.since_start >= 0 and (not state.kept or self.since_start % self.config.interval == 0)

    def _numbers(self, sent: int, resampled: bool) -> dict[str, float]:
        """The report: which share of the elements was reduced, and whether the step resampled."""
        return {"density_asked": self.density, "density": sent / self.numel, "resampled": float(resampled)}

    def mask(self, state: RadiusState) -> Tensor:
        """Bool ``[P, C]``."""
        return self.unpacked(state.bits)

    # -- the choice ------------------------------------------------------------------------------------------------

    @property
    def wants_updates(self) -> bool:
        """Of a step that resamples."""
        return self._undecided is not None and self._resamples(self._state)

    def after_update(self, begin: int, old: Tensor, new: Tensor, rate: float) -> None:
        """Choose the elements of the own row that the update moved most, if the learning rate moved any."""
        if self._choice is None:
            kept = list(self._state.kept) or [0] * len(self._ranges)
            self._choice = _Choice(self.mask(self._state)[self.peers.index], kept, False)
        if rate == 0 and self._state.kept:
            return
        self._choice.moved |= rate != 0
        score = (new - old).abs().to(self.context.device)
        for index, ((first, past), (low, high)) in enumerate(zip(self._ranges, self._places, strict=True)):
            if begin <= first < begin + score.numel():
                count = max(1, int(self.density * (past - first)))
                largest = torch.topk(score[first - begin : past - begin], count, sorted=False).indices
                self._choice.mask[low:high].zero_().index_fill_(0, largest, True)
                self._choice.kept[index] = count

    def commit(self, skipped: bool) -> None:
        """Take over the step; after one that resamples it is collective, and sends the peers the choice."""
        choice, self._choice = self._choice, None
        super().commit(skipped)
        if skipped or choice is None or not choice.moved:
            return
        self._state = replace(self._state, kept=tuple(choice.kept), bits=self.peers.gather(ops.pack(choice.mask)))

    # -- state -----------------------------------------------------------------------------------------------------

    def fresh(self) -> RadiusState:
        """No mask."""
        bits = torch.zeros(self.peers.size, -(-self._columns // 8), dtype=torch.uint8, device=self.context.device)
        return RadiusState((), bits)

    def state_bytes(self) -> int:
        """Bytes of the residual and the mask."""
        return super().state_bytes() + self.peers.size * -(-self._columns // 8) if self.active else 0

    def save(self, state: RadiusState) -> dict[str, Tensor]:
        """The mask, if one is chosen."""
        return {"chosen": torch.tensor(bool(state.kept)), "mask": state.bits}

    def restored(self, saved: Mapping[str, Tensor]) -> RadiusState:
        """The mask from a checkpoint."""
        bits = saved["mask"].to(self.context.device, torch.uint8, copy=True)
        own = self.unpacked(bits[:1])[0]
        kept = tuple(int(own[low:high].sum()) for low, high in self._places) if saved["chosen"] else ()
        return RadiusState(kept, bits)


build_mode.register(RadiusSync, Radius)
