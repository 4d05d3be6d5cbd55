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

Publish under forward
    Updated parameters are collected over all sub-groups of the optimizer. Their publish begins
    (:meth:`Weights.start_publish`) when the first of them is needed or the step ends. Persistent
    parameters are published first, in separate runs: DeepSpeed gathers them at the end of the step,
    which waits for these runs only. Other runs follow in the order in which the model needs them:
    vectors, often a separate sub-group, are needed by the first module. A run is finished when a
    gather first needs one of its parameters (:meth:`Weights.wait_for_publish`). A gather of a
    parameter whose publish has not ended raises an error instead of reading it.

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
    shard. One collective gathers both kinds.

Note [Exact weights]
    Exact weights of INT8 parameters (for ``GatheredParameters`` and checkpoints) are the owners'
    rows, gathered over the optimizer's domain. DeepSpeed treats every save of a model as an edit of
    it, so a write counts as an edit only if it changed a bit of some row.

Note [Frozen]
    Parameters that no optimizer updates are a second set of weights, with shards of their own.
    Their world shards are DeepSpeed's own, so checkpoints and exact gathers have the exact values.
    They are published once, and again after a load. A rank owns no more of them than its world
    shard, at any optimizer degree.

    A secondary copy narrower than the weights (S < W) stays fresh from the first forward gather on.
    Forward gathers then read it too, so frozen weights cross nodes once per run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle, Queues
from zero_topo.collectives.transport import (
    all_gather,
    all_gather_rows,
    all_gather_views,
    as_bytes,
    members,
    rows_of,
)
from zero_topo.config import ResolvedConfig
from zero_topo.engine.buffer import Buffer, forms_of
from zero_topo.engine.int8 import Int8
from zero_topo.engine.secondary import Secondary
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Hierarchy, Mesh
from zero_topo.plan import Phase, coded_params, packed_runs
from zero_topo.quant.operands import merged, range_views
from zero_topo.quant.ops import cast_to
from zero_topo.quant.spec import BlockSpec, Format
from zero_topo.sync import Parameter

Update = tuple[Sequence[int], Tensor, int]
"""Parameters, a table with their FP32 masters ``[N / O, columns]``, and its first column."""

Begun = Iterator[tuple[Sequence[int], Handle[None]]]
"""Runs in progress: the parameters that one collective carries, and its handle."""


