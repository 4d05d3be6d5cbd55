# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ok-Topk: the largest elements of the sum of every rank's largest, in O(k) words (Li & Hoefler, PPoPP 2022).

1. Each rank selects the elements of its gradient plus residual that reach a local threshold.
2. The elements are divided into one region per rank, so that selected elements are spread evenly. They go to the owners
   of their regions, who add them up.
3. Sums that reach a global threshold go to all ranks, after ranks with over four times the mean have passed their
   surplus on.
4. A rank removes from its residual the elements that it sent and whose sums were chosen.

Note [Thresholds]
    An exact local threshold needs a selection, an exact global one a gather of all sums. Both are computed every
    ``tau_prime`` steps and reused between; in the first ``tau_prime`` steps, when gradients change fast, every step
    computes them. After a reuse a threshold is multiplied by the fourth root of its count over k, as if counts fell
    with its fourth power. If fewer than 4/5 k elements of a rank reach the local threshold, it takes the k largest of
    those that reach five sixths of it; if more than 5/4 k do, the k largest of these. If there are fewer than k, or
    over 8 k, the rank computes the threshold anew. Of the sums at most 5/4 k are chosen, which bounds the words sent by
    5 k (P - 1) / P: each rank keeps its share of them, the largest. If fewer than 4/5 k reach the global threshold, k
    are chosen among those that reach two thirds of it, in proportion to the ranks' counts (five sixths of it, if the
    sums contain more than selected elements).

Note [Sharded]
    If every rank owns exactly one row of the optimizer, sums may stay with their owners: regions are the rows. Step 3
    then sends only counts, and, when the threshold is computed, each owner's largest magnitudes, up to four times its
    share of k. The sender cannot know which of its elements the owner selected. It therefore clears them all from its
    residual, and the owner keeps the unselected sums in its own. A rank selects the share ``density`` of the other
    ranks' rows. It does not send its own row: all of it, with its residual, is in the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from struct import pack, unpack

import torch
from torch import Tensor

from zero_topo.config import OkTopkSync
from zero_topo.quant import ops
from zero_topo.sync.base import SyncContext, build_mode
from zero_topo.sync.picks import (
    TINY,
    Picked,
    Records,
    above,
    added,
    count_reaching,
    kth_largest,
    largest,
    positions,
    share,
)
from zero_topo.sync.sparse import Report, Sparse, counts_or_flag

CROWDED = 4
FALL = 4  # counts are assumed to fall with this power of a threshold
MOST_MOVED = 2.0  # the largest factor by which a threshold changes in a step
MOST_TAKEN = 8  # times k: if more elements pass, the k largest are selected in place, which needs less memory
# If few elements reach a threshold, those that reach it divided by this are candidates; most sums are zero.
NEAR, NEAR_SUMS = 1.2, 1.5


@dataclass(frozen=True)
class OkTopkState:
    """The state of Ok-Topk, equal on all peers except for ``local``.

    Attributes:
        local: the local threshold.
        world: the global threshold, FP64 ``[]``.
        bounds: the first element of each region, and ``n``, int64 ``[P + 1]``.
    """

    local: float
    world: Tensor
    bounds: Tensor


_Chosen = tuple[Tensor, Tensor, Tensor]
"""The result of step 3: FP32 ``[n]``, or where sums stay with their owners ``[C]``; how many of these are not zero,
int64 ``[]``; the threshold for the next step, FP64 ``[]``."""


