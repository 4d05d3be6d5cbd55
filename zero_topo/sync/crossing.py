# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the modes share that do not deliver everything: the way across gradient domains, and a residual's life.

Note [A residual's life]
    What a run of parameters did not deliver becomes the residual only when the step is known not to be skipped
    (``commit``); until then the run keeps what it needs to say it, and the old residual stays as it was. If the run is
    reopened instead, it gives what it did not deliver back to the gradients. The old residual is in that: it is paid,
    and must not be added when the run is started again in this step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from zero_topo.collectives.all_gather import all_gather_pieces
from zero_topo.collectives.pack import Span, members, merged, places_of, span_pieces
from zero_topo.collectives.peers import Peers
from zero_topo.collectives.reduce_scatter import Sums, reduce_scatter
from zero_topo.collectives.wire import Wire, wire_of
from zero_topo.mesh import Hop, Route
from zero_topo.quant.pieces import total_numel
from zero_topo.sync.base import SyncContext, SyncMode

Run = TypeVar("Run")


class Crossing(SyncMode, Generic[Run]):
    """A mode whose peers exchange tables: row ``p`` of the table ``[P, C]`` belongs to peer ``p``.

    Attributes:
        peers: the ranks that hold the same elements.
        across: their hop.
    """

    def __init__(self, context: SyncContext, dense_wire: Wire) -> None:
        super().__init__(context)
        hops = context.mesh.route(context.plan.gradients, context.plan.world_size).hops
        self._inner = Route(hops[:-1]) if len(hops) > 1 else None
        self.across: Hop = hops[-1]
        self.peers = self.join(self.across)
        self._dense_wire = dense_wire  # format of what is summed inside a node, and gathered back
        self._runs: dict[tuple[Span, ...], Run] = {}  # what was started in this step
        self._paid: set[tuple[Span, ...]] = set()  # runs whose residual is in the gradients already

    def join(self, across: Hop) -> Peers:
        """The peers of the hop across."""
        return Peers(across, self.context.counted)

    @abstractmethod
    def undelivered(self, run: Run) -> Tensor | None:
        """What a run was to deliver and did not, FP32 ``[P, C]``, times the loss scale; None if that is dropped."""

    @abstractmethod
    def keep(self, run: Run) -> None:
        """The step counts: what the run did not deliver is the residual now."""

    def give_back(self, rows: Tensor, spans: Sequence[Span], left: Tensor) -> None:
        """Put what was not delivered back into the gradients.

        Args:
            rows: those of a gradient shard that the table has; zero but for the own one, which holds what came.
            spans: columns of the run.
            left: ``[P, C]``.
        """
        spans = merged(spans)
        for (begin, end), (first, past) in zip(spans, places_of(spans), strict=True):
            rows[:, begin:end] += left[:, first:past].to(rows.dtype)

    def reopen(self, shard: Tensor, spans: Sequence[Span]) -> None:
        """What was delivered stays in the own row; what was not goes back to the gradients, and the residual is spent.

        Args:
            shard: as in :meth:`start`.
            spans: the same.
        """
        run = self._runs.pop(tuple(spans), None)
        left = None if run is None else self.undelivered(run)  # may lie in the rows that are zeroed now
        super().reopen(shard, spans)
        if left is not None:
            self.give_back(self.rows(shard), spans, left)
        if run is not None:
            self._paid.add(tuple(spans))

    def commit(self, skipped: bool) -> None:
        """Take over what the runs of this step did not deliver, or forget them."""
        runs, self._runs = self._runs, {}
        self._paid.clear()
        if not skipped:
            for run in runs.values():
                self.keep(run)

    def rows(self, shard: Tensor) -> Tensor:
        """View of those rows of a gradient shard that the table has."""
        return shard if self._inner is None else shard[self._inner.index :: self._inner.size]

    def table(self, shard: Tensor, spans: Sequence[Span]) -> Tensor:
        """The rows of all peers, FP32 ``[P, C]``, a copy: of the shard itself, or of its sums inside the node."""
        if self._inner is None:
            return self.columns(shard, spans)
        spans = merged(spans)
        places = places_of(spans)
        table = shard.new_empty(self.peers.size, places[-1][1], dtype=torch.float32)
        parts = span_pieces(members(shard, self._inner.size), spans)
        sums = Sums(span_pieces(table, places), self.context.counted)
        reduce_scatter(self._inner, parts, self._dense_wire, sums).wait()
        return table

    def columns(self, rows: Tensor, spans: Sequence[Span]) -> Tensor:
        """Some columns of some rows, FP32 ``[rows, C]``, a copy."""
        pieces = span_pieces(rows[:, None], merged(spans))
        table = rows.new_empty(len(rows), total_numel(pieces), dtype=torch.float32)
        exact(self.context).encode(pieces, table.view(torch.uint8))
        return table

    def deliver(self, shard: Tensor, spans: Sequence[Span], table: Tensor, which: slice) -> None:
        """Put some rows of a table where they belong in a gradient shard."""
        pieces = span_pieces(self.rows(shard)[which, None], merged(spans))
        exact(self.context).decode(table[which].view(torch.uint8), pieces)


def exact(context: SyncContext) -> Wire:
    """The format of values that nothing is taken from: FP32."""
    return wire_of(context.quantizer, None, torch.float32)


def spread_back(context: SyncContext, shard: Tensor, spans: Sequence[Span], route: Route, wire: Wire) -> None:
    """Gather rows that are synced from the ranks that own them, over a route that begins at the wanted degree."""
    if route.size == 1:
        return
    plan = context.plan
    step = route.lo // plan.gradients  # the rows of that shard are every step-th of the gradient shard
    own = plan.row(context.mesh.rank, plan.gradients)
    held = members(shard[own % step :: step], route.size)
    all_gather_pieces(route, span_pieces(held, merged(spans)), wire, context.counted).wait()
