# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The layout of parameters in a rank's nested shards.

All trainable parameters lie side by side: the parameter with index ``i`` (in code a
``param_index``) has the columns ``[begin, begin + width)`` of every shard, with
``width = ceil(numel / N)``. A shard of degree ``d`` is ``[N / d, F]``, where ``F`` is the sum of
the widths. Its row ``t // d`` has DeepSpeed's layout, so DeepSpeed's flat buffers are rows of our
shards.

Note [Padding]
    The last world shards extend beyond a parameter's end. DeepSpeed leaves this padding
    uninitialized, and saves and loads it. We zero it at the start and after a load; gradients are
    padded with zeros, so it stays zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from zero_topo.collectives.transport import rows_of
from zero_topo.plan import Plan


@dataclass(frozen=True)
class Layout:
    """The columns of the parameters, and the rows of this rank.

    Attributes:
        plan: the degrees.
        rank: this rank.
        numels: elements of each parameter, in DeepSpeed's flat order.
    """

    plan: Plan
    rank: int
    numels: tuple[int, ...]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Columns of each parameter."""
        return tuple(self.plan.shard_numel(n) for n in self.numels)

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """First column of each parameter, and the end of the last one."""
        return tuple(accumulate(self.widths, initial=0))

    @property
    def columns(self) -> int:
        """``F``: columns of all parameters."""
        return self.edges[-1]

    @cached_property
    def padded_numels(self) -> tuple[int, ...]:
        """Elements of each parameter with its padding, over the whole world."""
        return tuple(self.plan.world_size * width for width in self.widths)

    def shard_ranges(self, param_indices: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Return the column ranges of some parameters."""
        return tuple((self.edges[i], self.edges[i + 1]) for i in param_indices)

    def columns_of(self, param_indices: range) -> slice:
        """Return the columns of consecutive parameters."""
        return slice(self.edges[param_indices.start], self.edges[param_indices.stop])

    def row(self, degree: int) -> int:
        """Return the index of the rank's own world shard in its shard of ``degree``."""
        return self.plan.row(self.rank, degree)

    def shape(self, degree: int) -> tuple[int, int]:
        """Return the shape of a shard of ``degree``: ``(N / degree, F)``."""
        return self.plan.world_size // degree, self.columns

    def parameter(self, shard: Tensor, index: int) -> Tensor:
        """Return a view of one parameter's columns of any shard, ``[rows, width]``."""
        return shard[:, self.edges[index] : self.edges[index + 1]]

    def subset(self, shard: Tensor, lo: int, hi: int) -> Tensor:
        """Return the rank's degree-``hi`` shard as a strided view of its degree-``lo`` shard,
        ``[N / hi, columns]``.
        """
        return shard[self.row(lo) % (hi // lo) :: hi // lo]

    # -- tree order --------------------------------------------------------------------------------

    @cached_property
    def _orders(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        """By device, filled on first use: the rank at each tree position, and the tree position of
        each rank.
        """
        return {}

    def _order(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._orders:
            rank_at = torch.tensor(self.plan.rank_at, dtype=torch.int64, device=device)
            self._orders[device] = rank_at, rank_at.argsort()
        return self._orders[device]

    def rows(self, flat: Tensor) -> Tensor:
        """Return flat parameters ``[..., numel]`` as world shards in tree order, zero-padded:
        ``[..., N, width]``.
        """
        rank_at = None if self.plan.order is None else self._order(flat.device)[0]
        return rows_of(flat, self.plan, rank_at)

    def in_tree_order(self, flat: Tensor) -> Tensor:
        """Reorder a flat parameter ``[numel]``'s world shards to tree order; a no-op if ranks are
        placed in it.
        """
        if self.plan.order is None:
            return flat
        return self.rows(flat).view(-1)

    def flat_of(self, padded: Tensor, index: int) -> Tensor:
        """Return parameters ``[..., numel]`` from world shards ``[..., N * width]`` in tree order;
        a view if it can.
        """
        if self.plan.order is not None:
            rows = padded.unflatten(-1, (self.plan.world_size, -1))
            _, position_of = self._order(padded.device)
            padded = rows[..., position_of, :].flatten(-2)
        numel = self.numels[index]
        if padded.shape[-1] == numel:
            return padded
        return padded[..., :numel]

    # -- padding -----------------------------------------------------------------------------------

    def clear_padding(self, shard: Tensor, first: int = 0) -> None:
        """Zero the padding beyond the parameters' ends, which could otherwise set the scale of a
        quantization block.

        Args:
            shard: ``[n]``, columns ``first .. first + n`` of the rank's own world shard.
            first: the first column; no parameter is cut.
        """
        for numel, begin, width in zip(self.numels, self.edges, self.widths, strict=False):
            stored = min(max(numel - self.rank * width, 0), width)
            if stored < width and first <= begin < first + len(shard):
                place = begin - first
                shard[place + stored : place + width] = 0
