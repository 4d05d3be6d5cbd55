# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ok-Topk: the largest elements of the sum of every rank's largest, in O(k) words (Li & Hoefler, PPoPP 2022).

1. A rank picks the elements of its gradient plus residual that reach a local threshold.
2. The elements are cut into one region per rank, so that picks are spread evenly; each rank's picks go to the owners of
   their regions, who add them up.
3. Of the sums, those that reach a global threshold go to all ranks, after ranks with over four times the mean have
   passed their surplus on.
4. A rank's residual loses what it picked and all ranks chose.

Note [Thresholds]
    Exact ones cost a selection here, and a gather of all sums there, so they are found every ``tau_prime`` steps and
    reused between; in the first ``tau_prime`` steps, when gradients change fast, every step finds both. What is owed
    grows, so reuse picks more and more. Below 4/5 k picks a threshold is lowered by 2.5%. Above 5/4 k the local one is
    found anew, and of the sums each rank keeps its share of 5/4 k, the largest, while the global one is raised: by the
    fourth root of the excess, as if counts fell with its fourth power. That bounds the words sent by 5 k (P - 1) / P.

Note [Sharded]
    Where every rank owns one row of the optimizer and no more, sums may stay with their owners: regions are the rows,
    and nothing of step 3 travels but counts, and magnitudes when the threshold is found. A rank then does not know
    which of its picks were chosen: its residual loses all of them, and the owner keeps the sums it did not choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from zero_topo.collectives.mpi import MpiPeers
from zero_topo.collectives.peers import Peers
from zero_topo.config import OkTopkSync
from zero_topo.mesh import Hop
from zero_topo.quant.pieces import DTYPES
from zero_topo.sync.base import SyncContext, build_mode
from zero_topo.sync.picks import Picked, above, added, kth_largest, largest, non_zero, share
from zero_topo.sync.sparse import Outcome, Sparse

DRIFT = 1.025
CROWDED = 4


@dataclass(frozen=True)
class OkTopkState:
    """What Ok-Topk remembers; alike on all peers but for ``local``.

    Attributes:
        step: steps taken.
        local, world: thresholds.
        bounds: ``[P + 1]``, where regions begin, and ``n``.
    """

    step: int
    local: float
    world: float
    bounds: tuple[int, ...]


@dataclass(frozen=True)
class _Chosen:
    """The result of step 3.

    Attributes:
        reduced: FP32 ``[n]``.
        own: the chosen sums of this rank's region, as all ranks got them.
        indices: of all that was chosen, if this rank knows.
        count: how many.
        threshold: for the next step.
        exact: whether it was found in this step.
    """

    reduced: Tensor
    own: Picked
    indices: Tensor | None
    count: int
    threshold: float
    exact: bool


