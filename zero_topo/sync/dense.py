# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Dense sync: every gradient element crosses, in 16 or 32 bits."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zero_topo.collectives.all_gather import Counted, all_gather_rows
from zero_topo.collectives.pack import row_pieces
from zero_topo.collectives.reduce_scatter import Sums, reduce_scatter
from zero_topo.collectives.wire import Wire
from zero_topo.config import DenseSync
from zero_topo.sync.base import SyncContext, SyncMode, build_mode


class Dense(SyncMode):
    """Reduce-scatter straight to the optimizer shard, or the paper's all-reduce.

    1. reduce hop ``(G, N)``: each rank ends with its own world shard, summed in FP32 in tree order;
    2. gather hop back to the optimizer shard (nothing if O = N), or to the whole gradient shard for
       ``"reduce": "all_reduce"`` (paper section III, step 4), most of which the optimizer then ignores.

    One owner sums each row and the others copy it, so replicated optimizer shards are bit-identical.
    """

    def __init__(self, config: DenseSync, context: SyncContext) -> None:
        plan = context.plan
        self._context = context
        self._up = context.mesh.hop(plan.gradients, plan.world_size)
        target = plan.gradients if config.reduce == "all_reduce" else plan.optimizer
        self._down = context.mesh.hop(target, plan.world_size)
        self._wire = Wire(context.quantizer, None, context.dtype)

    def sync(self, shard: Tensor) -> None:
        """See :meth:`SyncMode.sync`; works through the columns in chunks of ``context.chunk_numel`` elements."""
        context = self._context
        if self._up.group is None or shard.numel() == 0:
            return
        own = context.plan.row(context.mesh.rank, context.plan.gradients)
        step = self._down.lo // context.plan.gradients
        width = max(1, context.chunk_numel // shard.shape[0])
        for begin in range(0, shard.shape[1], width):
            columns = shard[:, begin : begin + width]
            rows = row_pieces(columns)
            reduce_scatter([self._up], rows, self._wire, Sums(rows[own], context.meter, "sync"))
            # the rows of the down hop's shard, as a strided view of this gradient shard
            counted = Counted(context.meter, "sync", context.chunk_numel)
            all_gather_rows(self._down, columns[own % step :: step], counted, context.dtype)

    def wire_bytes(self, columns: int) -> Mapping[str, int]:
        """(N/G - 1 + N/target - 1) rows of ``columns`` values, to the whole world."""
        moved = (self._up.size - 1) + (self._down.size - 1)
        return {self._up.domain: moved * columns * self._context.dtype.itemsize} if moved else {}


@build_mode.register
def _(config: DenseSync, context: SyncContext) -> Dense:
    return Dense(config, context)
