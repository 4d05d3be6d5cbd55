# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The gradient shards: scatter, accumulation, sync, and what the optimizer reads.

Note [Zeroed, then added]
    Every micro-batch adds into the gradient buffer, and the buffer is zeroed after each optimizer step, after a
    skipped one (overflow) and by ``zero_grad``. Stock stage 3 instead overwrites on the first micro-batch; a parameter
    that gets no gradient in that micro-batch would keep what the last step left behind, and one whose hook fires twice
    in a backward pass (used inside and outside a reentrant checkpoint) would lose the first part. Where the first part
    still waits in the bucket, autograd adds the second to it in place.

Note [Peeking]
    ``safe_get_full_grad`` and friends want the synced gradient before the step. A peek syncs and then zeroes every row
    but the rank's own, so that the sum over the ranks that share a row is still the gradient: more micro-batches and
    the step's own sync stay right, at the price of a second sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_topo.collectives.meter import Meter
from zero_topo.collectives.pack import in_tree_order, rows_of, shard_piece
from zero_topo.collectives.reduce_scatter import Sums, reduce_scatter
from zero_topo.collectives.wire import Wire
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Mesh
from zero_topo.quant.pieces import Piece, piece_of
from zero_topo.quant.reference import Reduce
from zero_topo.sync.base import SyncMode


@dataclass(frozen=True)
class GradientOptions:
    """Wire format of the scatter and dtype of the accumulation buffer."""

    wire: Wire
    accumulation_dtype: torch.dtype


class Gradients:
    """This rank's gradient shard.

    Attributes:
        buffer: ``[N / G, F]``; sums over this gradient domain, divided by N. Row ``t // G`` is DeepSpeed's
            ``grad_partitions_flat_buffer``.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        meter: Meter,
        mode: SyncMode,
        options: GradientOptions,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.buffer = torch.zeros(layout.shape(layout.plan.gradients), dtype=options.accumulation_dtype, device=device)
        self.mode = mode
        self._mesh, self._meter, self._options = mesh, meter, options
        self._dirty = False
        self._pending = False

    def scatter(self, slots: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Reduce-scatter one bucket of whole gradients over the gradients domain, and add the result to the buffer.

        1. each destination's message holds its shards of the bucket's gradients, read where they lie;
        2. one reduce hop (two for ``(L, G)``: inside the node, then across);
        3. divide by the world size, and add; ranks whose own row is padding take part like any other.

        Args:
            slots: the parameters, in the same order on every rank.
            grads: their gradients, each ``ds_numel`` elements, any floating dtype.
        """
        plan = self.layout.plan
        hops = [self._mesh.hop(lo, hi) for lo, hi in plan.hop_chain()]
        flats = [in_tree_order(grad.reshape(-1), plan) for grad in grads]
        parts = [[shard_piece(flat, plan, k, plan.gradients) for flat in flats] for k in range(plan.gradients)]
        reduce = Reduce(1.0 / plan.world_size, accumulate=True)
        sums = Sums([self._slot_piece(index) for index in slots], self._meter, "scatter", reduce)
        reduce_scatter(hops, parts, self._options.wire, sums)
        self._dirty = self._pending = True

    def _slot_piece(self, index: int) -> Piece:
        piece = piece_of(self.layout.slot(self.buffer, index))
        assert piece is not None
        return piece

    def sync(self) -> None:
        """Reduce across gradient domains; afterwards the optimizer's rows hold the world's mean gradient."""
        self.mode.sync(self.buffer)
        self._pending = False

    def peek(self) -> Tensor:
        """The rank's own row, synced, ``[F]``; collective (see Note [Peeking]). Writing to it changes the gradient."""
        own = self.layout.row(self.layout.plan.gradients)
        if self._pending:
            self.sync()
            self.buffer[:own].zero_()
            self.buffer[own + 1 :].zero_()
        self._dirty = True
        return self.buffer[own]

    def replace(self, index: int, full: Tensor) -> None:
        """Make a whole tensor, alike on every rank, the synced gradient of a slot; collective."""
        plan = self.layout.plan
        rows = rows_of(full.reshape(-1), plan)
        self.layout.slot(self.peek()[None], index)[0].copy_(rows[plan.position(self.layout.rank)])

    def optimizer_rows(self) -> Tensor:
        """The synced gradient of the rank's optimizer shard, ``[N / O, F]``, a strided view of the buffer."""
        return self.layout.subset(self.buffer, self.layout.plan.gradients, self.layout.plan.optimizer)

    def zero(self) -> None:
        """Forget all accumulated gradients."""
        if self._dirty:
            self.buffer.zero_()
        self._dirty = self._pending = False