class OkTopk(Sparse[OkTopkState]):
    """The largest of the sums of everybody's largest, by thresholds and regions that are reused."""

    def __init__(self, config: OkTopkSync, context: SyncContext) -> None:
        self.config = config
        super().__init__(config, context)
        self.dtype = DTYPES[config.value_dtype]
        self.k = share(config.density, self.numel)

    def join(self, across: Hop) -> Peers:
        """The peers of the hop across, over the transport that the config names."""
        if self.config.transport == "mpi":
            return MpiPeers(across, self.context.counted)
        return super().join(across)

    def exchange(self, total: Tensor, state: OkTopkState) -> Outcome[OkTopkState]:
        """Reduce the picks at the owners of their regions, then choose among the sums."""
        exact = state.step < self.config.tau_prime or state.step % self.config.tau_prime == 0
        threshold, recomputed = self._local_threshold(total, state, exact)
        # Rounded as the messages round them, so that what is subtracted below is what the owners add up.
        picked = above(total, threshold, self.context.sparse).rounded(self.dtype)
        bounds = state.bounds
        if not self.config.sharded and state.step % self.config.tau == 0:
            bounds = self._balanced(picked)
        parts = [part.encode(self.dtype) for part in picked.cut(bounds)]
        messages = [Picked.decode(message, self.dtype) for message in self.peers.scatter_uneven(parts)]
        begin, end = bounds[self.peers.index], bounds[self.peers.index + 1]
        found = non_zero(added(messages, end - begin, total))
        sums = Picked(found.indices + begin, found.values)
        chosen = self._sharded(sums, state, exact) if self.config.sharded else self._choose(sums, state, exact)
        self._subtract_delivered(total, picked, sums, chosen)
        report = {
            "density_asked": self.config.density,
            "density": len(picked) / self.numel,
            "union": chosen.count / self.numel,
            "recomputed": float(recomputed) + float(chosen.exact),
        }
        local = threshold / DRIFT if 5 * len(picked) < 4 * self.k else threshold
        return Outcome(chosen.reduced, total, OkTopkState(state.step + 1, local, chosen.threshold, bounds), report)

    def _local_threshold(self, total: Tensor, state: OkTopkState, exact: bool) -> tuple[float, bool]:
        if not exact:
            count = int(self.context.sparse.count_above(total, state.local))
            exact = 4 * count > 5 * self.k
        return (kth_largest(total, self.k), True) if exact else (state.local, False)

    def _balanced(self, picked: Picked) -> tuple[int, ...]:
        """Regions that hold equal shares of this rank's picks, averaged over the ranks."""
        size = self.peers.size
        places = [len(picked) * p // size for p in range(1, size)]
        own = picked.indices[places] if len(picked) else torch.tensor([self.numel * p // size for p in range(1, size)])
        means = self.peers.gather(own.to(self.context.device)).sum(dim=0) // size
        return (0, *(int(bound) for bound in means.tolist()), self.numel)

    def _choose(self, sums: Picked, state: OkTopkState, exact: bool) -> _Chosen:
        """The largest sums, on all ranks."""
        if exact:
            gathered = self._all(sums)
            threshold = kth_largest(gathered.values, self.k)
            everything = gathered.where(gathered.values.abs() >= threshold)
        else:
            candidates, counts, threshold = self._reused(sums, state.world)
            everything = self._all(self._spread(candidates, counts))
        own = sums.rounded(self.dtype)
        own = own.where(torch.isin(own.indices, everything.indices, assume_unique=True))
        reduced = added([everything], self.numel, sums.values)
        return _Chosen(reduced, own, everything.indices, len(everything), threshold, exact)

    def _reused(self, sums: Picked, threshold: float) -> tuple[Picked, list[int], float]:
        """What reaches the old threshold, if need be cut to the cap; every rank's count; the threshold to use next."""
        found = sums.where(sums.values.abs() >= threshold)
        counts = [int(n) for n in self.peers.gather(torch.tensor([len(found)], device=sums.values.device))]
        total, most = sum(counts), max(5 * self.k // 4, 1)
        if total <= most:
            return found, counts, threshold / DRIFT if 5 * total < 4 * self.k else threshold
        counts = [most * count // total for count in counts]
        best = largest(found.values, counts[self.peers.index])
        return found.where(best.indices), counts, threshold * max(DRIFT, (total / self.k) ** 0.25)

    def _all(self, own: Picked) -> Picked:
        """What all ranks have, in ascending order of index: regions follow one another, and so do passed-on parts."""
        parts = [Picked.decode(message, self.dtype) for message in self.peers.gather_uneven(own.encode(self.dtype))]
        return Picked(torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts]))

    def _spread(self, own: Picked, counts: Sequence[int]) -> Picked:
        """Equal parts of what all ranks have, if one has much more than the others; else what it is."""
        size, total = self.peers.size, sum(counts)
        if max(counts) * size <= CROWDED * total:
            return own
        ends = [total * p // size for p in range(size + 1)]
        first = list(accumulate(counts, initial=0))[self.peers.index]
        cuts = [min(max(end - first, 0), len(own)) for end in ends]
        parts = [Picked(own.indices[a:b], own.values[a:b]) for a, b in pairwise(cuts)]
        messages = self.peers.scatter_uneven([part.encode(self.dtype) for part in parts])
        came = [Picked.decode(message, self.dtype) for message in messages]
        return Picked(torch.cat([part.indices for part in came]), torch.cat([part.values for part in came]))

    def _sharded(self, sums: Picked, state: OkTopkState, exact: bool) -> _Chosen:
        """The largest sums, each on its owner; Note [Sharded]."""
        if exact:
            magnitudes = sums.values.abs()
            threshold = kth_largest(torch.cat(self.peers.gather_uneven(magnitudes)), self.k)
            chosen = sums.where(magnitudes >= threshold)
        else:
            chosen, _, threshold = self._reused(sums, state.world)
        reduced = added([chosen], self.numel, sums.values)
        return _Chosen(reduced, chosen, None, len(chosen), threshold, exact)

    def _subtract_delivered(self, total: Tensor, picked: Picked, sums: Picked, chosen: _Chosen) -> None:
        """Turn gradient plus residual into the new residual, in place."""
        if chosen.indices is None:  # this rank does not know whose picks were chosen: owners take the rest of the sums
            total[picked.indices] -= picked.values
            total[sums.indices] += sums.values
            total[chosen.own.indices] -= chosen.own.values
            return
        delivered = picked.where(torch.isin(picked.indices, chosen.indices, assume_unique=True))
        total[delivered.indices] -= delivered.values
        # Sums were rounded on their way to all ranks; what that took only their owner knows.
        lost = sums.where(torch.isin(sums.indices, chosen.own.indices, assume_unique=True))
        total[lost.indices] += lost.values - chosen.own.values

    def fresh(self) -> OkTopkState:
        """No threshold, regions of equal size."""
        size = self.peers.size
        return OkTopkState(0, 0.0, 0.0, tuple(self.numel * p // size for p in range(size + 1)))

    def save(self, state: OkTopkState) -> dict[str, Tensor]:
        """Steps, thresholds and regions."""
        return {
            "step": torch.tensor(state.step),
            "thresholds": torch.tensor([state.local, state.world], dtype=torch.float64),
            "bounds": torch.tensor(state.bounds),
        }

    def restored(self, saved: Mapping[str, Tensor]) -> OkTopkState:
        """Steps, thresholds and regions from a checkpoint."""
        local, world = saved["thresholds"].tolist()
        return OkTopkState(int(saved["step"]), local, world, tuple(int(bound) for bound in saved["bounds"]))


build_mode.register(OkTopkSync, OkTopk)
