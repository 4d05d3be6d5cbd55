# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Quantized sync: sends gradients between gradient domains as INT8 or NF4, with error feedback.

Note [Error feedback]
    Let ``g`` be this rank's gradient shard and ``e`` the residual of earlier steps. The rank sends
    ``q = Q(g + e)`` to the owners of its rows and keeps ``e' = (g + e) - q``. The sum of all values
    it ever sent is therefore the sum of all gradients minus the current ``e`` (1-bit SGD, Seide et
    al. 2014; EF-SGD, arXiv 1901.09847). It adds its own row without quantization, so that row has
    no ``e``.

The residual lies in the gradient shard
    ``e`` needs no separate buffer: ``q`` is subtracted from ``g + e`` in place, and the next step's
    gradients are added to the result instead of to zero. ``e`` then has the rounding of the
    gradient shard, once when ``q`` is subtracted and once with each gradient added. In BF16 a
    gradient below 2^-9 of its element's residual adds nothing, so an element that stays below 1e-4
    of its block's largest may never be sent (FP32 loses half as many of them);
    ``"accumulation_dtype": "fp32"`` avoids that for 2 more bytes per element.

    A skipped step, or a ``zero_grad`` that drops gradients, also drops the residual, which is part
    of them. In BF16 and FP32 DeepSpeed skips a step only for a gradient that is not finite. In FP16
    a loss scaler skips steps in normal operation, and changes the scale. There ``e`` is copied,
    unscaled, to an FP32 residual once a step is known not to be skipped, and added again when the
    run is started.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.config.sync_config import QuantizedSync
from zero_topo.quant.operands import Range, merged, packed_ranges, range_views
from zero_topo.quant.ops import cast_to, dequantize, dequantize_reduce, quantize
from zero_topo.sync.base import ResidualOwners, SyncContext, build_mode
from zero_topo.sync.crossing import Crossing, spread_back

logger = logging.getLogger(__name__)


