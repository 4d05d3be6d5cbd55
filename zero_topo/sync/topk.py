# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Sparse modes for comparison: TopkA, Gaussian-k, TopkDSA and gTopk.

Words that a rank sends for ``k`` selected elements of ``n`` on ``P`` peers, at two words each (Li &
Hoefler, PPoPP 2022, table 1): TopkA and Gaussian-k ``2 k (P - 1)``, TopkDSA ``4 k (P - 1) / P`` to
``(2 k + n) (P - 1) / P``, gTopk ``4 k log2 P`` for the busiest rank.
"""

from __future__ import annotations

from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor

from zero_topo.config.sparse_config import (
    GaussianKSync,
    GTopkSync,
    PickingSync,
    TopkASync,
    TopkDsaSync,
    share,
)
from zero_topo.quant.operands import counted
from zero_topo.sync.base import SyncContext, build_mode
from zero_topo.sync.selection import (
    LONGEST,
    TINY,
    Records,
    Selected,
    added,
    count_reaching,
    in_runs,
    largest,
    positions,
)
from zero_topo.sync.sparse import Exchange, Report, Run, Sparse, Started, counts_or_flag

FITTING_STEPS = 4


class TopkA(Sparse):
    """Every rank sends its ``k`` largest elements to all others, who add them up.

    Raises:
        ValueError: if all ranks together select more elements than torch can sort on a GPU.
    """

    config: PickingSync

    def __init__(self, config: PickingSync, context: SyncContext) -> None:
        super().__init__(config, context)
        widest = self.peers.size * max((run.width for run in self.runs.values()), default=0)
        k = share(config.ROOM * config.busiest.density, widest)
        if self.active and k * self.peers.size > LONGEST:
            raise ValueError(
                f"sync.mode = {config.MODE}: {k} selected elements of each of {self.peers.size} "
                "ranks are over "
                f"{LONGEST}, more than torch sorts on a GPU; lower sync.density and start_density, "
                "or take a mode in "
                'which each rank adds up its own part: "oktopk" or "topk_dsa"'
            )

    def exchange(self, total: Tensor, run: Run) -> Started:
        """Gather and add up all ranks' selected elements."""
        selection = self.choose(total).rounded(self.dtype)
        numel = len(total)
        records = Records(self.dtype, len(total))
        report = Report(density=selection.values.count_nonzero().double() / numel)
        message = self.peers.gather_later(records.encode(selection, self.peers))
        # Decoded where the sums are needed: packets are half as large as what they hold.
        received = message.then(lambda found: records.decode(found.flatten(0, 1)))
        del message  # its buffer is freed once it is decoded

        def finish() -> Tensor:
            reduced = added(received.wait(), partial(selection.values.new_zeros, numel))
            report["union"] = reduced.count_nonzero().double() / numel
            return reduced

        return finish, Exchange(selection.subtract_from, report)

    def choose(self, total: Tensor) -> Selected:
        """Select the elements that this rank sends."""
        return largest(total, share(self.density, len(total)))


class GaussianK(TopkA):
    """TopkA with about ``k`` elements, selected by a threshold that assumes normally distributed
    elements.

    Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning" (arXiv
    1911.08772), algorithm 1: the threshold is halved or raised by half, a few times, until between
    2/3 k and 4/3 k elements pass. Every packet has 4/3 k elements, so the host waits for no count:
    zeros fill it up, and what does not fit stays in the residual.
    """

    def choose(self, total: Tensor) -> Selected:
        """Select the elements that reach the threshold, NaN included."""
        bound = self.threshold(total, share(self.density, len(total)))
        reaching = (total < bound).logical_not_().logical_or_(total <= -bound)
        room = share(self.config.ROOM * self.density, len(total))
        indices = positions(reaching, room)
        selected = counted(room, total) < reaching.sum()
        return Selected(indices, torch.where(selected, total[indices], 0.0))

    def threshold(self, total: Tensor, k: int) -> Tensor:
        """Estimate a threshold from mean and deviation, corrected by counting; FP64 ``[]``."""
        quantile = NormalDist().inv_cdf(1 - self.density / 2) if self.density < 1 else 0.0
        if total.numel() > 1:
            deviation, mean = torch.std_mean(total)
        else:
            deviation = total.new_zeros(())
            mean = total.sum()
        bound = deviation.double() * quantile + mean.double().abs()
        bound = bound.clamp(min=TINY).nan_to_num_(torch.inf, torch.inf)
        if self.density == 1:
            return torch.full_like(bound, TINY)
        # On the device: the host does not wait for the counts.
        for _ in range(FITTING_STEPS):  # a threshold that fits is not changed
            count = count_reaching(total, bound)
            few = 3 * count < 2 * k
            many = 3 * count > 4 * k
            raised = torch.where(many, 1.5 * bound, bound)
            bound = torch.where(few, (0.5 * bound).clamp(min=TINY), raised)
        return bound


