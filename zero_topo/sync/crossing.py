# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The base of sync modes with a residual or a selection: they gather, sum and return rows across
gradient domains.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import all_gather_views, members, reduce_scatter, rows_of
from zero_topo.mesh import Hierarchy
from zero_topo.quant.operands import Range, merged, packed_ranges, range_views, total_numel
from zero_topo.quant.ops import cast_to, dequantize, quantize
from zero_topo.quant.spec import Cast, Format
from zero_topo.sync.base import SyncContext, SyncMode

logger = logging.getLogger(__name__)

EXACT = Cast("fp32")


class Crossing(SyncMode, ABC):
    """A mode whose peers exchange tables: row ``p`` of the table ``[P, C]`` belongs to peer ``p``.

    Attributes:
        peers: the group of ranks that store the same gradient elements.
    """

    def __init__(self, context: SyncContext, dense_wire: Format) -> None:
        super().__init__(context)
        groups = context.across(context.plan.gradients).groups
        # The group inside the node, if gradient domains are smaller than a node: the table then has
        # sums over it.
        self._inner = Hierarchy(groups[:-1]) if len(groups) > 1 else None
        self.peers = groups[-1]
        self._dense_wire = dense_wire  # format of reductions inside a node, and of gathers back

    def members(self) -> list[int]:
        """Return the peers' global ranks."""
        return self.context.plan.group(self.context.mesh.rank, self.peers.lo, self.peers.hi)

    @abstractmethod
    def residual_rows(self) -> Tensor | None:
        """Return the residual, one row per owner of :meth:`residual_owners`; None if that is
        None.
        """

    @abstractmethod
    def store_residual(self, rows: Tensor) -> None:
        """Overwrite the residual with rows like those of :meth:`residual_rows`."""

    def inherit(self, sums: Mapping[str, Tensor]) -> None:
        """Set the residual to a share of another run's summed residuals: each row is divided by the
        number of owners.

        Args:
            sums: by parameter, FP32 ``[numel]``, the sum over the peers of that run.
        """
        mine = self.residual_owners()
        rows = self.residual_rows()
        if self.peers.size == 1:
            if self.context.mesh.rank == 0:
                logger.warning(
                    "zero_topo: residuals of another run are dropped: here one gradient domain has "
                    "all ranks"
                )
            return
        # This mode keeps no residual: it refuses, in words.
        if mine is None or rows is None:
            return super().inherit(sums)
        plan = self.context.plan
        positions = [plan.position(owner) for owner in mine.owners]
        for name, (_, first, past) in mine.parameters.items():
            if name not in sums:
                continue
            # Shares of all owners add up to the sum again.
            rows[:, first:past] = rows_of(sums[name], plan)[positions] / len(positions)
        self.store_residual(rows)

    def check_shapes(self, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a checkpoint has other entries than this run, or entries of other
        shapes.
        """
        needed = {name: tuple(entry.shape) for name, entry in own.items()}
        found = {name: tuple(entry.shape) for name, entry in state.items()}
        if found != needed:
            raise ValueError(f"this sync mode needs {needed}, but the checkpoint carries {found}")

    def rows(self, shard: Tensor) -> Tensor:
        """Return a view of the rows of a gradient shard that the table has."""
        if self._inner is None:
            return shard
        return shard[self._inner.index :: self._inner.size]

    def columns(self, shard: Tensor, ranges: Sequence[Range]) -> Tensor:
        """Return a copy of all peers' rows in the shard, FP32 ``[P, C]``."""
        views = self.context.views(self.rows(shard)[:, None], ranges)
        table = shard.new_empty(self.peers.size, total_numel(views), dtype=torch.float32)
        # One launch reads all ranges, and converts them to FP32.
        quantize(views, EXACT, table.view(torch.uint8))
        return table

    def table(self, shard: Tensor, ranges: Sequence[Range]) -> Tensor:
        """Return a copy of all peers' rows, FP32 ``[P, C]``: of the shard itself, or of its sums
        inside the node.
        """
        return self.start_table(shard, ranges).wait()

    def start_table(self, shard: Tensor, ranges: Sequence[Range]) -> Handle[Tensor]:
        """Begin to make :meth:`table`."""
        if self._inner is None:
            table = self.columns(shard, ranges)
            return Handle(table)
        ranges = merged(ranges)
        places = packed_ranges(ranges)
        table = shard.new_empty(self.peers.size, places[-1][1], dtype=torch.float32)
        parts = self.context.views(members(shard, self._inner.size), ranges)
        out = range_views(table, places)
        # Inside the node the shards of its ranks are summed; each rank crosses with its own part.
        return reduce_scatter(self._inner, parts, self._dense_wire, out).then(lambda _: table)

    def deliver(self, shard: Tensor, ranges: Sequence[Range], table: Tensor, which: slice) -> None:
        """Write the rows ``which`` of a table to their place in a gradient shard."""
        views = self.context.views(self.rows(shard)[which, None], ranges)
        dequantize(table[which].view(torch.uint8), EXACT, views)


def spread_back(
    context: SyncContext,
    shard: Tensor,
    ranges: Sequence[Range],
    hierarchy: Hierarchy,
    wire: Format,
) -> Handle[None] | None:
    """Begin to gather synced rows from the ranks that own them, over the groups from the wanted
    degree to the world.

    There is no handle if nothing moves. The owner takes the bits that it sends: replicas of an
    optimizer shard stay equal if the format rounds.
    """
    if hierarchy.size == 1:
        return None
    # The target shard has every step-th row of the gradient shard
    step = hierarchy.lo // context.plan.gradients
    rows = members(shard[context.own_row % step :: step], hierarchy.size)
    views = context.views(rows, ranges)
    return all_gather_views(hierarchy, views, wire, own=wire != cast_to(shard.dtype))
