# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The weight shards: primary and secondary copies, gathers from them, and publish.

Quantized gathers
    Each parameter is quantized separately: no block spans two parameters. The value a layer
    computes with therefore does not depend on which bucket or prefetch carried it, and a norm's
    weights never share a scale with a matrix. Persistent parameters
    (``stage3_param_persistence_threshold``) are gathered exactly.

Note [Which copy is read]
    Forward gathers read the primary shards, also when DeepSpeed's prefetch starts them in the
    forward pass for use in the backward pass. Every gather inside the backward pass, the
    recomputation of activation checkpoints included, reads the secondary shards if there are any. A
    secondary at least as wide as the weights domain (S a multiple of W) is a subset of the primary:
    it is requantized locally right after publish, and with S = W and equal specs the forward sends
    those same bytes, so weights are quantized once per optimizer step. A narrower one (ZeRO++:
    weights over the world, secondary over the node) is captured from the forward gather, and is
    stamped with the version of the weights: a parameter that no forward has gathered since the last
    publish is gathered from the primary again, never from a stale copy.

Note [Publish before gather]
    On a GPU, gathers run on one stream, publish on another, and edits and loads on the caller's.
    Every change of the shards therefore records an event. The next reader or writer first makes its
    stream wait for that event, so the last event covers all earlier ones. On a CPU collectives
    block, and there is no event.

Delta publish
    With ``"delta"`` the owner of a row sends ``q = Q(master - w)``, where ``w`` is the row as every
    rank stores it. Every rank, the owner included, replaces ``w`` by ``w + q``: one FP32 sum,
    rounded once to the dtype of the weights. All ranks do the same arithmetic on the same bits, so
    all copies stay bit-identical. The error of ``q`` and of the rounding is part of the next
    difference: the FP32 master serves as error feedback. Each row of a parameter is padded to whole
    blocks, so a norm never shares a scale with a matrix.

Publish under forward
    Updated parameters are collected over all sub-groups of the optimizer. Their publish begins
    (:meth:`Weights.begin`) when the first of them is needed or the step ends. Persistent parameters
    are published first, in separate runs: DeepSpeed gathers them at the end of the step, which
    waits for these runs only. Other runs follow in the order in which the model needs them:
    vectors, often a separate sub-group, are needed by the first module. A run is finished when a
    gather first needs one of its parameters (:meth:`Weights.wait_for_publish`). Each parameter has
    a version count, and a gather of a stale version raises an error instead of reading it.

Note [INT8 weights]
    A quantized gather rounds the weights of a shard to INT8 before it sends them, and nothing else
    reads the shard. With ``quantize.resident`` a rank therefore stores only the INT8 weights, which
    forward and backward gathers send unchanged, and exact weights only for the rows that its
    optimizer updates. After each update the owner of a row requantizes it from the FP32 masters and
    sends the changes (Note [Codes] in ``ops.py``), which the others apply. All ranks store the INT8
    values of the masters, bit for bit, so rounding errors never accumulate.

    A block lies within one row of one parameter. If rows are shorter than blocks, INT8 weights
    would be mostly padding: parameters of one dimension, small ones, and persistent ones stay in
    the model's dtype (``coded_params`` in ``plan.py``). Only these have columns in the primary
    shard. Both kinds share one set of parameter indices, and one collective gathers both.

Note [Exact weights]
    Exact weights of INT8 parameters (for ``GatheredParameters`` and checkpoints) are the owners'
    rows, gathered over the optimizer's domain. DeepSpeed treats every save of a model as an edit of
    it, so a write counts as an edit only if it changed a bit of some row.

Note [Frozen]
    Parameters that no optimizer updates follow the trained ones: their columns lie behind those of
    DeepSpeed's flat buffers. Their world shards are DeepSpeed's own, so checkpoints and exact
    gathers have the exact values. They are published once, and again after a load. A rank owns no
    more of them than its world shard, at any optimizer degree. A gather has either trained or
    frozen parameters.

    A secondary copy narrower than the weights (S < W) is filled once, from the exact values: each
    rank gathers its ``N / S`` rows from the ranks that have them. All gathers of both passes then
    read it, so frozen weights cross nodes once per run, and both passes compute with the same
    values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle, Queues
