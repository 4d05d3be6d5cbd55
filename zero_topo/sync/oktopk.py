# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ok-Topk: the largest elements of the sum of every rank's largest, in O(k) words (Li & Hoefler,
PPoPP 2022).

1. Each rank selects the elements of its gradient plus residual that reach a local threshold.
2. The elements are divided into one region per rank, so that selected elements are spread evenly.
   They go to the owners of their regions, who add them up.
3. Sums that reach a global threshold go to all ranks, after ranks with over 5/4 of the mean have
   passed their surplus on. The paper does so from four times the mean on; here no rank then sends
   over 6 k (P - 1) / P words, as the paper proves, unless one rank has half of all sums.
4. A rank removes from its residual the elements that it sent and whose sums were chosen.

Note [Thresholds]
    An exact local threshold needs a selection. For an exact global one, owners gather their largest
    magnitudes, up to four times their share of k: if one has more of the k largest, more than k are
    chosen. Both are computed every ``tau_prime`` steps and reused between; in the first
    ``tau_prime`` steps, when gradients change fast, every step computes them. After a reuse a
    threshold is multiplied by the fourth root of its count over k, as if counts fell with its
    fourth power. If fewer than 4/5 k elements of a rank reach the local threshold, it takes the k
    largest of those that reach five sixths of it; if more than 5/4 k do, the k largest of these. If
    there are fewer than k, or over 8 k, the rank computes the threshold anew. Of the sums at most
    5/4 k are chosen, so the mean of the ranks sends at most 5 k (P - 1) / P words: each rank keeps
    its share of them, the largest. If fewer than 4/5 k reach the global threshold, k are chosen
    among those that reach two thirds of it, in proportion to the ranks' counts (five sixths of it,
    if the sums contain more than selected elements).

Sharded
    If every rank owns exactly one row of the optimizer, sums may stay with their owners: regions
    are the rows. Step 3 then sends only counts, and magnitudes when the threshold is computed. The
    sender cannot know which of its elements the owner selected. It therefore clears them all from
    its residual, and the owner keeps the unselected sums in its own. A rank selects the share
    ``density`` of the other ranks' rows. It does not send its own row: all of it, with its
    residual, is in the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from struct import pack, unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from zero_topo.collectives.transport import host_counts
from zero_topo.config.sparse_config import OkTopkSync, share
from zero_topo.quant import ops
from zero_topo.quant.operands import counted
from zero_topo.sync.base import SyncContext, build_mode
from zero_topo.sync.selection import (
    TINY,
    Records,
    Selected,
    above,
    added,
    count_reaching,
    kth_largest,
    largest,
    largest_of_rows,
)
from zero_topo.sync.sparse import Exchange, Report, Run, Sparse, Started, counts_or_flag

CROWDED = 1.25  # times the mean: a rank that has more chosen sums passes its surplus on
MOST_SHARES = (
    4  # times its share of k: the most magnitudes from which an exact threshold is computed
)
FALL = 4  # counts are assumed to fall with this power of a threshold
MOST_MOVED = 2.0  # the largest factor by which a threshold changes in a step
# Times k: if more elements pass, the k largest are selected in place, which needs less memory
MOST_TAKEN = 8
# If few elements reach a threshold, those that reach it divided by this are candidates; most sums
# are zero.
NEAR = 1.2
NEAR_SUMS = 1.5


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


