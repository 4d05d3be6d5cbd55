# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Dense sync: every gradient element crosses, in 16 or 32 bits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero_topo.collectives.all_gather import all_gather_pieces
from zero_topo.collectives.handle import Handle
from zero_topo.collectives.meter import Counted
from zero_topo.collectives.pack import Span, span_pieces
from zero_topo.collectives.reduce_scatter import Sums, reduce_scatter
from zero_topo.collectives.wire import Wire
from zero_topo.config import DenseSync
from zero_topo.mesh import Route
from zero_topo.quant.pieces import Piece
from zero_topo.sync.base import SyncContext, SyncMode, build_mode


class Dense(SyncMode):
    """Reduce-scatter straight to the optimizer shard, or the paper's all-reduce.

    1. reduce over ``(G, N)``: each rank ends with its own world shard, summed in FP32 in tree order;
    2. gather back to the optimizer shard (nothing if O = N), or to the whole gradient shard for
       ``"reduce": "all_reduce"`` (paper section III, step 4), most of which the optimizer then ignores.

    One owner sums each row and the others copy it, so replicated optimizer shards are bit-identical.
    """

    def __init__(self, config: DenseSync, context: SyncContext) -> None:
        super().__init__(context)
        plan = context.plan
        self._up = context.mesh.route(plan.gradients, plan.world_size)
        target = plan.gradients if config.reduce == "all_reduce" else plan.optimizer
        self._down = context.mesh.route(target, plan.world_size)
        self._wire = Wire(context.quantizer, None, context.dtype)

    def start(self, shard: Tensor, spans: Sequence[Span], scale: float) -> Handle[None]:
        """See :meth:`SyncMode.start`."""
        if self._up.size == 1:
            return Handle(None, (), lambda: None)
        parts = [span_pieces(row[None], spans) for row in shard]
        sums = Sums(parts[self._up.index], Counted(self.context.meter, "sync"))
        up = reduce_scatter(self._up, parts, self._wire, sums)

        def finish() -> None:
            up.wait()
            spread_back(self.context, self._down, parts, self._wire)

        return Handle(None, (), finish)


def spread_back(context: SyncContext, down: Route, parts: Sequence[Sequence[Piece]], wire: Wire) -> None:
    """Gather the synced rows (``parts``: one entry per row of the gradient shard) to the degree ``down.lo``."""
    if down.size == 1:
        return
    plan = context.plan
    step = down.lo // plan.gradients  # the rows of that shard are every step-th of the gradient shard
    own = plan.row(context.mesh.rank, plan.gradients)
    counted = Counted(context.meter, "sync")
    all_gather_pieces(down, parts[own % step :: step], wire, counted).wait()


@build_mode.register
def _(config: DenseSync, context: SyncContext) -> Dense:
    return Dense(config, context)