from zero_topo.collectives.transport import (
    Hierarchy,
    all_gather,
    all_gather_rows,
    all_gather_views,
    members,
    rows_of,
)
from zero_topo.config import ResolvedConfig
from zero_topo.engine.codes import Begun, CodeStore, Update
from zero_topo.engine.copies import Copy, Secondary, gather, kept_until
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Mesh
from zero_topo.plan import Phase, coded_params, packed_runs
from zero_topo.quant.operands import Range, View, merged, packed_ranges, range_views
from zero_topo.quant.ops import cast_to, dequantize, quantize
from zero_topo.quant.spec import BlockSpec, Format
from zero_topo.sync import Parameter


class Weights:
    """This rank's weight shards.

    Args:
        config: the plan and the formats.
        parameters: the trained parameters in DeepSpeed's flat order, then the frozen ones.
        count: number of trained parameters.
        like: a tensor of the model's dtype on the accelerator.
        run_numel: elements per collective of publish.
        publish: the format of publish; if it quantizes, of differences to the masters.
        mesh: the groups.
        queues: the ordered queues of gathers and of publish.

    Attributes:
        layout: of all parameters, the frozen ones last.
        trained: the parameters that an optimizer updates.
        frozen: the others (Note [Frozen]).
        coded: by parameter, whether it is stored as INT8.
        primary: ``[N / W, ...]`` in the model's dtype: the columns of trained parameters that are
            not INT8.
        frozen_primary: the columns of frozen parameters that are not INT8.
        own: ``[N / O, F]``: the rows that this rank's optimizer updates, of all trained parameters;
            a strided view of the primary if no weights are INT8.
        own_row: ``[F]``, a view of ``own``: the rank's own world shard, DeepSpeed's flat parameter
            buffer.
        frozen_row: the rank's own world shard of frozen parameters.
        secondary: the copies of trained parameters from which the backward pass gathers.
        frozen_secondary: those of frozen parameters; if captured, forward gathers read them too.
        needs_masters: whether :meth:`mark_updated` needs the FP32 masters; it then updates the
            optimizer's rows itself.
    """

    _store: CodeStore | None = None
    _fill_hierarchy: Hierarchy | None = (
        None  # of the copies of frozen parameters, if they are filled
    )

    def __init__(
        self,
        config: ResolvedConfig,
        parameters: Sequence[Parameter],
        count: int,
        like: Tensor,
        run_numel: int,
        publish: Format,
        mesh: Mesh,
        queues: Queues,
    ) -> None:
        plan = config.plan
        int8 = config.resident_spec
        param_indices = range(len(parameters))
        numels = tuple(p.numel for p in parameters)
        self.trained = param_indices[:count]
        self.frozen = param_indices[count:]
        self._mesh = mesh
        self._meter = mesh.meter
        self._run_numel = run_numel
        self._gathering = queues.gathers
        self._queue = queues.updates
        self.layout = layout = Layout(plan, mesh.rank, numels)
        self.coded: Sequence[bool] = [False] * len(param_indices)
        if int8 is not None:
            dims = [p.dims for p in parameters]
            persistent = [p.persistent for p in parameters]
            self.coded = coded_params(plan, numels, dims, persistent, int8.block_size)
        kept = [0 if coded else numel for coded, numel in zip(self.coded, numels, strict=True)]
        self._rows = Layout(plan, mesh.rank, tuple(kept))
        height, width = self._rows.shape(plan.weights)
        split = self._rows.columns_of(self.trained).stop
        # Two tensors, because saving a view saves its whole storage: FP32 masters are views of the
        # primary.
        self.primary, self.frozen_primary = (
            like.new_zeros(height, split),
            like.new_zeros(height, width - split),
        )
        # On a GPU, recorded on the stream that changed the shards last; the next reader or writer
        # waits for it.
        self._updated: torch.Event | None = None
        # By parameter, the copies that exact gathers send, and those that gathers of a pass send.
        hierarchy = mesh.hierarchy(1, plan.weights)
        exact = cast_to(like.dtype)
        self._exact = [
            Copy(hierarchy, self._primary_of(param_indices[param_index : param_index + 1]), exact)
            for param_index in param_indices
        ]
        plain = [cast_to(p.sent or like.dtype) for p in parameters]
        sent = [config.weights_spec or wire for wire in plain]
        self._shards = [
            Copy(hierarchy, copy.data, wire) for copy, wire in zip(self._exact, sent, strict=True)
        ]
        # Persistent parameters are published first, the others in the order in which the model
        # needs them.
        self._planned = partial(
            runs_of, [(not p.persistent, p.place) for p in parameters], run_numel
        )
        self._row_sizes = {
            param_index: layout.padded_numels[param_index]
            for param_index in self.trained
            if not self.coded[param_index]
        }
        self._hierarchy = mesh.hierarchy(plan.weights, plan.optimizer).metered("publish")
        self._wire = publish
        self.needs_masters = publish.lossy or int8 is not None
        self.own = self._updatable = self._rows.subset(self.primary, plan.weights, plan.optimizer)
        self.frozen_row = self.frozen_primary[layout.row(plan.weights)]
        # Each begins the runs of the updated parameters that it sends in its format.
        self._codecs: list[Callable[[Sequence[Update]], Begun]] = [self._begin_rows]
        if int8 is not None:
            self._build_int8(int8.block_size)
            self._codecs = [self._begin_rows_of_int8, self._begin_codes]
        self.own_row = self.own[layout.row(plan.optimizer)]
        # By parameter: the number of updates, and the number of finished publishes. The host counts
        # both; a gather compares them, so no weights are read between their update and the end of
        # their publish.
        self._updated_times = [0] * len(param_indices)
        self._published_times = [0] * len(param_indices)
        # Updates of this step whose publish has not begun: the first reader or the step's end
        # begins all.
        self._updates: list[Update] = []
        # Runs begun, oldest first: the queue's stream writes the shards; whoever has waited for the
        # handle may read.
        self._pending: list[tuple[Sequence[int], Handle[None]]] = []
        self._forward = list(self._shards)
        self.secondary = self._build_secondary(config, self.trained, plain, queues)
        self.frozen_secondary = self._build_secondary(
            config.of_frozen(), self.frozen, plain, queues
        )
        # By parameter, that of the two which has its copy.
        self._secondary = [self.secondary] * count + [self.frozen_secondary] * len(self.frozen)
        self._filled = [
            param_index for param_index in self.frozen if not parameters[param_index].persistent
        ]

    def _build_secondary(
        self, config: ResolvedConfig, param_indices: range, plain: Sequence[Format], queues: Queues
    ) -> Secondary:
        """Build secondary copies of trained or frozen parameters, and set what their forward
        gathers send.
        """
        plan = config.plan
        spec = config.secondary_spec
        degree = plan.secondary if config.resident_spec is None and plan.weights > 1 else None
        queue = queues.copies if config.secondary_on == "host" else None
        wires = [spec or wire for wire in plain]
        built = Secondary(self._rows, self._mesh, self._shards, param_indices, degree, wires, queue)
        if degree == plan.weights and spec == config.weights_spec:
            self._forward[param_indices.start : param_indices.stop] = built.copies[
                param_indices.start : param_indices.stop
            ]
        if built.captured and param_indices is self.frozen:
            self._fill_hierarchy = self._mesh.hierarchy(degree or 1, plan.weights).metered(
                "publish"
            )
        return built

    def _build_int8(self, block: int) -> None:
        """Build the INT8 weights, the exact rows, and the publish of both (Note [INT8 weights])."""
        plan = self.layout.plan
        layout = self.layout
        mesh = self._mesh
        device = self.primary.device
        split = layout.columns_of(self.trained).stop
        self.own = self.primary.new_zeros(layout.shape(plan.optimizer)[0], split)
        self.frozen_row = self.primary.new_zeros(layout.columns - split)
        exact = self._exact[0].wire
        rows = mesh.hierarchy(1, plan.optimizer)
        # By parameter, the exact rows that this rank owns.
        self._owned = [
            Copy(rows, layout.parameter(self.own, param_index), exact)
            for param_index in self.trained
        ]
        if self.frozen:
            row = mesh.hierarchy(1, plan.world_size)
            self._owned += [
                Copy(row, self._world_shard(range(param_index, param_index + 1))[None], exact)
                for param_index in self.frozen
            ]
        self._store = store = CodeStore(
            layout, self.coded, block, device, self._planned, self._queue
        )
        sent = BlockSpec("int8", block)
        for param_index in (param_index for param_index, coded in enumerate(self.coded) if coded):
            self._exact[param_index] = self._owned[param_index]
            self._shards[param_index] = Copy(
                self._shards[param_index].hierarchy, store.buffers[param_index], sent, True, block
            )
        # By first parameter of each run of the last publish: the bytes of every rank's message.
        self._sizes = dict[int, int]()
        self._changes = partial(store.begin, self._hierarchy, self._sizes)
        # The columns of `own`, and of the frozen row behind it, that the primary has; by the device
        # of the masters.
        shard_ranges = layout.shard_ranges(
            param_index for param_index, coded in enumerate(self.coded) if not coded
        )
        ranges = [
            torch.arange(*shard_range, dtype=torch.int64, device="cpu")
            for shard_range in [(0, 0), *shard_ranges]
        ]
        columns = torch.cat(ranges)
        self._columns = {columns.device: columns, device: columns.to(device)}
        # Loaded scales of the own world shard of all trained parameters, until the restart that
        # follows each load.
        self._scales: dict[range, Tensor] = {}

    # -- gather ------------------------------------------------------------------------------------

    def gather(self, param_indices: Sequence[int], phase: Phase) -> Handle[list[Tensor]]:
        """Gather whole parameters, with one collective per kind of copy.

        Args:
            param_indices: the parameters, all trained or all frozen, with equal ``sent``, in the
                same order on every rank.
            phase: "gather_forward", "gather_backward" or "gather_exact" (see Note [Which copy is
                read]).

        Returns:
            On ``wait``: one flat tensor ``[numel]`` per parameter, in the model's dtype.
        """
        secondary = self._secondary[param_indices[0]]
        if secondary.host is None or phase == "gather_exact":
            return self._gathering.run(partial(self._start_gather, param_indices, phase))
        ahead: tuple[list[int], Handle[Tensor]] | None = None
        if phase != "gather_forward" or param_indices[0] in self.frozen:
            # A parameter whose publish is pending has a stale copy as soon as `_start_gather` has
            # finished it.
            done = [
                param_index
                for param_index in param_indices
                if self._published_times[param_index] == self._updated_times[param_index]
            ]
            fresh = [param_index for param_index in done if secondary.is_fresh(param_index)]
            # On a stream of its own: the gathers' stream may be busy with gathers that began
            # before.
            ahead = (fresh, secondary.load(fresh)) if fresh else None
        begun = self._gathering.run(partial(self._start_gather, param_indices, phase, ahead))
        return begun if ahead is None else kept_until(begun, ahead)

    def _start_gather(
        self,
        param_indices: Sequence[int],
        phase: Phase,
        ahead: tuple[list[int], Handle[Tensor]] | None = None,
    ) -> Handle[list[Tensor]]:
        # A publish that runs under this forward ends where its weights are needed
        self.wait_for_publish(param_indices)
        secondary = self._secondary[param_indices[0]]
        if phase == "gather_forward" and not (
            secondary.captured and param_indices[0] in self.frozen
        ):
            capture = secondary.capturing(param_indices)
            return gather(self._forward, param_indices, self.layout, self.primary, phase, capture)
        # Exact rows of INT8 parameters are sharded over other ranks than the rest. The backward
        # pass gathers parameters that were not captured since their last change from the primary.
        exact = phase == "gather_exact"
        first = list[int]()
        second = list[int]()
        for param_index in param_indices:
            apart = self.coded[param_index] if exact else secondary.is_fresh(param_index)
            (first if apart else second).append(param_index)
        copies = (self._exact, self._exact) if exact else (secondary.copies, self._forward)
        message = None
        if ahead is not None:
            message = ahead[1].wait()  # this stream waits for the copy from the host
            secondary.settle()  # which comes after all copies to it
        parts = [
            (part, gather(of, part, self.layout, self.primary, phase, None, sent))
            for of, part, sent in zip(copies, (first, second), (message, None), strict=True)
            if part
        ]
        if len(parts) == 1:
            return parts[0][1]

        def finish() -> list[Tensor]:
            whole = {
                param_index: full
                for part, handle in parts
                for param_index, full in zip(part, handle.wait(), strict=True)
            }
            return [whole[param_index] for param_index in param_indices]

        return Handle(None, (), finish)

    # -- updates -----------------------------------------------------------------------------------

    def mark_updated(
        self, param_indices: range | None = None, masters: Tensor | None = None
    ) -> None:
        """Record updated optimizer rows or masters, for :meth:`start_publish`, which sends them to
        all copies.

        Args:
            param_indices: consecutive parameters; None is all trained ones.
            masters: their masters ``[N / O, columns]``, if needed; unchanged until the step has
                ended.
        """
        param_indices = self.trained if param_indices is None else param_indices
        self.wait_for_publish(param_indices)
        for param_index in param_indices:
            self._updated_times[param_index] += 1
        self._updates.append((param_indices, masters, self.layout.columns_of(param_indices).start))
        self._updated = recorded_event(self.primary.device)  # `begin` may run on another stream

    def start_publish(self) -> None:
        """Begin to publish all updates, INT8 weights last; collective."""
        updates = self._updates
        self._updates = []
        if not updates:
            return
        with self._meter.timing("publish"):
            for begin in self._codecs:
                self._pending += begin(updates)
        if self._store is not None:
            # The masters were copied to the own rows
            self._updated = recorded_event(self.primary.device)

    def _begin_rows(self, updates: Sequence[Update]) -> Begun:
        """Begin to publish rows of the primary: as they are, or quantized differences if the
        updates have masters.
        """
        for param_indices, masters, first in self._planned(updates, self._row_sizes):
            parts = [self._rows.shard_ranges(param_indices)]
            tables = list[Tensor]()
            if masters is not None:
                # neighbours
                parts = [
                    self._rows.shard_ranges(range(*part))
                    for part in merged((i, i + 1) for i in param_indices)
                ]
                tables = [masters[:, part[0][0] - first : part[-1][1] - first] for part in parts]
                tables = [table.to(self.primary.device, torch.float32) for table in tables]
            yield param_indices, self._queue.run(partial(self._publish_rows, parts, tables), tables)

    def _publish_rows(
        self, parts: Sequence[Sequence[Range]], masters: Sequence[Tensor]
    ) -> Handle[None]:
        hierarchy = self._hierarchy
        wire = self._wire
        by_member = members(self.primary, self._hierarchy.size)
        parts = [merged(shard_ranges, wire.block_size) for shard_ranges in parts]
        views = range_views(by_member, chain(*parts), wire.block_size)
        if not masters:
            if hierarchy.size == 1:
                return Handle(None, (), lambda: None)
            return all_gather_views(hierarchy, views, wire)
        own = by_member[hierarchy.index]
        differences = list[View]()
        for shard_ranges, rows in zip(parts, masters, strict=True):
            # The master minus the stored row: adding it, quantized, brings the row close to the
            # master.
            differ = rows - own[:, shard_ranges[0][0] : shard_ranges[-1][1]]
            differences += range_views(differ, packed_ranges(shard_ranges), wire.block_size)
        message = quantize(differences, wire, allocate=hierarchy.groups[-1].allocate)
        dequantize(message, wire, [view.member(hierarchy.index) for view in views], accumulate=True)
        return all_gather_views(hierarchy, views, wire, message, accumulate=True)

    def _begin_rows_of_int8(self, updates: Sequence[Update]) -> Begun:
        """Copy masters to the rows of parameters that are not INT8, and begin to publish these."""
        updated: list[Update] = []
        for param_indices, masters, first in updates:
            columns = self._rows.columns_of(param_indices)
            if masters is not None and columns.start < columns.stop:
                rows = masters.index_select(1, self._columns[masters.device][columns] - first).to(
                    self.own
                )
                self._updatable[:, columns].copy_(rows)
                self.own.index_copy_(1, self._columns[self.own.device][columns], rows)
                updated.append((param_indices, None, first))
        return self._begin_rows(updated)

    def _begin_codes(self, updates: Sequence[Update]) -> Begun:
        """Begin to publish INT8 parameters; masters on the host are copied to the device one by
        one.
        """
        batch: list[Update] = []
        for param_indices, masters, first in updates:
            if masters is not None and any(map(self.coded.__getitem__, param_indices)):
                rows = masters.to(self.own.device, torch.float32)
                self.own[:, first : first + rows.shape[1]].copy_(rows)
                batch.append((param_indices, rows, first))
                # Send now: otherwise copies of all masters would be on the device at once
                if rows is not masters:
                    yield from self._changes(batch)
                    batch = []
        yield from self._changes(batch)

    def wait_for_publish(self, param_indices: Sequence[int] | None = None) -> None:
        """Finish the publish of some parameters, or of all, and renew the secondary copies;
        collective if hierarchical.

        On a GPU the current stream waits for all changes (Note [Publish before gather]).

        Raises:
            RuntimeError: if a parameter still has a stale version.
        """
        if self._updated is not None:
            self._updated.wait()
        needed = set(range(len(self.coded)) if param_indices is None else param_indices)
        if not all(needed.isdisjoint(updated) for updated, *_ in self._updates):
            self.start_publish()
        changed: list[int] = []
        waiting = []
        for part, handle in self._pending:
            if needed.isdisjoint(part):
                waiting.append((part, handle))
                continue
            with self._meter.timing("publish"):
                handle.wait()
            changed += part
            for param_index in part:
                self._published_times[param_index] += 1
        self._pending = waiting
        stale = [
            param_index
            for param_index in needed
            if self._published_times[param_index] != self._updated_times[param_index]
        ]
        if stale:
            raise RuntimeError(
                f"weights of parameters {sorted(stale)[:8]} would be read before publish updated "
                "them"
            )
        if changed:
            self._renew(changed)

    def publish_world(
        self, param_indices: range | None = None, masters: Tensor | None = None, anew: bool = True
    ) -> None:
        """Rebuild all copies from each rank's own world shard: at start-up, after a load, after an
        edit. Collective.

        Args:
            param_indices: consecutive parameters, all trained or all frozen; None is all trained
                ones.
            masters: the masters of the own row, FP32 ``[F]``, if known; only INT8 weights need
                them.
            anew: choose new scales for INT8 weights, except for loaded ones.
        """
        plan = self.layout.plan
        param_indices = self.trained if param_indices is None else param_indices
        self.wait_for_publish(param_indices)
        columns = self.layout.columns_of(param_indices)
        rows = self._primary_of(param_indices)
        if self._store is not None:
            self._gather_rows(plan.optimizer, self.own[:, columns])
            shard = self._world_shard(param_indices)
            places = (
                self._columns[shard.device][self._rows.columns_of(param_indices)] - columns.start
            )
            rows[self.layout.row(plan.weights)].copy_(shard[places])
        self._gather_rows(plan.weights, rows)
        if self._store is not None:
            if anew:
                self._store.begin_anew(param_indices, self._scales.pop(param_indices, None))
            values = (shard if masters is None else masters[columns])[None].float()
            hierarchy = self._mesh.hierarchy(plan.weights, plan.world_size).metered("publish")
            with self._meter.timing("publish"):
                for _, handle in list(
                    self._store.begin(hierarchy, {}, [(param_indices, values, columns.start)])
                ):
                    handle.wait()
        self._renew(param_indices)
        if self._fill_hierarchy is not None and param_indices and param_indices[0] in self.frozen:
            self._fill_copies(
                self._fill_hierarchy,
                [param_index for param_index in self._filled if param_index in param_indices],
            )

    def _fill_copies(self, hierarchy: Hierarchy, param_indices: Sequence[int]) -> None:
        """Fill the secondary copies of frozen parameters from the ranks' primary shards (Note
        [Frozen]).
        """
        height, _ = self.layout.shape(hierarchy.lo)
        for param_index in param_indices:
            rows = self.primary.new_empty(height, self.layout.widths[param_index])
            members(rows, hierarchy.size)[hierarchy.index].copy_(
                self._primary_of(range(param_index, param_index + 1))
            )
            all_gather_rows(hierarchy, rows, self._run_numel)
            self.frozen_secondary.store_now(param_index, rows)

    def _gather_rows(self, degree: int, rows: Tensor) -> None:
        """Fill a shard of ``degree`` by an all-gather of the ranks' own world shards."""
        hierarchy = self._mesh.hierarchy(degree, self.layout.plan.world_size).metered("publish")
        all_gather_rows(hierarchy, rows, self._run_numel)

    def _world_shard(self, param_indices: range) -> Tensor:
        """Return a view of the own world shard of some parameters, all trained or all frozen."""
        own = self.own[self.layout.row(self.layout.plan.optimizer)]
        return columns_of_two(own, self.frozen_row, self.layout.columns_of(param_indices))

    def _primary_of(self, param_indices: range) -> Tensor:
        """Return a view of some parameters' columns in the primary, all trained or all frozen."""
        return columns_of_two(
            self.primary, self.frozen_primary, self._rows.columns_of(param_indices)
        )

    def _renew(self, param_indices: Sequence[int]) -> None:
        """Expire and renew secondary copies of parameters, all trained or all frozen, whose primary
        shards changed.
        """
        if param_indices:
            secondary = self._secondary[param_indices[0]]
            secondary.expire(param_indices)
            secondary.refresh(param_indices)
        self._updated = recorded_event(self.primary.device)  # gathers may be on another stream

    def write_back(self, param_index: int, full: Tensor) -> None:
        """Store a whole parameter, equal on every rank, in the shards (an edit under
        ``GatheredParameters``).

        With INT8 weights it is stored only if it was edited (Note [Exact weights]).
        """
        rows = rows_of(full.detach().reshape(-1), self.layout.plan)
        self.wait_for_publish([param_index])
        if self._store is not None:
            own = self._owned[param_index]
            given = self.layout.subset(rows, 1, own.hierarchy.hi)
            if not self._differ(own, given):
                return
            own.data.copy_(given)
        shard = self.layout.subset(rows, 1, self.layout.plan.weights)
        if self._store is not None and self.coded[param_index]:
            self._store.recode(param_index, shard.float(), self.layout.begins[param_index])
        else:
            self._exact[param_index].data.copy_(shard)
        self._renew([param_index])
        if self._fill_hierarchy is not None and param_index in self._filled:
            self.frozen_secondary.store_now(
                param_index, self.layout.subset(rows, 1, self._fill_hierarchy.lo)
            )

    def _differ(self, own: Copy, given: Tensor) -> bool:
        """Return whether any rank's rows differ in a bit from the given ones. Collective; one host
        synchronization.
        """
        bits = torch.int16 if given.dtype.itemsize == 2 else torch.int32
        differ = (
            (own.data.contiguous().view(bits) != given.contiguous().view(bits))
            .any()
            .view(1)
            .view(torch.uint8)
        )
        return bool(all_gather(own.hierarchy.metered("gather_exact"), differ).wait().any())

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint needs in addition to the masters.

        For INT8 weights: the scales of the own world shard, with which masters are requantized. For
        a quantized publish: the own row, which is not the rounded masters.
        """
        if self._store is not None:
            return {"scales": self._store.own_scales(self.trained)}
        return {"stored": self.own_row.detach().clone()} if self.needs_masters else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`state_dict` before :meth:`publish_world`; without it the own row stays,
        and scales are new.

        Saved scales are used if the number of blocks matches. Otherwise a rank chooses new ones;
        ranks still agree, because each sends its scales.
        """
        if self._store is not None:
            saved = state.get("scales")
            own = self._store.own_scales(self.trained)
            fits = isinstance(saved, Tensor) and saved.shape == own.shape
            self._scales = {self.trained: own.copy_(state["scales"])} if fits else {}
        elif self.needs_masters and "stored" in state:
            self.own_row.copy_(state["stored"])

    # -- accounting --------------------------------------------------------------------------------

    @property
    def published(self) -> tuple[int, ...] | None:
        """By run of the last publish of INT8 weights: the bytes of every rank's message; None
        before the first.
        """
        return (
            None
            if self._store is None
            else tuple(nbytes for _, nbytes in sorted(self._sizes.items())) or None
        )

    def memory(self) -> dict[str, int]:
        """Return the bytes of weights and secondary copies on this rank; frozen parameters are
        counted separately.

        A view of the primary counts as zero bytes. "host" is what copies take of the host's memory.
        """
        stored = [copy.data.nbytes for copy in self._shards]
        exact = (0, 0) if self._store is None else (self.own.nbytes, self.frozen_row.nbytes)
        count = len(self.trained)
        sizes = {"weights": sum(stored[:count]) + exact[0], "secondary": self.secondary.nbytes}
        if self.frozen:
            sizes["frozen"] = sum(stored[count:]) + self.frozen_secondary.nbytes + exact[1]
        hosts = [
            of.host.nbytes for of in (self.secondary, self.frozen_secondary) if of.host is not None
        ]
        return sizes | ({"host": sum(hosts)} if hosts else {})

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are stored, without views of them."""
        codes = [] if self._store is None else [self._store.codes.stored, self.own, self.frozen_row]
        copies = [*self.secondary.tensors, *self.frozen_secondary.tensors]
        return [self.primary, self.frozen_primary, *codes, *copies]

    def copies(self) -> list[Tensor]:
        """Return replicas of trained parameters, and all INT8 weights, to compare between ranks in
        debug checks.
        """
        if self._store is not None:
            return [torch.cat([self._store.codes.stored, self.primary.view(-1).view(torch.uint8)])]
        return [self.primary, *self.secondary.shared]


def runs_of(
    urgency: Sequence[tuple[bool, int]],
    limit: int,
    updates: Sequence[Update],
    sizes: Mapping[int, int],
) -> list[Update]:
    """Cut updates into runs of at most ``limit`` elements, the most urgent first, persistent
    parameters apart.

    Args:
        urgency: by parameter: whether its publish may continue after the step, and its position in
            the model's order.
        limit: elements of a run; a larger parameter is a run of its own.
        updates: of some parameters.
        sizes: elements of the parameters that take part.
    """
    runs: list[tuple[tuple[bool, int], Update]] = []
    for param_indices, masters, first in updates:
        for later in (False, True):
            part = [
                param_index
                for param_index in param_indices
                if param_index in sizes and urgency[param_index][0] is later
            ]
            for run in packed_runs([sizes[param_index] for param_index in part], limit):
                carried = part[run.start : run.stop]
                runs.append((min(map(urgency.__getitem__, carried)), (carried, masters, first)))
    runs.sort(key=itemgetter(0))
    return [run for _, run in runs]


def columns_of_two(left: Tensor, right: Tensor, columns: slice) -> Tensor:
    """Return a view of columns of two tensors laid side by side; all columns must be in one of
    them.
    """
    split = left.shape[-1]
    if columns.stop <= split:
        return left[..., columns]
    return right[..., columns.start - split : columns.stop - split]


def recorded_event(device: torch.device) -> torch.Event | None:
    """Record an event on the device's current stream and return it; None on a CPU, which has no
    streams.
    """
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event
