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

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle, Queues
from zero_topo.collectives.transport import (
    all_gather,
    all_gather_rows,
    all_gather_views,
    members,
    rows_of,
)
from zero_topo.config import ResolvedConfig
from zero_topo.engine.codes import Begun, Update
from zero_topo.engine.copies import Copy, Secondary, gather
from zero_topo.engine.storage import Storage
from zero_topo.mesh import Mesh
from zero_topo.plan import Phase, packed_runs
from zero_topo.quant.operands import merged, range_views
from zero_topo.quant.ops import cast_to
from zero_topo.sync import Parameter


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
        storage: the memory of the weights.
        secondary: the copies from which the backward pass gathers.
        needs_masters: whether :meth:`mark_updated` needs the FP32 masters; it then updates the
            optimizer's rows itself.
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
        self._mesh = mesh
        self._run_numel = run_numel
        self._gathering = queues.gathers
        self._queue = queues.updates
        # Persistent parameters are published first, the others in the order in which the model
        # needs them.
        urgency = [(not p.persistent, p.place) for p in parameters]
        self._planned = partial(runs_of, urgency, run_numel)
        plain = [cast_to(p.sent or like.dtype) for p in parameters]
        wires = [config.weights_spec or wire for wire in plain]
        self.storage = storage = Storage(
            config, parameters, like, wires, mesh, self._planned, self._queue
        )
        # On a GPU, recorded on the stream that changed the shards last; the next reader or writer
        # waits for it.
        self._updated: torch.Event | None = None
        self._hierarchy = mesh.hierarchy(plan.weights, plan.optimizer).metered("publish")
        self.needs_masters = storage.store is not None
        # Each begins the runs of the updated parameters that it sends in its format.
        self._codecs: list[Callable[[Sequence[Update]], Begun]] = [self._begin_rows]
        if storage.store is not None:
            self._codecs = [self._begin_rows_of_int8, self._begin_codes]
        # By parameter: updates whose publish has not ended. The host counts them, and a gather
        # raises unless there are none: no weights are read between an update and its publish's end.
        self._unpublished = [0] * len(parameters)
        # Updates of this step whose publish has not begun: the first reader or the step's end
        # begins all.
        self._updates: list[Update] = []
        # Runs begun, oldest first: the queue's stream writes the shards; whoever has waited for the
        # handle may read.
        self._pending: list[tuple[Sequence[int], Handle[None]]] = []
        degree = None
        if config.resident_spec is None and plan.weights > 1:
            degree = plan.secondary
        copied = [config.secondary_spec or wire for wire in plain]
        self.secondary = Secondary(storage.rows, mesh, storage.shards, degree, copied)
        # Frozen weights do not change: what a forward gather captured, later ones read.
        self._forward_reads_copies = frozen and self.secondary.captured
        # By parameter, what a forward gather sends
        self._forward = storage.shards
        if degree == plan.weights and config.secondary_spec == config.weights_spec:
            self._forward = self.secondary.copies

    # -- gather ------------------------------------------------------------------------------------

    def gather(self, param_indices: Sequence[int], phase: Phase) -> Handle[list[Tensor]]:
        """Gather whole parameters, with one collective per kind of copy.

        Args:
            param_indices: the parameters, with equal ``sent``, in the same order on every rank.
            phase: "gather_forward", "gather_backward" or "gather_exact" (see Note [Which copy is
                read]).

        Returns:
            On ``wait``: one flat tensor ``[numel]`` per parameter, in the model's dtype.
        """
        return self._gathering.run(partial(self._start_gather, param_indices, phase))

    def _start_gather(self, param_indices: Sequence[int], phase: Phase) -> Handle[list[Tensor]]:
        # A publish that runs under this forward ends where its weights are needed
        self.wait_for_publish(param_indices)
        storage = self.storage
        secondary = self.secondary
        exact = phase == "gather_exact"
        reads_copies = self._forward_reads_copies or phase == "gather_backward"
        # Exact rows of INT8 parameters are sharded over other ranks than the rest. Parameters that
        # were not captured since their last change are gathered from the primary.
        first = list[int]()
        second = list[int]()
        for param_index in param_indices:
            if exact:
                apart = storage.coded[param_index]
            else:
                apart = reads_copies and secondary.is_fresh(param_index)
            (first if apart else second).append(param_index)
        sources = (storage.exact, storage.exact) if exact else (secondary.copies, self._forward)
        capture = secondary.capturing(second) if phase == "gather_forward" else None
        parts = list[tuple[list[int], Handle[list[Tensor]]]]()
        for copies, part in zip(sources, (first, second), strict=True):
            if part:
                begun = gather(copies, part, storage.layout, storage.primary, phase, capture)
                parts.append((part, begun))
        if len(parts) == 1:
            return parts[0][1]

        def finish(_: None) -> list[Tensor]:
            whole = {
                param_index: full
                for part, handle in parts
                for param_index, full in zip(part, handle.wait(), strict=True)
            }
            return [whole[param_index] for param_index in param_indices]

        return Handle().then(finish)

    # -- updates -----------------------------------------------------------------------------------

    def mark_updated(
        self,
        param_indices: range | None = None,
        masters: Tensor | None = None,
    ) -> None:
        """Record updated optimizer rows or masters, for :meth:`start_publish`, which sends them to
        all copies.

        Args:
            param_indices: consecutive parameters; None is all.
            masters: their masters ``[N / O, columns]``, if needed; unchanged until the step has
                ended.
        """
        storage = self.storage
        if param_indices is None:
            param_indices = range(len(storage.coded))
        self.wait_for_publish(param_indices)
        for param_index in param_indices:
            self._unpublished[param_index] += 1
        first = storage.layout.columns_of(param_indices).start
        self._updates.append((param_indices, masters, first))
        # `start_publish` may run on another stream, which then waits for this event.
        self._updated = recorded_event(storage.primary.device)

    def start_publish(self) -> None:
        """Begin to publish all updates, INT8 weights last; collective."""
        updates = self._updates
        self._updates = []
        if not updates:
            return
        with self._mesh.meter.timing("publish"):
            for begin in self._codecs:
                self._pending += begin(updates)
        if self.storage.store is not None:
            # The masters were copied to the own rows
            self._updated = recorded_event(self.storage.primary.device)

    def _begin_rows(self, updates: Sequence[Update]) -> Begun:
        """Begin to publish rows of the primary, as they are."""
        for param_indices, *_ in self._planned(updates, self.storage.row_sizes):
            yield param_indices, self._queue.run(partial(self._publish_rows, param_indices))

    def _publish_rows(self, param_indices: Sequence[int]) -> Handle[None]:
        hierarchy = self._hierarchy
        if hierarchy.size == 1:
            return Handle()
        by_member = members(self.storage.primary, hierarchy.size)
        columns = merged(self.storage.rows.shard_ranges(param_indices))
        wire = cast_to(self.storage.primary.dtype)
        return all_gather_views(hierarchy, range_views(by_member, columns), wire)

    def _begin_rows_of_int8(self, updates: Sequence[Update]) -> Begun:
        """Copy masters to the rows of parameters that are not INT8, and begin to publish these."""
        storage = self.storage
        own = storage.own
        updated: list[Update] = []
        for param_indices, masters, first in updates:
            columns = storage.rows.columns_of(param_indices)
            if masters is not None and columns.start < columns.stop:
                # The primary has other columns than the masters: those that are not INT8.
                places = storage.columns[masters.device][columns] - first
                rows = masters.index_select(1, places).to(own)
                storage.updatable[:, columns].copy_(rows)
                own.index_copy_(1, storage.columns[own.device][columns], rows)
                updated.append((param_indices, None, first))
        return self._begin_rows(updated)

    def _begin_codes(self, updates: Sequence[Update]) -> Begun:
        """Begin to publish INT8 parameters; masters on the host are copied to the device one by
        one.
        """
        own = self.storage.own
        coded = self.storage.coded
        batch: list[Update] = []
        for param_indices, masters, first in updates:
            if masters is not None and any(coded[i] for i in param_indices):
                rows = masters.to(own.device, torch.float32)
                own[:, first : first + rows.shape[1]].copy_(rows)
                batch.append((param_indices, rows, first))
                # Send now: otherwise copies of all masters would be on the device at once
                if rows is not masters:
                    yield from self._begin_changes(batch)
                    batch = []
        yield from self._begin_changes(batch)

    def _begin_changes(self, updates: Sequence[Update]) -> Begun:
        store = self.storage.store
        assert store is not None
        return store.begin(self._hierarchy, store.message_sizes, updates)

    def wait_for_publish(self, param_indices: Sequence[int] | None = None) -> None:
        """Finish the publish of some parameters, or of all, and renew the secondary copies;
        collective if hierarchical.

        On a GPU the current stream waits for all changes (Note [Publish before gather]).

        Raises:
            RuntimeError: if a parameter still has a stale version.
        """
        if self._updated is not None:
            self._updated.wait()
        needed = set(range(len(self.storage.coded)) if param_indices is None else param_indices)
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
            for param_index in part:
                self._unpublished[param_index] -= 1
        self._pending = waiting
        if any(map(self._unpublished.__getitem__, needed)):
            stale = [
                param_index for param_index in sorted(needed) if self._unpublished[param_index]
            ]
            raise RuntimeError(
                f"weights of parameters {stale[:8]} would be read before publish updated them"
            )
        if changed:
            self._renew(changed)

    def publish_world(
        self,
        param_indices: range | None = None,
        masters: Tensor | None = None,
        anew: bool = True,
    ) -> None:
        """Rebuild all copies from each rank's own world shard: at start-up, after a load, after an
        edit. Collective.

        Args:
            param_indices: consecutive parameters; None is all.
            masters: the masters of the own row, FP32 ``[F]``, if known; only INT8 weights need
                them.
            anew: choose new scales for INT8 weights, except for loaded ones; only of all
                parameters.
        """
        storage = self.storage
        plan = storage.layout.plan
        if param_indices is None:
            param_indices = range(len(storage.coded))
        self.wait_for_publish(param_indices)
        columns = storage.layout.columns_of(param_indices)
        rows = storage.primary[:, storage.rows.columns_of(param_indices)]
        store = storage.store
        if store is None:
            self._gather_rows(plan.weights, rows)
        else:
            self._gather_rows(plan.optimizer, storage.own[:, columns])
            shard = storage.own_row[columns]
            places = storage.columns[shard.device][storage.rows.columns_of(param_indices)]
            rows[storage.layout.row(plan.weights)].copy_(shard[places - columns.start])
            self._gather_rows(plan.weights, rows)
            if anew:
                store.begin_anew()
            # Every rank requantizes its own world shard, and sends it to the ranks that store it.
            values = (shard if masters is None else masters[columns])[None].float()
            hierarchy = self._mesh.hierarchy(plan.weights, plan.world_size).metered("publish")
            with self._mesh.meter.timing("publish"):
                begun = list(store.begin(hierarchy, {}, [(param_indices, values, columns.start)]))
                for _, handle in begun:
                    handle.wait()
        self._renew(param_indices)

    def _gather_rows(self, degree: int, rows: Tensor) -> None:
        """Fill a shard of ``degree`` by an all-gather of the ranks' own world shards."""
        hierarchy = self._mesh.hierarchy(degree, self.storage.layout.plan.world_size).metered(
            "publish"
        )
        all_gather_rows(hierarchy, rows, self._run_numel)

    def _renew(self, param_indices: Sequence[int]) -> None:
        """Expire and renew secondary copies of parameters whose primary shards changed."""
        self.secondary.expire(param_indices)
        self.secondary.refresh(param_indices)
        device = self.storage.primary.device
        self._updated = recorded_event(device)  # gathers may be on another stream

    def write_back(self, param_index: int, full: Tensor) -> None:
        """Store a whole parameter, equal on every rank, in the shards (an edit under
        ``GatheredParameters``).

        With INT8 weights it is stored only if it was edited (Note [Exact weights]).
        """
        storage = self.storage
        layout = storage.layout
        rows = rows_of(full.detach().reshape(-1), layout.plan)
        self.wait_for_publish([param_index])
        if storage.store is not None:
            own = storage.owned(param_index, self._mesh)
            given = layout.subset(rows, 1, own.hierarchy.hi)
            if not self._differ(own, given):
                return
            own.data.copy_(given)
        shard = layout.subset(rows, 1, layout.plan.weights)
        if storage.store is not None and storage.coded[param_index]:
            storage.store.recode(param_index, shard.float(), layout.begins[param_index])
        else:
            storage.exact[param_index].data.copy_(shard)
        self._renew([param_index])

    def _differ(self, own: Copy, given: Tensor) -> bool:
        """Return whether any rank's rows differ in a bit from the given ones. Collective; one host
        synchronization.
        """
        # Bits are compared, so that NaN equals itself and -0 differs from 0.
        bits = torch.int16 if given.dtype.itemsize == 2 else torch.int32
        own_bits = own.data.contiguous().view(bits)
        given_bits = given.contiguous().view(bits)
        differ = (own_bits != given_bits).any().view(1).view(torch.uint8)
        return bool(all_gather(own.hierarchy.metered("gather_exact"), differ).wait().any())

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint needs in addition to the masters: of INT8 weights, the
        scales of the own world shard, with which masters are requantized.
        """
        if self.storage.store is None:
            return {}
        return {"scales": self.storage.store.own_scales()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`state_dict` before :meth:`publish_world`; without it scales are new.

        Saved scales are used if the number of blocks matches. Otherwise a rank chooses new ones;
        ranks still agree, because each sends its scales.
        """
        if self.storage.store is not None:
            saved = state.get("scales")
            own = self.storage.store.own_scales()
            fits = isinstance(saved, Tensor) and saved.shape == own.shape
            self.storage.store.loaded_scales = own.copy_(state["scales"]) if fits else None

    # -- accounting --------------------------------------------------------------------------------

    @property
    def published(self) -> tuple[int, ...] | None:
        """By run of the last publish of INT8 weights: the bytes of every rank's message; None
        before the first.
        """
        if self.storage.store is None:
            return None
        sizes = self.storage.store.message_sizes
        return tuple(nbytes for _, nbytes in sorted(sizes.items())) or None

    def memory(self) -> dict[str, int]:
        """Return the bytes of weights and secondary copies on this rank."""
        return {
            "weights": sum(tensor.nbytes for tensor in self.storage.tensors()),
            "secondary": sum(tensor.nbytes for tensor in self.secondary.tensors),
        }

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are stored, without views of them."""
        return [*self.storage.tensors(), *self.secondary.tensors]

    def copies(self) -> list[Tensor]:
        """Return what other ranks store too, to compare in debug checks: of the weights, then of
        the secondary.
        """
        primary = self.storage.primary
        if self.storage.store is None:
            return [primary, *self.secondary.shared]
        codes = self.storage.store.codes.stored
        return [torch.cat([codes, primary.view(-1).view(torch.uint8)])]


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
            if not part:
                continue
            for run in packed_runs([sizes[param_index] for param_index in part], limit):
                # A run is as urgent as the first of its parameters that the model needs.
                carried = part[run.start : run.stop]
                runs.append((min(map(urgency.__getitem__, carried)), (carried, masters, first)))
    runs.sort(key=itemgetter(0))
    return [run for _, run in runs]


def recorded_event(device: torch.device) -> torch.Event | None:
    """Record an event on the device's current stream and return it; None on a CPU, which has no
    streams.
    """
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event
