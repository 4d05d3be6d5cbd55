# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The gradient shards: scatter, accumulation, sync, and the gradients that the optimizer reads.

Note [Zeroed, then added]
    Every micro-batch adds to the gradient buffer. The buffer is zeroed after each optimizer step,
    after a skipped step (overflow) and by ``zero_grad``, except for a residual (below). Stock stage
    3 instead overwrites the buffer in the first micro-batch. A parameter without a gradient in that
    micro-batch would then keep the last step's gradient, and a parameter whose hook fires twice in
    a backward pass (used inside and outside a reentrant checkpoint) would lose the first part. If
    the first part is still in the bucket, autograd adds the second to it in place.

Note [Peeking]
    ``safe_get_full_grad`` and similar functions read the synced gradient before the step. A peek
    finishes the sync, and the step does not repeat it. Gradients of a further micro-batch reopen
    their runs: the delivered sum stays in the rank's own row only, so the sum over the ranks that
    share a row is still the gradient, and sync runs again. A user's write to the own row does the
    same if the optimizer reads rows of other ranks too.

Note [Residual in the buffer]
    A mode of sync may leave its residual in the buffer, outside the rank's own row, for the next
    step. If no gradients were added since the step, ``zero_grad`` keeps the residual (DeepSpeed
    calls it after each step). Otherwise ``zero_grad`` drops the residual together with the
    gradients.

Note [Sync under backward]
    Parameters are synced in runs of neighbours, in any order. In the last micro-batch a run begins
    as soon as all its gradients have been scattered; the step begins the other runs and waits for
    all. A late gradient (of a parameter used inside and outside a reentrant checkpoint) reopens its
    run.

Note [Staged scatter]
    A scatter in two groups sends inside the node and then between nodes, each through links of its
    own. The second exchange of a bucket therefore runs under the first one of the next bucket: a
    bucket is finished when the next has begun, and the last of a pass in DeepSpeed's epilogue. The
    messages of two buckets exist for that time.

Note [Sums of the backend]
    Gradients that are not quantized are summed by the backend's own reduce-scatter in a group that
    lies in one node or has at most 8 ranks: as fast as unmodified ZeRO-3, and without a receive
    buffer for the messages of all ranks. It adds in the type sent, ``communication_data_type``, as
    ZeRO-3 does. The error of BF16 sums grows with the ranks (0.4% of a gradient for 8, 2% for 384
    in a simulation), and a ring's time too, so larger groups exchange messages, which are added in
    FP32. gloo has no such reduce-scatter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from operator import and_

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle, Queues
from zero_topo.collectives.transport import reduce_scatter, shard_view
from zero_topo.engine.shards import Layout
from zero_topo.plan import packed_runs
from zero_topo.quant.operands import range_views
from zero_topo.quant.ops import cast_to
from zero_topo.quant.spec import Format
from zero_topo.sync.base import SyncMode

logger = logging.getLogger(__name__)