class Weights:
    """This rank's shards of one set of parameters, trained or frozen: gathers from them, and the
    publish of their updates.

    Args:
        config: the plan and the formats.
        parameters: in flat order.
        like: a tensor of the model's dtype on the accelerator.
        run_numel: elements per collective of publish.
        mesh: the groups.
        queues: the ordered queues of gathers and of publish.
        frozen: whether no optimizer updates them; see Note [Frozen].

    Attributes:
        layout: of the parameters.
        coded: by parameter, whether it is stored as INT8.
        primary: ``[N / W, ...]`` in the model's dtype: the columns of parameters that are not INT8.
        int8: the other parameters; None if there are none.
        own: ``[N / O, F]``: the rows that this rank's optimizer updates; a strided view of the
            primary if no weights are INT8.
        own_row: ``[F]``, a view of ``own``: the rank's own world shard, DeepSpeed's flat parameter
            buffer.
        exact: by parameter, the buffer that exact gathers read.
        forward: the buffer that forward gathers read.
        secondary: the copies that backward gathers read; None if they read ``forward`` too.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        parameters: Sequence[Parameter],
        like: Tensor,
        run_numel: int,
        mesh: Mesh,
        queues: Queues,
        frozen: bool = False,
    ) -> None:
        plan = config.plan
        numels = tuple(p.numel for p in parameters)
        self._mesh = mesh
        self._run_numel = run_numel
        self._queues = queues
        self._owners = mesh.hierarchy(plan.weights, plan.optimizer).metered("publish")
        # Persistent parameters are published first, the others in the order in which the model
        # needs them.
        self._urgency = [(not p.persistent, p.place) for p in parameters]
        # On a GPU, recorded on the stream that changed the shards last; the next reader or writer
        # waits for it.
        self._updated: torch.Event | None = None
        # Parameters with an update whose publish has not ended: no gather reads them.
        self._stale = set[int]()
        # Updates of this step whose publish has not begun: the first reader or the step's end
        # begins all.
        self._updates: list[Update] = []
        # Runs begun, oldest first: the queue's stream writes the shards; whoever has waited for the
        # handle may read.
        self._pending: list[tuple[Sequence[int], Handle[None]]] = []
        self.layout = Layout(plan, mesh.rank, numels)
        self.coded: Sequence[bool] = [False] * len(numels)
        if config.resident_spec is not None:
            dims = [p.dims for p in parameters]
            persistent = [p.persistent for p in parameters]
            block = config.resident_spec.block_size
            self.coded = coded_params(plan, numels, dims, persistent, block)
        # What is INT8 has no columns in the primary.
        kept = [0 if coded else numel for coded, numel in zip(self.coded, numels, strict=True)]
        self._floats = Layout(plan, mesh.rank, tuple(kept))
        self.primary = like.new_zeros(self._floats.shape(plan.weights))
        self.own = self._floats.subset(self.primary, plan.weights, plan.optimizer)
        plain = [cast_to(p.sent or like.dtype) for p in parameters]
        wires = [config.weights_spec or wire for wire in plain]
        self.forward = self._buffer_of_primary(wires)
        self.exact = [self._buffer_of_primary([cast_to(like.dtype)] * len(wires))] * len(wires)
        self.int8: Int8 | None = None
        if config.resident_spec is not None:
            self._build_int8(config.resident_spec)
        self.own_row = self.own[self.layout.row(plan.optimizer)]
        self.secondary: Secondary | None = None
        if plan.secondary is not None and plan.weights > 1 and self.int8 is None and parameters:
            wires = [config.secondary_spec or wire for wire in plain]
            self.secondary = Secondary(
                self.layout, mesh, self.primary, plan.secondary, wires, frozen
            )
            if plan.secondary == plan.weights and config.secondary_spec == config.weights_spec:
                self.forward = self.secondary.buffer

    def _buffer_of_primary(self, wires: Sequence[Format]) -> Buffer:
        hierarchy = self._mesh.hierarchy(1, self.layout.plan.weights)
        forms = forms_of(self._floats, self.primary, wires)
        return Buffer(self.layout, hierarchy, forms, self.primary.dtype)

    def _build_int8(self, spec: BlockSpec) -> None:
        """Store some parameters as INT8, and exact rows of all (Note [INT8 weights])."""
        layout = self.layout
        degree = layout.plan.optimizer
        self.int8 = Int8(layout, self.coded, spec, self.primary.device)
        # Memory of its own: the primary has no columns of INT8 parameters.
        self.own = self.primary.new_zeros(layout.shape(degree))
        exact = [cast_to(self.own.dtype)] * len(self.coded)
        forms = forms_of(layout, self.own, exact)
        owners = Buffer(layout, self._mesh.hierarchy(1, degree), forms, self.own.dtype)
        columns = [torch.arange(0, dtype=torch.int64, device="cpu")]
        for index, (begin, end) in enumerate(layout.shard_ranges(range(len(exact)))):
            if self.coded[index]:
                # Exact values are with the owners alone; forward gathers send the INT8 weights as
                # they are stored.
                self.forward.forms[index] = self.int8.forms[index]
                self.exact[index] = owners
            else:
                columns.append(torch.arange(begin, end, dtype=torch.int64, device="cpu"))
        self._float_columns = torch.cat(columns).to(self.own.device)

    # -- gather ------------------------------------------------------------------------------------

    def gather(self, param_indices: Sequence[int], phase: Phase) -> Handle[list[Tensor]]:
        """Gather whole parameters, with one collective for each buffer that is read.

        Args:
            param_indices: the parameters, with equal ``sent``, in the same order on every rank.
            phase: "gather_forward", "gather_backward" or "gather_exact" (see Note [Which copy is
                read]).

        Returns:
            On ``wait``: one flat tensor ``[numel]`` per parameter, in the model's dtype.
        """
        return self._queues.gathers.run(partial(self._start_gather, param_indices, phase))

    def _start_gather(self, param_indices: Sequence[int], phase: Phase) -> Handle[list[Tensor]]:
        # A publish that runs under this forward ends where its weights are needed
        self.wait_for_publish(param_indices)
        secondary = self.secondary
        copies = capturing = None
        if secondary is not None:
            if phase in secondary.phases:
                copies = secondary
            if secondary.captured and phase == "gather_forward":
                capturing = secondary
        # In the order of the list, so that all ranks begin the same collectives.
        parts: dict[Buffer, list[int]] = {}
        for index in param_indices:
            source = self.exact[index] if phase == "gather_exact" else self.forward
            # Parameters that were not captured since their last change are gathered from the
            # primary.
            if copies is not None and copies.is_fresh(index):
                source = copies.buffer
            parts.setdefault(source, []).append(index)
        handles = []
        for source, part in parts.items():
            capture = None
            if capturing is not None and source is self.forward:
                capture = capturing.capture(part)
            handles.append(source.gather(part, phase, capture))
        if len(handles) == 1:
            return handles[0]

        def finish(_: None) -> list[Tensor]:
            whole = dict[int, Tensor]()
            for part, handle in zip(parts.values(), handles, strict=True):
                whole |= zip(part, handle.wait(), strict=True)
            return [whole[index] for index in param_indices]

        return Handle().then(finish)

    # -- updates -----------------------------------------------------------------------------------

    def update(self, masters: Tensor, param_indices: range | None = None) -> None:
        """Take the updated masters of some parameters, for :meth:`start_publish`, which sends them
        to all ranks that store these.

        Args:
            masters: ``[N / O, columns]``; those that INT8 weights follow must not change until the
                step has ended.
            param_indices: consecutive parameters; None is all.
        """
        if param_indices is None:
            param_indices = range(len(self.coded))
        self.wait_for_publish(param_indices)
        self._stale.update(param_indices)
        first = self.layout.edges[param_indices.start]
        rows = masters
        if self.int8 is not None:
            rows = masters.to(self.own.device, torch.float32)
        own = self.own[:, first : first + rows.shape[1]]
        if own.data_ptr() != rows.data_ptr():  # FP32 weights may be their own masters
            own.copy_(rows)
        self._copy_floats(param_indices, self.layout.plan.optimizer)
        self._updates.append((param_indices, rows, first))
        # `start_publish` may run on another stream, which then waits for this event.
        self._updated = recorded_event(self.own.device)
        if rows is not masters:
            # Else copies of all masters would be on the device at once. The network then carries
            # them while the CPU updates the next ones.
            self.start_publish()

    def _copy_floats(self, param_indices: range, degree: int) -> None:
        """Copy the own shard of ``degree`` of parameters that are not INT8 to the primary, if their
        exact rows are apart from it.
        """
        edges = self._floats.edges
        columns = slice(edges[param_indices.start], edges[param_indices.stop])
        if self.int8 is None or columns.start == columns.stop:
            return
        layout = self.layout
        exact = layout.subset(self.own, layout.plan.optimizer, degree)
        rows = layout.subset(self.primary, layout.plan.weights, degree)[:, columns]
        rows.copy_(exact.index_select(1, self._float_columns[columns]))

    def start_publish(self) -> None:
        """Begin to publish all updates, INT8 weights last; collective."""
        updates = self._updates
        self._updates = []
        if not updates:
            return
        with self._mesh.meter.timing("publish"):
            for param_indices, *_ in self._runs_of(updates, coded=False):
                handle = self._queues.updates.run(partial(self._publish_rows, param_indices))
                self._pending.append((param_indices, handle))
            if self.int8 is not None:
                self._pending += self._begin_int8(updates, self._owners, self.int8.message_sizes)

    def _publish_rows(self, param_indices: Sequence[int]) -> Handle[None]:
        """Begin to publish rows of the primary, as they are."""
        hierarchy = self._owners
        if hierarchy.size == 1:
            return Handle()
        by_member = members(self.primary, hierarchy.size)
        columns = merged(self._floats.shard_ranges(param_indices))
        wire = cast_to(self.primary.dtype)
        return all_gather_views(hierarchy, range_views(by_member, columns), wire)

    def _begin_int8(
        self,
        updates: Sequence[Update],
        hierarchy: Hierarchy,
        sizes: dict[int, int],
    ) -> Begun:
        """Begin to publish INT8 weights from the masters of the ranks of ``hierarchy``."""
        assert self.int8 is not None
        runs = self._runs_of(updates, coded=True)
        return self.int8.publish(hierarchy, runs, self._queues.updates, sizes)

    def _runs_of(self, updates: Sequence[Update], coded: bool) -> list[Update]:
        """Cut updates into runs of at most ``run_numel`` elements, the most urgent first,
        persistent parameters apart; a larger parameter is a run of its own.

        Args:
            updates: of some parameters.
            coded: whether those that are INT8 take part, or the others.
        """
        runs: list[tuple[tuple[bool, int], Update]] = []
        for param_indices, masters, first in updates:
            # Persistent parameters, and the others
            parts: dict[bool, list[int]] = {}
            for index in param_indices:
                if self.coded[index] is coded:
                    parts.setdefault(self._urgency[index][0], []).append(index)
            for part in parts.values():
                sizes = list(map(self.layout.padded_numels.__getitem__, part))
                for run in packed_runs(sizes, self._run_numel):
                    # A run is as urgent as the first of its parameters that the model needs.
                    carried = part[run.start : run.stop]
                    urgency = min(map(self._urgency.__getitem__, carried))
                    runs.append((urgency, (carried, masters, first)))
        runs.sort(key=itemgetter(0))
        return [run for _, run in runs]

    def wait_for_publish(self, param_indices: Sequence[int] | None = None) -> None:
        """Finish the publish of some parameters, or of all, and renew the secondary copies;
        collective if hierarchical.

        On a GPU the current stream waits for all changes (Note [Publish before gather]).

        Raises:
            RuntimeError: if a parameter still has a stale version.
        """
        if self._updated is not None:
            self._updated.wait()
        # Of a gather no more work than it has parameters: most of the model may be stale.
        needed = self._stale.intersection(self._stale if param_indices is None else param_indices)
        if not needed:
            return
        for updated, *_ in self._updates:
            if not needed.isdisjoint(updated):
                self.start_publish()
                break
        changed: list[int] = []
        waiting = []
        for part, handle in self._pending:
            if needed.isdisjoint(part):
                waiting.append((part, handle))
                continue
            with self._mesh.meter.timing("publish"):
                handle.wait()
            # On a GPU the stream waits for an event; the host goes on.
            changed += part
        self._pending = waiting
        self._stale.difference_update(changed)
        stale = sorted(self._stale & needed)
        if stale:
            raise RuntimeError(
                f"weights of parameters {stale[:8]} would be read before publish updated them"
            )
        self._renew(changed)

    def publish_world(
        self,
        param_indices: range | None = None,
        masters: Tensor | None = None,
    ) -> None:
        """Rebuild all copies from each rank's own world shard: at start-up, after a load, after an
        edit. Collective.

        Args:
            param_indices: consecutive parameters; None is all, whose INT8 weights get new scales,
                except for loaded ones.
            masters: the masters of the own row, FP32 ``[F]``, if known; only INT8 weights need
                them.
        """
        plan = self.layout.plan
        anew = param_indices is None
        if param_indices is None:
            param_indices = range(len(self.coded))
        self.wait_for_publish(param_indices)
        columns = self.layout.columns_of(param_indices)
        if self.int8 is not None:
            self._gather_rows(plan.optimizer, self.own[:, columns])
            self._copy_floats(param_indices, plan.world_size)
        self._gather_rows(plan.weights, self.primary[:, self._floats.columns_of(param_indices)])
        if self.int8 is not None:
            if anew:
                self.int8.begin_anew()
            # Every rank requantizes its own world shard, and sends it to the ranks that store it.
            exact = self.own_row if masters is None else masters
            update = param_indices, exact[columns][None].float(), columns.start
            hierarchy = self._mesh.hierarchy(plan.weights, plan.world_size).metered("publish")
            with self._mesh.meter.timing("publish"):
                for _, handle in list(self._begin_int8([update], hierarchy, {})):
                    handle.wait()
        self._renew(param_indices)

    def _gather_rows(self, degree: int, rows: Tensor) -> None:
        """Fill a shard of ``degree`` by an all-gather of the ranks' own world shards."""
        hierarchy = self._mesh.hierarchy(degree, self.layout.plan.world_size).metered("publish")
        all_gather_rows(hierarchy, rows, self._run_numel)

    def _renew(self, param_indices: Sequence[int]) -> None:
        """Renew secondary copies of parameters whose primary shards changed."""
        if self.secondary is not None and self.secondary.stored:
            self.secondary.renew(param_indices)
        self._updated = recorded_event(self.own.device)  # gathers may be on another stream

    def write_back(self, index: int, full: Tensor) -> None:
        """Store a whole parameter, equal on every rank, in the shards (an edit under
        ``GatheredParameters``).

        With INT8 weights it is stored only if it was edited (Note [Exact weights]).
        """
        layout = self.layout
        plan = layout.plan
        rows = rows_of(full.detach().reshape(-1), plan)
        self.wait_for_publish([index])
        if self.int8 is not None:
            own = layout.parameter(self.own, index)
            given = layout.subset(rows, 1, plan.optimizer)
            if not self._differ(own, given):
                return
            own.copy_(given)
        shard = layout.subset(rows, 1, plan.weights)
        if self.int8 is not None and self.coded[index]:
            self.int8.recode(index, shard.float(), layout.edges[index])
        else:
            self._floats.parameter(self.primary, index).copy_(shard)
        self._renew([index])

    def _differ(self, own: Tensor, given: Tensor) -> bool:
        """Return whether any rank's rows differ in a bit from the given ones. Collective; one host
        synchronization.
        """
        # Bytes are compared, so that NaN equals itself and -0 differs from 0.
        differ = as_bytes(own.contiguous()) != as_bytes(given.contiguous())
        found = differ.any().view(1).view(torch.uint8)
        hierarchy = self._mesh.hierarchy(1, self.layout.plan.optimizer).metered("gather_exact")
        return bool(all_gather(hierarchy, found).wait().any())

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint needs in addition to the masters: of INT8 weights, the
        scales of the own world shard, with which masters are requantized.
        """
        return {} if self.int8 is None else {"scales": self.int8.own_scales()}

    def load_scales(self, saved: Any) -> None:
        """Restore the scales of :meth:`state_dict` before :meth:`publish_world`.

        Saved scales are used if the number of blocks matches. Otherwise a rank chooses new ones;
        ranks still agree, because each sends its scales.
        """
        if self.int8 is not None:
            own = self.int8.own_scales()
            fits = isinstance(saved, Tensor) and saved.shape == own.shape
            self.int8.loaded_scales = own.copy_(saved) if fits else None

    # -- accounting --------------------------------------------------------------------------------

    def published(self) -> tuple[int, ...]:
        """Return by run of the last publish of INT8 weights the bytes of every rank's message."""
        sizes = {} if self.int8 is None else self.int8.message_sizes
        return tuple(sizes[run] for run in sorted(sizes))

    @property
    def _copies(self) -> list[Tensor]:
        return [] if self.secondary is None else self.secondary.stored

    def memory(self) -> dict[str, int]:
        """Return the bytes of weights and secondary copies on this rank."""
        stored = sum(tensor.nbytes for tensor in self.tensors())
        copies = sum(tensor.nbytes for tensor in self._copies)
        return {"weights": stored - copies, "secondary": copies}

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are stored, without views of them."""
        of_int8 = [] if self.int8 is None else [self.int8.codes.stored, self.own]
        return [self.primary, *of_int8, *self._copies]

    def replicas(self) -> list[Tensor]:
        """Return what other ranks store too, to compare in debug checks: of the weights, then of
        the secondary.
        """
        if self.int8 is not None:
            floats = self.primary.view(-1).view(torch.uint8)
            return [torch.cat([self.int8.codes.stored, floats])]
        if self.secondary is not None and self.secondary.captured:
            return [self.primary]
        return [self.primary, *self._copies]


def recorded_event(device: torch.device) -> torch.Event | None:
    """Record an event on the device's current stream and return it; None on a CPU, which has no
    streams.
    """
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event
