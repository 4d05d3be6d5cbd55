# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The sparse modes that others are compared with: TopkA, Gaussian-k, TopkDSA and gTopk.

Words that a rank sends for ``k`` picks of ``n`` elements on ``P`` peers, a pick being two words (Li & Hoefler, PPoPP
2022, table 1): TopkA and Gaussian-k ``2 k (P - 1)``, TopkDSA ``4 k (P - 1) / P`` to ``(2 k + n) (P - 1) / P``, gTopk
``4 k log2 P`` for the busiest.
"""

from __future__ import annotations

from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor

from zero_topo.config import GaussianKSync, GTopkSync, SparseSync, TopkASync, TopkDsaSync
from zero_topo.sync.base import SyncContext, build_mode
from zero_topo.sync.picks import (
    LONGEST,
    TINY,
    Picked,
    Records,
    above,
    added,
    count_reaching,
    in_runs,
    largest,
    positions,
    share,
)
from zero_topo.sync.sparse import Report, Sparse, counts_or_flag

FITTING_STEPS = 4


class Stateless(Sparse):
    """A mode that remembers nothing but the residual."""

    def k_largest(self, total: Tensor) -> Picked:
        """Exactly ``k``, or all that are not zero; one host synchronization."""
        picked = largest(total, self.k)
        (count,) = self.to_host(picked.values.count_nonzero())
        return picked.non_zero(count)

    def numbers(self, picked: int, union: Tensor) -> Report:
        """The report: densities of a rank's picks and of the sum."""
        return {"density_asked": self.density, "density": picked / self.numel, "union": union.double() / self.numel}


class TopkA(Stateless):
    """Every rank's picks, its ``k`` largest elements, go to all others, who add them up.

    Raises:
        ValueError: if these are more than a GPU can sort.
    """

    def __init__(self, config: SparseSync, context: SyncContext) -> None:
        super().__init__(config, context)
        k = share(config.busiest.density, self.numel)
        if self.active and k * self.peers.size > LONGEST:
            raise ValueError(
                f"sync.mode = {config.MODE}: {k} picks of each of {self.peers.size} ranks are over {LONGEST}, more "
                "than torch sorts on a GPU; lower sync.density and start_density, or take a mode in which each rank "
                'adds up its own part: "oktopk" or "topk_dsa"'
            )

    def pick(self, total: Tensor) -> Picked:
        """What this rank sends of its vector: exactly ``k``, or all that are not zero."""
        return self.k_largest(total)

    def exchange(self, total: Tensor, state: None) -> tuple[Tensor, None, Report]:
        """Gather all picks; the sum is everybody's union."""
        picked, records = self.pick(total).rounded(self.dtype), Records(self.dtype, self.numel)
        own = torch.full((1,), len(picked), device=total.device)
        counts = self.to_host(self.peers.gather(counts_or_flag(own, picked.values)))
        reduced = added(records.gather(self.peers, picked, counts), self.zeros)
        total[picked.indices] -= picked.values
        return reduced, None, self.numbers(len(picked), reduced.count_nonzero())