class Gradients:
    """This rank's gradient shard.

    Args:
        layout: of the trained parameters.
        mode: the mode of sync; its mesh has the groups ``(1, gradients)``.
        wire: format of the scatter.
        backend: for each of its groups, whether the backend may add; see Note [Sums of the
            backend].
        loss_scale: returns the current loss scale.
        queues: those of scatters in two groups, and of sync.
        averaged: number of ranks over whose gradients the mean is taken, if more than the plan has:
            of experts.

    Attributes:
        mode: the mode of sync.
        backend: for each group of the scatter, whether the backend adds.
    """

    def __init__(
        self,
        layout: Layout,
        mode: SyncMode,
        wire: Format,
        backend: Sequence[bool],
        loss_scale: Callable[[], float],
        queues: Queues,
        averaged: int | None = None,
    ) -> None:
        self.layout = layout
        self.mode = mode
        self._wire = wire
        self._loss_scale = loss_scale
        mesh = mode.context.mesh
        self._meter = mesh.meter
        self._queue = queues.updates
        self._averaged = averaged or layout.plan.world_size
        # By parameter, its columns of the buffer
        self._views = range_views(self.buffer, layout.shard_ranges(range(len(layout.numels))))
        self._hierarchy = mesh.hierarchy(1, layout.plan.gradients).metered("scatter")
        groups = self._hierarchy.groups
        sums = [group.sums for group in groups]
        self.backend = tuple(map(and_, backend, sums))
        # See Note [Staged scatter].
        staged = len(groups) > 1 and queues.scatters.overlaps
        self._scatters = queues.scatters if staged else None
        self._scattered: Handle[None] = Handle()
        # Parameters whose scatter has begun and not ended.
        self._coming: set[int] = set()
        self._runs = packed_runs(layout.padded_numels, mode.context.run_numel)
        self._run_of = [run for run, param_indices in enumerate(self._runs) for _ in param_indices]
        # By run, parameters that the last micro-batch has not scattered yet: sync of a run begins
        # when none is left.
        self._missing = [set(param_indices) for param_indices in self._runs]
        # By run, sync in progress: the queue's stream reads and writes the run's columns of the
        # buffer. The step, and a scatter that reopens the run, wait for the handle.
        self._started: dict[int, Handle[None]] = {}
        # Whether gradients were added since the last step: if not, `zero_grad` has nothing to drop.
        self._added = False
        # Whether a peek returned the own row, so its reader may have written to it: `zero_grad`
        # then clears it.
        self._shown = False
        # Whether the own row is the synced gradient, because nothing was added since sync: a peek
        # then needs no sync.
        self._current = True

    def scatter(
        self,
        param_indices: Sequence[int],
        grads: Sequence[Tensor],
        last: bool,
        sent: torch.dtype | None = None,
    ) -> bool:
        """Reduce-scatter one bucket of whole gradients over the gradients domain, and add the
        result to the buffer.

        1. pack for each destination its shards of the bucket's gradients, read in place;
        2. reduce over one group (two for ``(L, G)``: inside the node, then across);
        3. divide by the number of data-parallel ranks, and add; ranks whose own row is padding take
           part too.

        Args:
            param_indices: the parameters, in the same order on every rank.
            grads: their gradients, each ``ds_numel`` elements, any floating dtype.
            last: whether this is the step's last micro-batch, in which sync begins (Note [Sync
                under backward]).
            sent: the dtype in which they are sent if the format does not quantize; None is the
                format's own.

        Returns:
            Whether sync of one of these parameters had begun already, and must be repeated.
        """
        if not self._coming.isdisjoint(param_indices):
            # A late gradient, whose first part must not begin sync.
            self.finish_scatter()
        repeated = self.reopen(param_indices)
        wire = self._wire if self._wire.lossy or sent is None else cast_to(sent)
        begin = partial(self._begin_scatter, param_indices, grads, wire)
        with self._meter.timing("scatter"):
            if self._scatters is None:
                begin().wait()
                self.mark_added(param_indices, last)
                return repeated
            older = self._scattered
            self._coming.update(param_indices)
            self._scattered = self._scatters.run(begin, grads)
            self._scattered.then(lambda _: self._end_scatter(param_indices, last))
            older.wait()
        return repeated

    def _begin_scatter(
        self, param_indices: Sequence[int], grads: Sequence[Tensor], wire: Format
    ) -> Handle[None]:
        plan = self.layout.plan
        # Read in place where ranks are placed in tree order; else one copy a gradient.
        flats = [self.layout.in_tree_order(grad.reshape(-1)) for grad in grads]
        parts = [shard_view(flat, plan, plan.gradients) for flat in flats]
        views = [self._views[index] for index in param_indices]
        # The mean of all ranks, before sums leave the node: no scale depends on the plan.
        mean = 1.0 / self._averaged
        return reduce_scatter(self._hierarchy, parts, wire, views, mean, True, self.backend)

    def _end_scatter(self, param_indices: Sequence[int], last: bool) -> None:
        self._coming.difference_update(param_indices)
        self.mark_added(param_indices, last)

    def finish_scatter(self) -> None:
        """Finish the last scatter; on a GPU the current stream waits for it."""
        if self._coming:
            with self._meter.timing("scatter"):
                self._scattered.wait()

    def reopen(self, param_indices: Sequence[int] | None = None) -> bool:
        """Reopen the runs of some parameters whose sync has begun, and return whether there are
        any.

        Args:
            param_indices: the parameters; None is all of them, each of which may then get another
                gradient before sync begins.
        """
        if param_indices is None:
            self._missing = [set(param_indices) for param_indices in self._runs]
            param_indices = range(len(self._run_of))
        if not self._started:  # the usual case, without a look at each parameter
            return False
        runs = {self._run_of[param_index] for param_index in param_indices}
        started = sorted(runs & self._started.keys())
        self._reopen(started)
        return bool(started)

    def mark_added(self, param_indices: Sequence[int], last: bool) -> None:
        """Record that gradients were added to the buffer, and begin sync of runs that are complete.

        Args:
            param_indices: their parameters, in the same order on every rank.
            last: whether this is the step's last micro-batch.
        """
        self._added = True
        self._current = False
        if last and self._queue.overlaps:
            # In one order, since ranks must begin the same collectives.
            runs = sorted({self._run_of[param_index] for param_index in param_indices})
            for param_index in param_indices:
                self._missing[self._run_of[param_index]].discard(param_index)
            self._start([run for run in runs if not self._missing[run]])

    def _start(self, runs: Sequence[int]) -> None:
        scale = self._loss_scale()
        with self._meter.timing("sync"):
            for run in runs:
                shard_ranges = self.layout.shard_ranges(self._runs[run])
                self._started[run] = self._queue.run(
                    partial(self.mode.start, self.buffer, shard_ranges, scale)
                )

    def _wait(self) -> None:
        with self._meter.timing("sync"):
            for run in sorted(self._started):
                self._started[run].wait()

    def _reopen(self, runs: Sequence[int]) -> None:
        with self._meter.timing("sync"):
            for run in runs:
                # Sync writes to the run's columns until then.
                self._started.pop(run).wait()
                self.mode.reopen(self.buffer, self.layout.shard_ranges(self._runs[run]))

    def sync(self) -> None:
        """Reduce across gradient domains; afterwards the optimizer's rows hold the world's mean
        gradient.
        """
        if self._coming:
            self.finish_scatter()
        self._start([run for run in range(len(self._runs)) if run not in self._started])
        self._wait()
        self._current = True

    @property
    def buffer(self) -> Tensor:
        """``[N / G, F]``, the sums over this gradient domain, divided by N."""
        return self.mode.context.shard

    @property
    def own_row(self) -> Tensor:
        """The rank's own world shard, ``[F]``: DeepSpeed's ``grad_partitions_flat_buffer``."""
        return self.buffer[self.mode.context.own_row]

    def peek(self, write: bool = False) -> Tensor:
        """Return the synced own row ``[F]``. Collective (Note [Peeking]).

        Args:
            write: whether the caller changes the gradient by writing to the row.
        """
        self.finish_scatter()
        if not self._current:
            self.sync()
        if write and self.layout.plan.optimizer < self.layout.plan.world_size:
            self._reopen(sorted(self._started))
        self._shown = True
        return self.own_row

    def replace(self, index: int, full: Tensor) -> None:
        """Replace a parameter's synced gradient by a whole tensor, equal on every rank;
        collective.
        """
        plan = self.layout.plan
        rows = self.layout.rows(full.reshape(-1))
        self.layout.parameter(self.peek(write=True)[None], index)[0].copy_(
            rows[plan.position(self.layout.rank)]
        )

    def optimizer_rows(self) -> Tensor:
        """Return the synced gradient of the rank's optimizer shard, ``[N / O, F]``, a strided view
        of the buffer.
        """
        return self.layout.subset(
            self.buffer, self.layout.plan.gradients, self.layout.plan.optimizer
        )

    def end_step(self, skipped: bool) -> None:
        """Commit the mode's state after an optimizer step, or drop it after a skipped one; clear
        the gradients.
        """
        self._wait()
        self._started.clear()
        self._missing = [set(param_indices) for param_indices in self._runs]
        self._current = True
        with self._meter.timing("sync"):
            self.mode.commit(skipped)
        self._added = self._shown = False

    def tensors(self) -> list[Tensor]:
        """Return the buffer and the mode's tensors, without views of them."""
        return [self.buffer, *self.mode.tensors()]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the mode's state; empty, with a warning, if gradients were added to a residual in
        the buffer.
        """
        if not (self._added and self.mode.residual_in_shard):
            return self.mode.state_dict()
        if self.layout.rank == 0:
            logger.warning(
                "zero_topo: saved between a backward pass and its step: the residual of sync is "
                "not saved, because gradients were added to it; save after a step to keep it"
            )
        return {}

    def zero(self) -> None:
        """Drop all gradients that were added since the step (Note [Residual in the buffer])."""
        self.finish_scatter()
        if self._added or self._started:
            self.end_step(skipped=True)
        elif self._shown:
            self.own_row.zero_()
            self._shown = False
