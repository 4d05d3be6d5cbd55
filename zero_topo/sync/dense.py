# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Dense sync: sends every gradient element across gradient domains, in 16 or 32 bits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import reduce_scatter
from zero_topo.config import DenseSync
from zero_topo.quant.operands import Range
from zero_topo.quant.ops import cast_to
from zero_topo.sync.base import SyncContext, SyncMode, build_mode
from zero_topo.sync.crossing import spread_back


class Dense(SyncMode):
    """A reduce-scatter directly to the optimizer shard, or the paper's all-reduce.

    1. reduce over ``(G, N)``: each rank ends with its own world shard, summed in FP32 in tree
       order, or with ``"reduce": "ring"`` between nodes by NCCL or RCCL, in the type on the wire
       and in the order of its ring;
    2. gather back to the optimizer shard (nothing if O = N), or to the whole gradient shard for
       ``"reduce": "all_reduce"`` (ZeRO-topo's paper, section V-C), most of which the optimizer then
       ignores.

    One owner sums each row and the others copy it, so replicated optimizer shards are
    bit-identical.
    """

    def __init__(self, config: DenseSync, context: SyncContext) -> None:
        super().__init__(context)
        plan = context.plan
        # The groups to the world shards, where rows are summed, and back to the shards that the
        # optimizer reads.
        self._up = context.across(plan.gradients)
        target = plan.gradients if config.reduce == "all_reduce" else plan.optimizer
        self._down = context.across(target)
        self._wire = cast_to(context.dtype)
        # Between nodes alone
        self._backend = (False, config.reduce == "ring" and self._up.groups[-1].sums)

    def start(self, shard: Tensor, ranges: Sequence[Range], scale: float) -> Handle[None]:
        """Begin the reduction; the gather back to ranks that need more rows is the handle's last
        stage.
        """
        if self._up.size == 1:
            return Handle()
        parts = self.context.views(shard[:, None], ranges)
        own = [part.member(self._up.index) for part in parts]
        up = reduce_scatter(
            self._up, parts, self._wire, own, backend=self._backend[-len(self._up.groups) :]
        )
        return up.then(lambda _: spread_back(self.context, shard, ranges, self._down, self._wire))


build_mode.register(DenseSync, Dense)
