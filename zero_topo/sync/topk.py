# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The sparse modes that others are compared with: TopkA, Gaussian-k, TopkDSA and gTopk.

Words that a rank sends for ``k`` picks of ``n`` elements on ``P`` peers, a pick being two words (Li & Hoefler, PPoPP
2022, table 1): TopkA and Gaussian-k ``2 k (P - 1)``, TopkDSA ``4 k (P - 1) / P`` to ``(2 k + n) (P - 1) / P``, gTopk
``4 k log2 P`` for the busiest.
"""

from __future__ import annotations

from abc import abstractmethod
from statistics import NormalDist

import torch
from torch import Tensor

from zero_topo.config import GaussianKSync, GTopkSync, SparseSync, TopkASync, TopkDsaSync
from zero_topo.quant.pieces import DTYPES
from zero_topo.sync.base import SyncContext, build_mode
from zero_topo.sync.picks import TINY, Picked, above, added, largest, non_zero, share
from zero_topo.sync.sparse import Outcome, Sparse

FITTING_STEPS = 4


class Stateless(Sparse[None]):
    """A mode that remembers nothing but the residual."""

    def __init__(self, config: SparseSync, context: SyncContext) -> None:
        super().__init__(config, context)
        self.density = config.density
        self.dtype = DTYPES[config.value_dtype]

    @property
    def k(self) -> int:
        """Picks of a rank."""
        return share(self.density, self.numel)

    def fresh(self) -> None:
        """Nothing."""

    def numbers(self, picked: int, union: int) -> dict[str, float]:
        """The report: densities of a rank's picks and of the sum."""
        return {"density_asked": self.density, "density": picked / self.numel, "union": union / self.numel}


class AllGathered(Stateless):
    """Every rank's picks go to all others, who add them up."""

    @abstractmethod
    def pick(self, total: Tensor) -> Picked:
        """What this rank sends of its vector."""

    def exchange(self, total: Tensor, state: None) -> Outcome[None]:
        """Gather all picks; the sum is everybody's union."""
        picked = self.pick(total).rounded(self.dtype)
        messages = self.peers.gather_uneven(picked.encode(self.dtype))
        reduced = added([Picked.decode(message, self.dtype) for message in messages], self.numel, total)
        total[picked.indices] -= picked.values
        return Outcome(reduced, total, None, self.numbers(len(picked), int(reduced.count_nonzero())))


class TopkA(AllGathered):
    """The ``k`` largest elements of every rank."""

    def pick(self, total: Tensor) -> Picked:
        """Exactly ``k``, or all that are not zero."""
        return largest(total, self.k)


class GaussianK(AllGathered):
    """About ``k``: those above a threshold that fits if elements are normally distributed.

    Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning" (arXiv 1911.08772), algorithm 1: the
    threshold is halved or raised by half, a few times, until between 2/3 k and 4/3 k elements pass.
    """

    def pick(self, total: Tensor) -> Picked:
        """Those above the threshold."""
        return above(total, self.threshold(total), self.context.sparse)

    def threshold(self, total: Tensor) -> float:
        """From mean and standard deviation, then corrected by counting."""
        if self.density == 1:
            return TINY
        quantile = NormalDist().inv_cdf(1 - self.density / 2)
        deviation, mean = torch.std_mean(total) if total.numel() > 1 else (total.new_zeros(()), total.sum())
        bound = max(float(deviation) * quantile + abs(float(mean)), TINY)
        for _ in range(FITTING_STEPS):
            count = int(self.context.sparse.count_above(total, bound))
            if 3 * count < 2 * self.k:
                bound = max(0.5 * bound, TINY)
            elif 3 * count > 4 * self.k:
                bound *= 1.5
            else:
                break
        return bound


