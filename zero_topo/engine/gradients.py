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
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from zero_topo.collectives.meter import Meter
from zero_topo.collectives.pack import members, rows_of
from zero_topo.collectives.reduce_scatter import Wire, reduce_scatter
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Mesh
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

    def scatter(self, slots: Sequence[int], grads: Sequence[Tensor]) -> Tensor:
        """Reduce-scatter one bucket of whole gradients over the gradients domain.

        1. interleave the gradients by destination, ``[members, rows, columns]``, padded with zeros;
        2. one reduce hop (two for ``(L, G)``: inside the node, then across);
        3. divide by the world size.

        Args:
            slots: the parameters, in the same order on every rank.
            grads: their gradients, each ``ds_numel`` elements, any floating dtype.

        Returns:
            FP32 ``[N / G, sum of widths]``.
        """
        plan, wire = self.layout.plan, self._options.wire
        shard: Tensor | None = None
        for lo, hi in plan.hop_chain():
            hop = self._mesh.hop(lo, hi)
            chunks = self._pack(slots, grads, hop.size) if shard is None else members(shard, hop.size).contiguous()
            total = reduce_scatter(hop, chunks.flatten(1), wire, self._meter, "scatter")
            shard = total.view(plan.world_size // hi, -1)
        assert shard is not None
        return shard.mul_(1.0 / plan.world_size)

    def _pack(self, slots: Sequence[int], grads: Sequence[Tensor], size: int) -> Tensor:
        plan = self.layout.plan
        ends = list(accumulate((self.layout.widths[i] for i in slots), initial=0))
        # quantization reads the values once more anyway: leave them in the gradient's own dtype for it
        dtype = self._options.wire.dtype if self._options.wire.spec is None else grads[0].dtype
        chunks = torch.empty(size, plan.world_size // size, ends[-1], dtype=dtype, device=grads[0].device)
        for (begin, end), grad in zip(pairwise(ends), grads, strict=True):
            chunks[:, :, begin:end].copy_(members(rows_of(grad.reshape(-1), plan), size))
        return chunks

    def accumulate(self, slots: Sequence[int], shard: Tensor) -> None:
        """Add a scattered bucket into the buffer. Ranks whose own row is padding take part like any other."""
        ends = accumulate((self.layout.widths[i] for i in slots), initial=0)
        for index, (begin, end) in zip(slots, pairwise(ends), strict=True):
            self.layout.slot(self.buffer, index).add_(shard[:, begin:end])
        self._dirty = self._pending = True

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