class GaussianK(TopkA):
    """As TopkA, but about ``k`` picks: those above a threshold that fits if elements are normally distributed.

    Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning" (arXiv 1911.08772), algorithm 1: the
    threshold is halved or raised by half, a few times, until between 2/3 k and 4/3 k elements pass.
    """

    def pick(self, total: Tensor) -> Picked:
        """Those above the threshold."""
        bound, count = self.to_host(*self.threshold(total))
        return above(total, bound, int(count))

    def threshold(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """From mean and standard deviation, then corrected by counting; FP64 ``[]``, and how many reach it, ``[]``."""
        quantile = NormalDist().inv_cdf(1 - self.density / 2) if self.density < 1 else 0.0
        deviation, mean = torch.std_mean(total) if total.numel() > 1 else (total.new_zeros(()), total.sum())
        bound = (deviation.double() * quantile + mean.double().abs()).clamp(min=TINY).nan_to_num_(torch.inf, torch.inf)
        if self.density == 1:
            bound = torch.full_like(bound, TINY)
        count = count_reaching(total, bound)
        for _ in range(FITTING_STEPS if self.density < 1 else 0):  # what fits stays
            few, many = 3 * count < 2 * self.k, 3 * count > 4 * self.k
            bound = torch.where(few, (0.5 * bound).clamp(min=TINY), torch.where(many, 1.5 * bound, bound))
            count = count_reaching(total, bound)
        return bound, count


class TopkDsa(Stateless):
    """Picks go to the owners of their rows; the sums come back sparse, or dense where that is shorter.

    The dynamic sparse all-reduce of SparCML (Renggli et al., SC 2019). The second half is left out where no rank needs
    more than its own row.
    """

    def exchange(self, total: Tensor, state: None) -> tuple[Tensor, None, Report]:
        """Reduce the picks at the owners of their rows, then gather the sums if all ranks need them."""
        size, width = self.peers.size, self._columns
        picked, records = self.k_largest(total).rounded(self.dtype), Records(self.dtype, width)
        sizes = picked.counts(torch.arange(size + 1, device=total.device) * width)
        numbers = self.to_host(sizes, self.peers.scatter(counts_or_flag(sizes, picked.values)))
        sent = Picked(picked.indices % width, picked.values)
        received = records.scatter(self.peers, sent, numbers[:size], numbers[size:])
        del sent
        own = added(received, partial(received.values.new_zeros, width))
        del received
        total[picked.indices] -= picked.values
        union = own.count_nonzero()
        reduced = self._gathered(own, union, total) if self.everywhere else own
        return reduced, None, self.numbers(len(picked), union * size)

    def _gathered(self, own: Tensor, union: Tensor, total: Tensor) -> Tensor:
        """All rows; what is lost by rounding sums stays with their owner."""
        size, width, index = self.peers.size, own.numel(), self.peers.index
        records, counts = Records(self.dtype, width), self.peers.gather(union.view(1)).view(-1)
        sparse = counts * records.nbytes < own.nbytes
        dense = torch.where(sparse, 0, 1)
        counts = counts * sparse
        numbers = self.to_host(counts, dense)
        if all(numbers[size:]):
            return self.peers.gather_known(own[None], numbers[size:]).view(-1)
        indices = positions(own != 0, numbers[index])
        sums = Picked(indices, own[indices])
        total[indices + index * width] += sums.values - sums.rounded(self.dtype).values
        picks = records.gather(self.peers, sums, numbers[:size])
        rows = torch.arange(size, device=own.device).repeat_interleave(counts, output_size=len(picks))
        reduced = self.zeros().view(size, width)
        reduced.view(-1)[rows.mul_(width).add_(picks.indices)] = picks.values
        if any(numbers[size:]):
            received = self.peers.gather_known(own[None][: numbers[size + index]], numbers[size:])
            reduced[positions(dense != 0, len(received))] = received
        return reduced.view(-1)


class GTopk(Stateless):
    """The ``k`` largest elements of the sum, as far as a tree finds them: at each level only ``k`` go on.

    Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification" (ICDCS 2019). A rank that
    drops a sum on the way keeps it in its own residual, so that nothing is lost. Picks are always ``k``, zeros among
    them if need be: all messages have one length, and no host synchronizes.
    """

    def exchange(self, total: Tensor, state: None) -> tuple[Tensor, None, Report]:
        """Merge picks up a tree of peers, then hand the result down the same tree."""
        picked = largest(total, self.k)
        total[picked.indices] -= picked.values
        steps = [1 << level for level in range((self.peers.size - 1).bit_length())]
        for step in steps:
            parent, child = self._neighbours(step)
            if parent is not None:
                picked = self._kept(picked, picked.rounded(self.dtype), total)
            received = self._pass(picked, parent, child)
            if received is not None:
                both = torch.cat([picked.indices, received.indices]), torch.cat([picked.values, received.values])
                sums = in_runs(Picked(*both))
                picked = self._kept(sums, sums.where(largest(sums.values, self.k).indices), total)
        if self.peers.index == 0:
            picked = self._kept(picked, picked.rounded(self.dtype), total)
        for step in reversed(steps):
            parent, child = self._neighbours(step)
            received = self._pass(picked, child, parent)
            picked = picked if received is None else received
        return added(picked, self.zeros), None, self.numbers(self.k, picked.values.count_nonzero())

    def _neighbours(self, step: int) -> tuple[int | None, int | None]:
        """At one level of the tree: the member this one reports to, and the one that reports to it."""
        index = self.peers.index
        if index % (2 * step) == step:
            return index - step, None
        return None, index + step if index % (2 * step) == 0 and index + step < self.peers.size else None

    def _kept(self, have: Picked, goes_on: Picked, total: Tensor) -> Picked:
        """What does not go on stays in the residual. An index that is there twice has a value but once."""
        total.index_add_(0, have.indices, have.values)
        total.index_add_(0, goes_on.indices, goes_on.values, alpha=-1)
        return goes_on

    def _pass(self, picked: Picked, target: int | None, source: int | None) -> Picked | None:
        """Send ``k`` picks to one member, get as many from another."""
        size, records = self.peers.size, Records(self.dtype, self.numel)
        sizes, expected = [0] * size, [0] * size
        if target is not None:
            sizes[target] = self.k
        if source is not None:
            expected[source] = self.k
        received = self.peers.scatter_known(records.encode(picked)[: sum(sizes)], sizes, expected)
        return None if source is None else records.decode(received)


build_mode.register(TopkASync, TopkA)
build_mode.register(GaussianKSync, GaussianK)
build_mode.register(TopkDsaSync, TopkDsa)
build_mode.register(GTopkSync, GTopk)