class TopkDsa(Stateless):
    """Picks go to the owners of their rows; the sums come back sparse, or dense where that is shorter.

    The dynamic sparse all-reduce of SparCML (Renggli et al., SC 2019). The second half is left out where no rank needs
    more than its own row.
    """

    def exchange(self, total: Tensor, state: None) -> Outcome[None]:
        """Reduce the picks at the owners of their rows, then gather the sums if all ranks need them."""
        size, width = self.peers.size, self.numel // self.peers.size
        picked = largest(total, self.k).rounded(self.dtype)
        parts = picked.cut([width * p for p in range(size + 1)])
        messages = self.peers.scatter_uneven([part.encode(self.dtype) for part in parts])
        total[picked.indices] -= picked.values
        own = added([Picked.decode(message, self.dtype) for message in messages], width, total)
        union = int(own.count_nonzero())
        reduced = self._gathered(own, total) if self.everywhere else _placed(own, self.peers.index, size)
        return Outcome(reduced, total, None, self.numbers(len(picked), union * size))

    def _gathered(self, own: Tensor, total: Tensor) -> Tensor:
        """All rows; what is lost by rounding sums stays with their owner."""
        width = own.numel()
        sums = non_zero(own).rounded(self.dtype)
        sparse = sums.encode(self.dtype)
        if sparse.numel() < own.nbytes:
            row = total[self.peers.index * width : (self.peers.index + 1) * width]
            row[sums.indices] += own[sums.indices] - sums.values
        messages = self.peers.gather_uneven(sparse if sparse.numel() < own.nbytes else own.view(torch.uint8))
        rows = [
            message.clone().view(torch.float32)
            if message.numel() == own.nbytes
            else added([Picked.decode(message, self.dtype)], width, total)
            for message in messages
        ]
        return torch.cat(rows)


class GTopk(Stateless):
    """The ``k`` largest elements of the sum, as far as a tree finds them: at each level only ``k`` go on.

    Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification" (ICDCS 2019). A rank that
    drops a sum on the way keeps it in its own residual, so that nothing is lost.
    """

    def exchange(self, total: Tensor, state: None) -> Outcome[None]:
        """Merge picks up a tree of peers, then hand the result down the same tree."""
        picked = largest(total, self.k)
        total[picked.indices] -= picked.values
        steps = [1 << level for level in range((self.peers.size - 1).bit_length())]
        for step in steps:
            parent, child = self._neighbours(step)
            if parent is not None:
                picked = self._kept(picked, picked.rounded(self.dtype), total)
            came = self._pass(picked, parent, child)
            if came is not None:
                sums = non_zero(added([picked, came], self.numel, total))
                best = largest(sums.values, self.k)
                picked = self._kept(sums, sums.where(best.indices), total)
        if self.peers.index == 0:
            picked = self._kept(picked, picked.rounded(self.dtype), total)
        for step in reversed(steps):
            parent, child = self._neighbours(step)
            came = self._pass(picked, child, parent)
            picked = picked if came is None else came
        reduced = added([picked], self.numel, total)
        return Outcome(reduced, total, None, self.numbers(self.k, len(picked)))

    def _neighbours(self, step: int) -> tuple[int | None, int | None]:
        """At one level of the tree: the member this one reports to, and the one that reports to it."""
        index = self.peers.index
        if index % (2 * step) == step:
            return index - step, None
        return None, index + step if index % (2 * step) == 0 and index + step < self.peers.size else None

    def _kept(self, have: Picked, goes_on: Picked, total: Tensor) -> Picked:
        """What does not go on stays in the residual."""
        total[have.indices] += have.values
        total[goes_on.indices] -= goes_on.values
        return goes_on

    def _pass(self, picked: Picked, target: int | None, source: int | None) -> Picked | None:
        """Send ``k`` picks to one member, get as many from another."""
        size, nbytes = self.peers.size, len(self._filled(picked))
        nothing = picked.indices.new_empty(0, dtype=torch.uint8)
        parts = [self._filled(picked) if member == target else nothing for member in range(size)]
        came = self.peers.scatter_known(parts, [nbytes if member == source else 0 for member in range(size)])
        return None if source is None else self._trimmed(Picked.decode(came[source], self.dtype))

    def _filled(self, picked: Picked) -> Tensor:
        """A message of exactly ``k`` picks, so that its length is known; what is missing are zeros at index 0."""
        missing = self.k - len(picked)
        indices = torch.cat([picked.indices, picked.indices.new_zeros(missing)])
        return Picked(indices, torch.cat([picked.values, picked.values.new_zeros(missing)])).encode(self.dtype)

    @staticmethod
    def _trimmed(picked: Picked) -> Picked:
        return picked.where(picked.values != 0)


def _placed(row: Tensor, index: int, size: int) -> Tensor:
    """A table ``[size * width]`` of which only one row is filled."""
    table = row.new_zeros(size, row.numel())
    table[index] = row
    return table.view(-1)


build_mode.register(TopkASync, TopkA)
build_mode.register(GaussianKSync, GaussianK)
build_mode.register(TopkDsaSync, TopkDsa)
build_mode.register(GTopkSync, GTopk)