class OkTopk(Sparse):
    """Reduces the largest elements of all ranks and selects the largest sums, with reused thresholds and regions."""

    config: OkTopkSync

    def __init__(self, config: OkTopkSync, context: SyncContext) -> None:
        super().__init__(config, context)
        # If sums stay with their owners, indices count within the owner's row.
        self._records = Records(self.dtype, self._columns if config.sharded else self.numel)
        self._open = self.numel - self._columns if config.sharded else self.numel  # elements to select from

    @property
    def picks(self) -> int:
        """Number of elements that this rank selects. Of the sums, the owners select :attr:`k`."""
        return share(self.density, self._open)

    def exchange(self, total: Tensor, state: OkTopkState) -> tuple[Tensor, OkTopkState, Report]:
        """Reduce selected elements at the owners of their regions, then choose among the sums."""
        exact = self.since_start < self.config.tau_prime or self.since_start % self.config.tau_prime == 0
        own = self._own(total)
        picked, threshold, recomputed = self._picked(total, state, exact)
        bounds = state.bounds
        if not self.config.sharded and self.since_start % self.config.tau == 0:
            bounds = self._balanced(picked)
        begin, sums, world = self._summed(picked, bounds, state.world, own)
        if own is not None:
            reduced, count, after = self._sharded(sums, None if exact else world)
            # This rank cannot know which of its elements were chosen: owners keep the rest of the sums.
            total[picked.indices] -= picked.values
            torch.sub(sums, reduced, out=total[begin : begin + len(sums)])
        else:
            reduced, count, after = self._choose(sums, begin, None if exact else world)
            total[picked.indices] -= torch.where(reduced[picked.indices] != 0, picked.values, 0.0)
            if self.dtype != sums.dtype:  # sums were rounded when sent: their owner keeps the rounding errors
                received = reduced[begin : begin + len(sums)]
                total[begin : begin + len(sums)] += torch.where(received != 0, sums - received, 0.0)
        report: Report = {
            "density_asked": self.density,
            "density": len(picked) / self._open,
            "union": count.double() / self.numel,
            "recomputed": float(recomputed) + float(exact),
        }
        return reduced, OkTopkState(threshold, after, bounds), report

    def _own(self, total: Tensor) -> Tensor | None:
        """Move this rank's own row ``[C]`` out of the total if sums stay with their owners; else return None."""
        if not self.config.sharded:
            return None
        row = total.view(self.peers.size, -1)[self.peers.index]
        own = row.clone()
        row.zero_()
        return own

    def _picked(self, total: Tensor, state: OkTopkState, exact: bool) -> tuple[Picked, float, bool]:
        """Select elements, rounded to the wire dtype, so that the residual loses exactly what the owners add up.

        Also return the next local threshold, and whether it was computed anew. One host synchronization, or two.
        """
        if not exact:
            at, low, k = state.local, max(state.local / NEAR, TINY), self.picks
            room = 5 * k // 4
            indices, values, reaching = ops.compact_above(total, at, min(room, self.numel))
            reached, near = self.to_host(reaching, ops.count_above(total, low))
            few = 5 * reached < 4 * k
            count = near if few else reached
            if k <= near and count <= MOST_TAKEN * k:
                picked = Picked(indices[:count], values[:count])
                if few or count > room:
                    picked = above(total, low if few else at, count)
                    picked = picked.where(largest(picked.values, k).indices)
                return picked.rounded(self.dtype), max(at * _moved(reached / k), TINY), False
        bound = kth_largest(total, self.picks)
        threshold, reaching = self.to_host(bound, count_reaching(total, bound))
        return above(total, threshold, int(reaching)).rounded(self.dtype), threshold, True

    def _balanced(self, picked: Picked) -> Tensor:
        """Return the bounds of regions with equal shares of each rank's selected elements, averaged over the ranks."""
        size, device = self.peers.size, self.context.device
        shares = torch.arange(size + 1, device=device)
        bounds = shares * self.numel // size
        own = picked.indices[shares[1:-1] * len(picked) // size] if len(picked) else bounds[1:-1]
        bounds[1:-1] = self.peers.gather(own).sum(dim=0) // size
        return bounds

    def _summed(self, picked: Picked, bounds: Tensor, world: Tensor, own: Tensor | None) -> tuple[int, Tensor, float]:
        """Sum the selected elements of this rank's region; one host synchronization.

        Return the region's begin, the sums in FP32 (added to ``own`` in place, if given), and the global threshold.
        """
        size, mine = self.peers.size, self.peers.index
        sizes = picked.counts(bounds)
        # The threshold's bits are an integer, so that counts stay integers.
        others = bounds[mine : mine + 2], world.view(torch.int64)
        numbers = self.to_host(sizes, self.peers.scatter(counts_or_flag(sizes, picked.values, own)), *others)
        *_, begin, end, bits = numbers
        if self.config.sharded:
            picked = Picked(picked.indices % self._columns, picked.values)
        received = self._records.scatter(self.peers, picked, numbers[:size], numbers[size : 2 * size])
        del picked
        if not self.config.sharded:
            received.indices.sub_(begin)
        zeros = partial(received.values.new_zeros, end - begin) if own is None else lambda: own
        return begin, added(received, zeros), unpack("d", pack("q", bits))[0]

    def _choose(self, sums: Tensor, begin: int, world: float | None) -> _Chosen:
        """Choose the largest sums, on all ranks, by a threshold or exactly; one host synchronization."""
        if world is None:
            counts = self.to_host(self.peers.gather(sums.count_nonzero()))
            indices = positions(sums != 0, counts[self.peers.index])
            values = sums[indices]
            everything = self._records.gather(self.peers, Picked(indices.add_(begin), values), counts)
            threshold = kth_largest(everything.values, self.k)
            everything.values.masked_fill_(everything.values.abs() < threshold, 0.0)
        else:
            own, counts, threshold = self._reused(sums, world)
            own.indices.add_(begin)
            everything = self._records.gather(self.peers, *self._spread(own, counts))
        reduced = self.zeros().index_copy_(0, everything.indices, everything.values)
        return reduced, everything.values.count_nonzero(), threshold

    def _reused(self, sums: Tensor, threshold: float) -> tuple[Picked, list[int], Tensor]:
        """Choose the sums that reach the old threshold, adjusted in number as in Note [Thresholds].

        Also return all ranks' counts and the next threshold. One host synchronization.
        """
        near_by = NEAR if self.config.sharded else NEAR_SUMS
        mine, low = self.peers.index, max(threshold / near_by, TINY)
        reach = self.to_host(self.peers.gather(torch.cat([ops.count_above(sums, at) for at in (threshold, low)])))
        reaching, near = torch.tensor(reach).view(-1, 2).T  # on the host, like all values derived from them
        total, most = sum(reach[::2]), max(5 * self.k // 4, 1)
        few = 5 * total < 4 * self.k
        if few:
            more = max(sum(reach[1::2]) - total, 1)
            counts = torch.minimum(reaching + (near - reaching) * (self.k - total) // more, near).tolist()
        else:
            counts = (reaching if total <= most else most * reaching // total).tolist()
        own = reach[2 * mine + few]
        picked = above(sums, low if few else threshold, own)
        if counts[mine] < own:
            picked = picked.where(largest(picked.values, counts[mine]).indices)
        after = max(threshold * _moved(total / self.k), TINY)
        return picked, counts, torch.full((), after, dtype=torch.float64, device=sums.device)

    def _spread(self, own: Picked, counts: list[int]) -> tuple[Picked, list[int]]:
        """Redistribute chosen sums equally if one rank has many more than the others; also return all ranks' counts."""
        size, total = self.peers.size, sum(counts)
        if max(counts) * size <= CROWDED * total:
            return own, counts
        ends = total * torch.arange(size + 1) // size  # on the host, like the counts
        edges = torch.tensor([0, *counts]).cumsum(0)
        mine = self.peers.index
        sizes = (ends - edges[mine]).clamp(0, counts[mine]).diff().tolist()
        expected = edges.clamp(ends[mine], ends[mine + 1]).diff().tolist()
        return self._records.scatter(self.peers, own, sizes, expected), ends.diff().tolist()

    def _sharded(self, sums: Tensor, world: float | None) -> _Chosen:
        """Choose the largest sums, each on its owner; Note [Sharded]. At most one host synchronization."""
        if world is None:
            most = min(self.k, CROWDED * -(-self.k // self.peers.size))
            magnitudes = largest(sums, most).values.abs()
            threshold = kth_largest(self.peers.gather(magnitudes).view(-1), self.k)
            mask = (sums.abs() < threshold).logical_not_()
        else:
            own, _, threshold = self._reused(sums, world)
            mask = torch.zeros_like(sums, dtype=torch.bool).index_fill_(0, own.indices, 1)
        return torch.where(mask, sums, 0.0), mask.sum(), threshold

    def fresh(self) -> OkTopkState:
        """Return a state without thresholds, with regions of equal size."""
        device, size = self.context.device, self.peers.size
        bounds = torch.arange(size + 1, device=device) * self.numel // size
        return OkTopkState(0.0, torch.zeros((), dtype=torch.float64, device=device), bounds)

    def save(self, state: OkTopkState) -> dict[str, Tensor]:
        """Convert thresholds and regions to tensors."""
        return {
            "thresholds": torch.tensor([state.local, float(state.world)], dtype=torch.float64),
            "bounds": state.bounds,
        }

    def restored(self, saved: Mapping[str, Tensor]) -> OkTopkState:
        """Read thresholds and regions from a checkpoint."""
        local, world = saved["thresholds"].to(self.context.device)
        bounds = saved["bounds"].to(self.context.device, copy=True)
        return OkTopkState(float(local), world, bounds)


def _moved(share: float) -> float:
    """Return the factor for a threshold whose count was ``share`` times k."""
    return float(min(max(share ** (1 / FALL), 1 / MOST_MOVED), MOST_MOVED))


build_mode.register(OkTopkSync, OkTopk)