class TopkDsa(Sparse):
    """Selected elements go to the owners of their rows; owners send the sums back sparse, or dense
    if that is shorter.

    This is the dynamic sparse all-reduce of SparCML (Renggli et al., SC 2019). If no rank needs
    more than its own row, the second half is omitted.

    The host waits for the lengths of the packets once in each half: those of the sums are known
    only after the first.
    """

    def exchange(self, total: Tensor, run: Run) -> Started:
        """Reduce selected elements at the owners of their rows, then gather the sums if all ranks
        need them.
        """
        size = self.peers.size
        width = run.width
        selection = largest(total, share(self.density, len(total))).rounded(self.dtype)
        records = Records(self.dtype, width)
        sizes = selection.counts(counted(size + 1, total) * width)
        expected = self.peers.all_to_all(counts_or_flag(sizes, selection.values))
        # The one host synchronization: lengths of what is sent and received.
        numbers = self.to_host(sizes, expected)
        report = Report(density=len(selection) / len(total))
        errors: list[Selected] = []

        def finish() -> Tensor:
            sent = Selected(selection.indices % width, selection.values)
            received = records.all_to_all(self.peers, sent, numbers[:size], numbers[size:])
            del sent
            own = added(received, partial(received.values.new_zeros, width))
            del received
            # Stays on the device: the report reads it later.
            union = own.count_nonzero()
            report["union"] = union.double() / width
            if not self.everywhere:
                return own
            return self._gathered(own, union, errors)

        def settle(again: Tensor) -> None:
            for sent in (selection, *errors):
                sent.subtract_from(again)

        return finish, Exchange(settle, report)

    def _gathered(self, own: Tensor, union: Tensor, errors: list[Selected]) -> Tensor:
        """Gather the sums of all rows; their owner's residual keeps the rounding errors, which
        ``errors`` gets.
        """
        size = self.peers.size
        width = own.numel()
        index = self.peers.index
        records = Records(self.dtype, width)
        counts = self.peers.gather(union.view(1)).view(-1)
        # Each owner's row goes in the shorter form; all ranks decide it by the same counts.
        sparse = counts * records.nbytes < own.nbytes
        dense = torch.where(sparse, 0, 1)
        counts = counts * sparse
        numbers = self.to_host(counts, dense)
        if all(numbers[size:]):
            return self.peers.gather_known(own[None], numbers[size:]).view(-1)
        # A row that is sent dense has a count of 0 here, so nothing of it is selected.
        indices = positions(own != 0, numbers[index])
        sums = Selected(indices, own[indices])
        if self.dtype != own.dtype:
            errors.append(sums.rounding_errors(self.dtype, index * width))
        gathered = records.gather(self.peers, sums, numbers[:size])
        rows = counted(size, own).repeat_interleave(counts, output_size=len(gathered))
        reduced = own.new_zeros(size, width)
        rows *= width
        rows += gathered.indices
        reduced.view(-1)[rows] = gathered.values
        if any(numbers[size:]):
            received = self.peers.gather_known(own[None][: numbers[size + index]], numbers[size:])
            reduced[positions(dense != 0, len(received))] = received
        return reduced.view(-1)


class GTopk(Sparse):
    """Approximates the ``k`` largest elements of the sum by a tree: at each level only ``k``
    elements are passed on.

    Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification" (ICDCS
    2019). A rank that drops a sum keeps it in its own residual, so nothing is lost. Every selection
    has ``k`` elements, zeros among them if necessary: all packets have one length, without a host
    synchronization.
    """

    def exchange(self, total: Tensor, run: Run) -> Started:
        """Merge selected elements up a tree of peers, then send the result down the tree."""
        numel = len(total)
        k = share(self.density, len(total))
        first = largest(total, k)
        records = Records(self.dtype, len(total))
        # Sums that this rank does not pass on, or their rounding errors.
        dropped: list[Selected] = []
        report = Report(density=k / numel)

        def finish() -> Tensor:
            selection = first
            steps = [1 << level for level in range((self.peers.size - 1).bit_length())]
            for step in steps:
                parent, child = self._neighbours(step)
                if parent is not None:
                    selection = self._rounded(selection, dropped)
                received = self._pass(records, selection, parent, child)
                if received is not None:
                    indices = torch.cat([selection.indices, received.indices])
                    values = torch.cat([selection.values, received.values])
                    sums = in_runs(Selected(indices, values))
                    best = largest(sums.values, k).indices
                    # What this level drops stays in this rank's residual.
                    others = torch.ones_like(sums.indices, dtype=torch.bool)
                    others.index_fill_(0, best, False)
                    dropped.append(sums.where(positions(others, len(sums) - k)))
                    selection = sums.where(best)
            if self.peers.index == 0:
                selection = self._rounded(selection, dropped)
            for step in reversed(steps):
                parent, child = self._neighbours(step)
                received = self._pass(records, selection, child, parent)
                selection = selection if received is None else received
            report["union"] = selection.values.count_nonzero().double() / numel
            return added(selection, partial(selection.values.new_zeros, numel))

        def settle(again: Tensor) -> None:
            first.subtract_from(again)
            for sums in dropped:
                again.index_add_(0, sums.indices, sums.values)

        return finish, Exchange(settle, report)

    def _neighbours(self, step: int) -> tuple[int | None, int | None]:
        """Return at one level of the tree the group ranks of the parent and of the child of this
        rank.
        """
        index = self.peers.index
        place = index % (2 * step)
        if place == step:
            return index - step, None
        child = index + step
        return None, child if place == 0 and child < self.peers.size else None

    def _rounded(self, selection: Selected, dropped: list[Selected]) -> Selected:
        """Round the elements for sending; ``dropped`` gets the errors."""
        rounded = selection.rounded(self.dtype)
        if self.dtype != torch.float32:
            dropped.append(Selected(selection.indices, selection.values - rounded.values))
        return rounded

    def _pass(
        self,
        records: Records,
        selection: Selected,
        target: int | None,
        source: int | None,
    ) -> Selected | None:
        """Send the elements to one group rank, and receive as many from another."""
        size = self.peers.size
        sizes = [0] * size
        expected = [0] * size
        if target is not None:
            sizes[target] = len(selection)
        if source is not None:
            expected[source] = len(selection)
        message = records.encode(selection, self.peers)[: sum(sizes)]
        received = self.peers.all_to_all_known(message, sizes, expected)
        return None if source is None else records.decode(received)


build_mode.register(TopkASync, TopkA)
build_mode.register(GaussianKSync, GaussianK)
build_mode.register(TopkDsaSync, TopkDsa)
build_mode.register(GTopkSync, GTopk)
