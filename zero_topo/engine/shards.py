# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Where each parameter lies in a rank's nested shards.

All trainable parameters are laid side by side: parameter ("slot") ``i`` owns the columns ``[begin, begin + width)`` of
every shard, ``width = ceil(numel / N)``. A shard of degree ``d`` is ``[N / d, F]``, ``F`` the sum of the widths; its
row ``t // d`` has DeepSpeed's own layout, so DeepSpeed's flat buffers are rows of ours.

Note [Padding]
    The last world shards go beyond a parameter's end. DeepSpeed leaves there what it finds in memory, and saves and
    loads it. We zero it at the start and after a load; gradients are padded with zeros, so it stays zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from zero_topo.collectives.transport import rows_of
from zero_topo.plan import Plan


@dataclass(frozen=True)
class Layout:
    """The columns of the slots, and the rows of this rank.

    Attributes:
        plan: the degrees.
        rank: this rank.
        numels: elements of each slot, in DeepSpeed's flat order.
    """

    plan: Plan
    rank: int
    numels: tuple[int, ...]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Columns of each slot."""
        return tuple(self.plan.shard_numel(n) for n in self.numels)

    @cached_property
    def _edges(self) -> tuple[int, ...]:
        return tuple(accumulate(self.widths, initial=0))

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """First column of each slot."""
        return self._edges[:-1]

    @property
    def columns(self) -> int:
        """``F``: columns of all slots."""
        return self._edges[-1]

    @cached_property
    def padded_numels(self) -> tuple[int, ...]:
        """Elements of each slot with its padding, over the whole world."""
        return tuple(self.plan.world_size * width for width in self.widths)

    def spans(self, slots: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """The ranges of columns of some slots."""
        return tuple((self.begins[i], self.begins[i] + self.widths[i]) for i in slots)

    def columns_of(self, slots: Sequence[int]) -> slice:
        """The columns of consecutive slots."""
        return slice(self._edges[slots[0]], self._edges[slots[-1] + 1]) if slots else slice(0, 0)

    def row(self, degree: int) -> int:
        """Index of the rank's own world shard in its shard of ``degree``."""
        return self.plan.row(self.rank, degree)

    def shape(self, degree: int) -> tuple[int, int]:
        """Shape of a shard of ``degree``: ``(N / degree, F)``."""
        return self.plan.world_size // degree, self.columns

    def slot(self, shard: Tensor, index: int) -> Tensor:
        """A slot's columns of any shard: ``[rows, width]``, a view."""
        return shard[:, self.begins[index] : self.begins[index] + self.widths[index]]

    def subset(self, shard: Tensor, lo: int, hi: int) -> Tensor:
        """The rank's degree-``hi`` shard as a strided view of its degree-``lo`` shard, ``[N / hi, columns]``."""
        return shard[self.row(lo) % (hi // lo) :: hi // lo]

    # -- tree order ------------------------------------------------------------------------------------------------

    @cached_property
    def _orders(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        """By device, once it is asked for: the rank at each tree position, and the tree position of each rank."""
        return {}

    def _order(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._orders:
            rank_at = torch.tensor(self.plan.rank_at, device=device)
            self._orders[device] = rank_at, rank_at.argsort()
        return self._orders[device]

    def in_tree_order(self, flat: Tensor) -> Tensor:
        """A parameter-shaped ``[numel]`` with its world shards in tree order; itself if ranks are placed in it."""
        if self.plan.order is None:
            return flat
        return rows_of(flat, self.plan, self._order(flat.device)[0]).view(-1)

    def flat_of(self, rows: Tensor, index: int) -> Tensor:
        """A slot's rows ``[N, width]`` in tree order as the parameter, ``[numel]``, a view if the order allows."""
        if self.plan.order is not None:
            rows = rows[self._order(rows.device)[1]]
        return rows.reshape(-1)[: self.numels[index]]

    # -- padding ---------------------------------------------------------------------------------------------------

    def clear_padding(self, shard: Tensor, first: int = 0) -> None:
        """Zero what lies beyond the ends of the parameters: it would set the scale of the block it is quantized in.

        Args:
            shard: ``[n]``, columns ``first .. first + n`` of the rank's own world shard.
            first: the first column; slots are not cut.
        """
        for numel, begin, width in zip(self.numels, self.begins, self.widths, strict=True):
            held = min(max(numel - self.rank * width, 0), width)
            if held < width and first <= begin < first + len(shard):
                shard[begin - first + held : begin - first + width] = 0