class Quantized(Crossing):
    """All-to-all of quantized rows to the optimizer shards, with error feedback.

    1. if a gradient domain is smaller than a node: dense reduction inside the node, over
       ``(G, L)``;
    2. quantize rows with their residual, and send them by one all-to-all over ``(max(G, L), N)``;
       the quantization error stays in the rows. See Note [Error feedback];
    3. the owner adds the packed buffers, in tree order, to its own row in FP32;
    4. if optimizer shards are replicated: gather the sums back to them, unquantized.

    Attributes:
        wire: format of the packed buffers.
        residual: unscaled residual, FP32 ``[P - 1, F]``, one row per other peer, if a loss scaler
            may skip steps; else None.
        residual_in_shard: whether the residual lies in the gradient shard instead.
    """

    def __init__(self, config: QuantizedSync, context: SyncContext) -> None:
        super().__init__(context, cast_to(context.dtype))
        self._down = context.across(context.plan.optimizer)
        self.wire = config.spec
        has_residual = self.peers.size > 1
        self.residual_in_shard = has_residual and not context.loss_scaled
        self.residual: Tensor | None = None
        if has_residual and context.loss_scaled:
            shape = (self.peers.size - 1, context.columns)
            self.residual = torch.zeros(shape, dtype=torch.float32, device=context.device)
        # By run, the residual while delivered gradients are in its place in the shard: `start`
        # stores it on sync's queue, `reopen` or `commit` writes it back.
        self._saved_residuals: dict[tuple[Range, ...], Tensor] = {}
        # Runs of this step whose residual is in the gradients already: a run may start twice in a
        # step.
        self._residual_added: set[tuple[Range, ...]] = set()
        # The loss scale of this step's gradients; the residual is stored unscaled.
        self._scale = 1.0
        # Whether the warning about a dropped residual was logged (once per run).
        self._warned = False

    def start(self, shard: Tensor, ranges: Sequence[Range], scale: float) -> Handle[None]:
        """Begin to sum inside the node, or to send a run's packed buffers; later stages do the
        rest.
        """
        if self.peers.size == 1:
            return Handle()
        run = tuple(ranges)
        self._add_residual(shard, run, scale)
        if self._inner is not None:
            return self.start_table(shard, run).then(lambda table: self._send(shard, run, table))
        rows = shard
        if self._down.size > 1:
            rows = self.table(shard, run)
        return self._send(shard, run, rows)

    def _send(self, shard: Tensor, run: tuple[Range, ...], rows: Tensor) -> Handle[None]:
        """Begin to send a run's rows, which are those of the shard or a copy; received ones are
        added in a stage.
        """
        own = self.peers.index
        copied = rows is not shard
        places = packed_ranges(run) if copied else run
        # One row per group rank, each range padded to whole blocks.
        block = self.wire.block_size
        if copied:
            views = range_views(rows[:, None], merged(places, block), block)
        else:
            views = self.context.views(rows[:, None], places, block)
        # In memory of the group that sends it; the own row is added uncompressed, so nothing is
        # written for it.
        messages = quantize(views, self.wire, without=own)
        across = self.peers.begin("all_to_all", messages)
        dequantize(messages, self.wire, views, -1.0, accumulate=True, without=own)

        def finish(received: Tensor) -> Handle[None] | None:
            mine = [view.member(own) for view in views]
            dequantize_reduce(received, self.wire, mine, accumulate=True, without=own)
            if copied:
                self.deliver(shard, run, rows, slice(own, own + 1))
                self._saved_residuals[run] = rows
            if self._down.size == 1:
                self._restore_residual(shard, run)
            return spread_back(self.context, shard, run, self._down, self._dense_wire)

        return across.then(finish)

    def _halves(self) -> tuple[tuple[slice, slice], ...]:
        """Return slices of the group ranks before and after this one, each with their rows of the
        residual.
        """
        own = self.peers.index
        return (slice(own), slice(own)), (slice(own + 1, None), slice(own, None))

    def _add_residual(self, shard: Tensor, ranges: tuple[Range, ...], scale: float) -> None:
        """Add the residual of a run, if there is one, to its gradients, once in a step."""
        if self.residual is None or ranges in self._residual_added:
            return
        self._residual_added.add(ranges)
        self._scale, rows = scale, self.rows(shard)
        for begin, end in merged(ranges):
            for others, kept in self._halves():
                rows[others, begin:end].add_(self.residual[kept, begin:end], alpha=scale)

    def _restore_residual(self, shard: Tensor, ranges: tuple[Range, ...]) -> None:
        """Write the residual of a run back to its rows of the gradient shard; only the own row is
        unchanged.
        """
        left = self._saved_residuals.pop(ranges, None)
        if left is None:
            return
        super().reopen(shard, ranges)
        for others, _ in self._halves():
            self.deliver(shard, ranges, left, others)

    def reopen(self, shard: Tensor, ranges: Sequence[Range]) -> None:
        """Keep the delivered sum in the own row, and write the residual, if any, to the other
        rows.
        """
        self._restore_residual(shard, tuple(ranges))

    def commit(self, skipped: bool) -> None:
        """Keep the residual for the next step; after a skipped step only a separate residual buffer
        survives.
        """
        shard = self.context.shard
        for ranges in () if skipped else tuple(self._saved_residuals):
            self._restore_residual(shard, ranges)
        self._saved_residuals.clear()
        if self.residual is not None and self._residual_added and not skipped:
            for others, kept in self._halves():
                self.residual[kept] = self.rows(shard)[others]
            # Stored without the loss scale, which may be another one in the next step.
            self.residual.div_(self._scale)
        self._residual_added.clear()
        if self.residual_in_shard and not skipped:
            shard[self.context.own_row].zero_()
            return
        super().commit(skipped)
        if self.residual_in_shard and not self._warned and self.context.mesh.rank == 0:
            self._warned = True
            logger.warning(
                "zero_topo: gradients were dropped (a skipped step, or zero_grad before the step), "
                "and with them the residual of quantized sync, which is stored in the same buffer"
            )

    def note(self) -> str | None:
        """Return a log line if a loss scaler requires a separate residual buffer."""
        if self.residual is None:
            return None
        return (
            "FP16 may skip steps, so the residual of quantized sync has an FP32 buffer of "
            f"{self.residual.nbytes} bytes per rank; with BF16 it is stored in the gradient shard "
            "and takes no memory of its own"
        )

    # -- state -------------------------------------------------------------------------------------

    def state_bytes(self) -> int:
        """Return the bytes of the separate residual buffer."""
        return 0 if self.residual is None else self.residual.nbytes

    def tensors(self) -> list[Tensor]:
        """Return the separate residual buffer, if there is one."""
        return [] if self.residual is None else [self.residual]

    def residual_rows(self) -> Tensor | None:
        """Return the gradient shard's rows, own row included, if they store the residual; else the
        residual buffer.
        """
        if self.residual_in_shard:
            return self.rows(self.context.shard)
        return self.residual

    def store_residual(self, rows: Tensor) -> None:
        """Invert :meth:`residual_rows`."""
        stored = self.residual_rows()
        assert stored is not None
        stored.copy_(rows)

    def residual_owners(self) -> ResidualOwners | None:
        """Return the owners: all peers if the residual is in the gradient shard, else all but this
        rank.
        """
        if self.peers.size == 1:
            return None
        owners = self.members()
        if not self.residual_in_shard:
            owners.remove(self.context.mesh.rank)
        columns = {p.name: (p.numel, *p.shard_range) for p in self.context.parameters}
        return ResidualOwners(owners, columns)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the residual; call it only between steps."""
        rows = self.residual_rows()
        return {} if rows is None else {"residual": rows.contiguous()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the residual, or reset it to zero; raise ValueError for another shape."""
        rows = self.residual_rows()
        if rows is None:
            return super().load_state_dict(state)
        if not state:
            rows.zero_()
            return
        self.check_shapes(state, {"residual": rows})
        self.store_residual(state["residual"])


build_mode.register(QuantizedSync, Quantized)