class OkTopk(Sparse):
    """Reduces the largest elements of all ranks and selects the largest sums, with reused
    thresholds and regions.
    """

    config: OkTopkSync

    def __init__(self, config: OkTopkSync, context: SyncContext) -> None:
        super().__init__(config, context)
        # If sums stay with their owners, indices count within the owner's row.
        self._records = Records(self.dtype, self._columns if config.sharded else self.numel)
        # Elements to select from
        self._open = self.numel - self._columns if config.sharded else self.numel

    @property
    def k(self) -> int:
        """Number of sums that are chosen."""
        return share(self.density, self.numel)

    @property
    def selections(self) -> int:
        """Number of elements that this rank selects."""
        return share(self.density, self._open)

    def exchange(self, total: Tensor, run: Run) -> Started:
        """Reduce selected elements at the owners of their regions, then choose among the sums."""
        step = self.since_start
        every = self.config.tau_prime
        exact = step < every or step % every == 0
        state: OkTopkState = self._state
        # From here on each step of the paper is one call, with its host synchronization.
        own = self._own(total)
        selected, threshold, recomputed = self._selected(total, state, exact)
        bounds = state.bounds
        if not self.config.sharded and step % self.config.tau == 0:
            bounds = self._balanced(selected)
        begin, sums, world = self._summed(selected, bounds, state.world, own)
        past = begin + len(sums)
        sharded = self.config.sharded
        chosen, counts, after = self._exact(sums) if exact else self._reused(sums, world)
        left: Tensor | None = None
        if sharded:
            reduced = torch.zeros_like(sums).index_copy_(0, chosen.indices, chosen.values)
            left = sums - reduced  # the owner keeps the sums that were not chosen
        else:
            chosen.indices.add_(begin)
            chosen = self._records.gather(self.peers, *self._spread(chosen, counts))
            reduced = sums.new_zeros(self.numel).index_copy_(0, chosen.indices, chosen.values)
            values = torch.where(reduced[selected.indices] != 0, selected.values, 0.0)
            selected = Selected(selected.indices, values)
            received = reduced[begin:past]  # in the wire dtype: the owner keeps the rounding errors
            if self.dtype != sums.dtype:
                left = torch.where(received != 0, sums - received, 0.0)

        def settle(again: Tensor) -> None:
            selected.subtract_from(again)
            if left is not None:
                again[begin:past] = left if sharded else again[begin:past] + left

        report = Report(
            density=len(selected) / self._open,
            union=chosen.values.count_nonzero().double() / self.numel,
            recomputed=float(recomputed) + float(exact),
        )
        state = OkTopkState(threshold, after, bounds)
        return lambda: reduced, Exchange(settle, report, state, settles_own_row=sharded)

    def _own(self, total: Tensor) -> Tensor | None:
        """Move this rank's own row ``[C]`` out of the total if sums stay with their owners; else
        return None.
        """
        if not self.config.sharded:
            return None
        row = total.view(self.peers.size, -1)[self.peers.index]
        own = row.clone()
        row.zero_()
        return own

    def _selected(
        self,
        total: Tensor,
        state: OkTopkState,
        exact: bool,
    ) -> tuple[Selected, float, bool]:
        """Select elements, rounded to the wire dtype, so that the residual loses exactly what the
        owners add up.

        Also return the next local threshold, and whether it was computed anew. One host
        synchronization, or two.
        """
        if not exact:
            at = state.local
            low = max(state.local / NEAR, TINY)
            k = self.selections
            room = 5 * k // 4
            # One pass counts and collects, before the host knows how many there are.
            indices, values, reaching = ops.compact_above(total, at, min(room, self.numel))
            reached, near = self.to_host(reaching, ops.count_above(total, low))
            # Too few: candidates are those that reach a lower threshold.
            few = 5 * reached < 4 * k
            count = near if few else reached
            if k <= near and count <= MOST_TAKEN * k:
                selected = Selected(indices[:count], values[:count])
                if few or count > room:
                    selected = above(total, low if few else at, count)
                    selected = selected.where(largest(selected.values, k).indices)
                return selected.rounded(self.dtype), max(at * _moved(reached / k), TINY), False
        bound = kth_largest(total, self.selections)
        # The reused threshold does not fit any more: an exact one.
        threshold, reaching = self.to_host(bound, count_reaching(total, bound))
        return above(total, threshold, int(reaching)).rounded(self.dtype), threshold, True

    def _balanced(self, selected: Selected) -> Tensor:
        """Return the bounds of regions with equal shares of each rank's selected elements, averaged
        over the ranks.
        """
        size = self.peers.size
        shares = counted(size + 1, self.context.shard)
        bounds = shares * self.numel // size
        own = bounds[1:-1]
        if len(selected):
            own = selected.indices[shares[1:-1] * len(selected) // size]
        # A mean of integers is equal on all ranks.
        bounds[1:-1] = self.peers.gather(own).sum(dim=0) // size
        return bounds

    def _equal_bounds(self) -> Tensor:
        """Return the bounds of regions of equal size."""
        size = self.peers.size
        return counted(size + 1, self.context.shard) * self.numel // size

    def _summed(
        self,
        selected: Selected,
        bounds: Tensor,
        world: Tensor,
        own: Tensor | None,
    ) -> tuple[int, Tensor, float]:
        """Sum the selected elements of this rank's region; one host synchronization.

        Return the region's begin, the sums in FP32 (added to ``own`` in place, if given), and the
        global threshold.
        """
        size = self.peers.size
        mine = self.peers.index
        sizes = selected.counts(bounds)
        # The threshold's bits are an integer, so that counts stay integers.
        others = bounds[mine : mine + 2], world.view(torch.int64)
        expected = self.peers.all_to_all(counts_or_flag(sizes, selected.values, own))
        numbers = self.to_host(sizes, expected, *others)
        *_, begin, end, bits = numbers
        if self.config.sharded:
            selected = Selected(selected.indices % self._columns, selected.values)
        received = self._records.all_to_all(
            self.peers, selected, numbers[:size], numbers[size : 2 * size]
        )
        del selected
        if not self.config.sharded:
            received.indices.sub_(begin)
        zeros = partial(received.values.new_zeros, end - begin) if own is None else lambda: own
        return begin, added(received, zeros), _from_bits(bits)

    def _exact(self, sums: Tensor) -> tuple[Selected, list[int], Tensor]:
        """Choose the k largest sums; also return all ranks' counts and the threshold. One host
        synchronization.
        """
        most = min(self.k, MOST_SHARES * -(-self.k // self.peers.size))
        magnitudes = largest(sums, most).values.abs()
        # Equal lengths: an all-gather needs no sizes.
        magnitudes = pad(magnitudes, (0, most - len(magnitudes)))
        threshold = kth_largest(self.peers.gather(magnitudes).view(-1), self.k)
        reaching = self.peers.gather(count_reaching(sums, threshold))
        *counts, bits = self.to_host(reaching, threshold.view(torch.int64))
        return above(sums, _from_bits(bits), counts[self.peers.index]), counts, threshold

    def _reused(self, sums: Tensor, threshold: float) -> tuple[Selected, list[int], Tensor]:
        """Choose the sums that reach the old threshold, adjusted in number as in Note [Thresholds].

        Also return all ranks' counts and the next threshold. One host synchronization.
        """
        near_by = NEAR if self.config.sharded else NEAR_SUMS
        mine = self.peers.index
        low = max(threshold / near_by, TINY)
        own_counts = [ops.count_above(sums, at) for at in (threshold, low)]
        reach = self.to_host(self.peers.gather(torch.cat(own_counts)))
        # On the host, like all values derived from them.
        reaching, near = host_counts(reach).view(-1, 2).T
        total = sum(reach[::2])
        most = max(5 * self.k // 4, 1)
        few = 5 * total < 4 * self.k
        if few:
            # Each rank adds its share of those between the two thresholds.
            more = max(sum(reach[1::2]) - total, 1)
            share_of_more = (near - reaching) * (self.k - total) // more
            counts = torch.minimum(reaching + share_of_more, near).tolist()
        else:
            counts = (reaching if total <= most else most * reaching // total).tolist()
        own = reach[2 * mine + few]
        selected = above(sums, low if few else threshold, own)
        if counts[mine] < own:
            selected = selected.where(largest(selected.values, counts[mine]).indices)
        after = max(threshold * _moved(total / self.k), TINY)
        return selected, counts, sums.new_full((), after, dtype=torch.float64)

    def _spread(self, own: Selected, counts: list[int]) -> tuple[Selected, list[int]]:
        """Redistribute chosen sums equally if one rank has many more than the others; also return
        all ranks' counts.
        """
        size = self.peers.size
        total = sum(counts)
        if max(counts) * size <= CROWDED * total:
            return own, counts
        # On the host, like the counts
        # Where equal shares end, and where the ranks' own parts end: overlaps are what moves.
        edges = host_counts([0, *counts]).cumsum(0)
        ends = total * counted(size + 1, edges) // size
        mine = self.peers.index
        sizes = (ends - edges[mine]).clamp(0, counts[mine]).diff().tolist()
        expected = edges.clamp(ends[mine], ends[mine + 1]).diff().tolist()
        return self._records.all_to_all(self.peers, own, sizes, expected), ends.diff().tolist()

    def fresh(self) -> OkTopkState:
        """Return a state without thresholds, with regions of equal size."""
        world = self.context.shard.new_zeros((), dtype=torch.float64)
        return OkTopkState(0.0, world, self._equal_bounds())

    def save(self, state: OkTopkState) -> dict[str, Tensor]:
        """Convert thresholds and regions to tensors."""
        both = [state.local, float(state.world)]
        thresholds = torch.tensor(both, dtype=torch.float64, device="cpu")
        return {"thresholds": thresholds, "bounds": state.bounds}

    def restored(self, saved: Mapping[str, Tensor]) -> OkTopkState:
        """Read thresholds and regions from a checkpoint."""
        local, world = saved["thresholds"].to(self.context.device)
        bounds = saved["bounds"].to(self.context.device, copy=True)
        if self.config.sharded:
            bounds = self._equal_bounds()
        return OkTopkState(float(local), world, bounds)


def _moved(share: float) -> float:
    """Return the factor for a threshold whose count was ``share`` times k."""
    return float(min(max(share ** (1 / FALL), 1 / MOST_MOVED), MOST_MOVED))


def _from_bits(bits: int) -> float:
    """Return the FP64 number with the bits of an integer."""
    return float(unpack("d", pack("q", bits))[0])


class OkTopkByRow(Sparse):
    """Reduces the largest elements of each row of a run, and chooses the largest sums
    (``"select": "run"``).
    """

    config: OkTopkSync

    def exchange(self, total: Tensor, run: Run) -> Started:
        """Reduce selected elements at the owners of their rows, who choose among the sums."""
        size = self.peers.size
        own = self.peers.index
        width = run.width
        sharded = self.config.sharded
        k = share(self.density, width)
        records = Records(self.dtype, width)
        rows = total.view(size, width)
        sums = rows[own].clone() if sharded else rows.new_zeros(width)
        if sharded:  # all of the own row is in its sums already
            rows[own].zero_()
        indices = largest_of_rows(rows, k)
        places = (indices + width * counted(size, total)[:, None]).view(-1)
        selected = Selected(places, total[places]).rounded(self.dtype)
        packets = records.encode(Selected(indices.view(-1), selected.values))
        # Packets of a fixed length: no counts are sent, and the host waits for nothing.
        arriving = self.peers.begin("all_to_all", packets.view(size, k, -1))
        report = Report(density=k / width)
        left: list[Tensor] = []  # of the own row, where sums stay with their owners
        errors: list[Selected] = []  # by which the chosen sums of the own row were rounded

        def finish() -> Tensor:
            added(records.decode(arriving.wait().flatten(0, 1)), lambda: sums)
            best = largest(sums, k)
            report["union"] = best.values.count_nonzero().double() / width
            if sharded:
                chosen = torch.zeros_like(sums).index_copy_(0, best.indices, best.values)
                left.append(sums - chosen)
                return chosen
            reduced = self._gathered(best, records)
            # What was not chosen returns to the residual: it is not subtracted.
            selected.values.mul_(reduced[selected.indices] != 0)
            if self.dtype != sums.dtype:
                rounding = best.rounded(self.dtype).values - best.values
                errors.append(Selected(best.indices + own * width, rounding))
            return reduced

        def settle(again: Tensor) -> None:
            for sent in (selected, *errors):
                sent.subtract_from(again)
            if sharded:
                again.view(size, width)[own] = left[0]

        return finish, Exchange(settle, report, settles_own_row=sharded)

    def _gathered(self, chosen: Selected, records: Records) -> Tensor:
        """Gather the sums that each owner has chosen, ``[P * m]``; all owners choose as many."""
        shape = self.peers.size, len(chosen)
        packets = self.peers.gather(records.encode(chosen))
        received = records.decode(packets.flatten(0, 1))
        reduced = chosen.values.new_zeros(self.peers.size, records.numel)
        reduced.scatter_(1, received.indices.view(shape), received.values.view(shape))
        return reduced.view(-1)


@build_mode.register
def _build(config: OkTopkSync, context: SyncContext) -> Sparse:
    return (OkTopk if config.whole else OkTopkByRow)(config, context)
