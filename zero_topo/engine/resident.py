# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Weight shards that are held as INT8 codes: what is gathered is what is held, and publish sends what changed.

Note [Resident codes]
    A quantized gather rounds the weights of a shard to codes before it sends them; nothing else ever reads the shard.
    So a rank need not hold it: it holds the codes, which both gathers send as they are, and of the weights themselves
    only the rows that its optimizer updates. After each update the owner of a row brings its codes up to date with the
    FP32 masters and sends the changes (Note [Codes] in ``code_ops.py``), which the others apply: all hold the masters'
    codes, bit for bit, and no rounding ever adds to another.

Note [Plain slots]
    A block lies within one row of one parameter. Where rows are shorter than blocks, codes would be mostly padding:
    parameters of one dimension, small ones, and those that DeepSpeed keeps whole stay in the model's type
    (``coded_slots`` in ``plan.py``), and are gathered as without codes. One collective carries both kinds.

Note [Exact weights]
    Who asks for exact weights (``GatheredParameters``, checkpoints) gets the owners' rows, gathered over the
    optimizer's domain. DeepSpeed takes every saved model for an edit of it; so an edit is one only if it changed a bit
    of some row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from zero_topo.collectives.all_gather import all_gather, all_gather_rows
from zero_topo.collectives.handle import Handle
from zero_topo.collectives.lane import Lane
from zero_topo.collectives.meter import Counted, Meter
from zero_topo.collectives.pack import rows_of
from zero_topo.collectives.wire import wire_of
from zero_topo.engine.gathers import gathered, together
from zero_topo.engine.publish import Begun, Publication, Updated
from zero_topo.engine.shards import Layout
from zero_topo.engine.sources import Coded, Rows
from zero_topo.engine.weights import WeightOptions, Weights, recorded_event
from zero_topo.mesh import Mesh, Route
from zero_topo.quant import code_ops
from zero_topo.quant.codes import Change, Codes, Masters, Part
from zero_topo.quant.spec import BlockSpec
from zero_topo.quant.trits import TritSpec


@dataclass(frozen=True)
class CodeOptions:
    """Values of a block, which slots have codes, and where publish runs."""

    block: int
    coded: Sequence[bool]
    lane: Lane


class CodeStore:
    """The codes of some slots of a layout; these are counted by themselves, from 0.

    Attributes:
        codes: of the rank's weight shard, ``[N / W]`` rows of each slot.
        rows: ``N / W``.
        padded_numels: elements of each slot with its padding, over the whole world.
        urgency: what slots are sorted by for publish; see :class:`Layout`.
        messages: where the bytes of each slot begin and end.
    """

    def __init__(self, layout: Layout, options: CodeOptions, device: torch.device) -> None:
        slots = [i for i, coded in enumerate(options.coded) if coded]
        spans = [(layout.begins[i], layout.widths[i]) for i in slots]
        self.rows = layout.plan.world_size // layout.plan.weights
        self.codes = Codes.build(spans, self.rows, options.block, device)
        self.padded_numels = tuple(layout.padded_numels[i] for i in slots)
        self.urgency = tuple(layout.urgency[i] for i in slots)
        blocks = [-(-width // options.block) for _, width in spans]
        self._ends = list(accumulate(blocks, initial=0))
        sizes = (BlockSpec(8, options.block).nbytes(self.rows * count * options.block) for count in blocks)
        self.messages = list(pairwise(accumulate(sizes, initial=0)))
        self._own_row = layout.row(layout.plan.weights)

    def columns(self, slots: Sequence[int]) -> tuple[int, int]:
        """First and last block column of consecutive slots."""
        return self._ends[slots[0]], self._ends[slots[-1] + 1]

    @cached_property
    def _places(self) -> Tensor:
        """Where the scales of the rank's own world shard are among all FP32 values that are held."""
        slot = self.codes.slots[self.codes.slot_of.long()]
        here = torch.arange(len(slot), device=slot.device) - slot[:, 3]
        return slot[:, 1] // 4 + self._own_row * slot[:, 2] + here

    def own_scales(self) -> Tensor:
        """The scales of the rank's own world shard, FP32 ``[block columns]``, a copy."""
        return self.codes.held.view(torch.float32)[self._places]

    def begin_anew(self, scales: Tensor) -> None:
        """Forget all codes, and all scales but these of the own world shard: every block that is not zero escapes.

        Those of NaN too: a block that says the same as before would not be sent, and the others hold zeros.
        """
        self.codes.held.zero_()
        self.codes.held.view(torch.float32)[self._places] = scales.nan_to_num(0.0)

    def recode(self, place: int, rows: Tensor, first: int) -> None:
        """Make codes of a slot's rows, FP32 ``[N / W, width]``, whose columns begin at ``first``, with scales anew.

        They depend on the rows alone then, as after a load.
        """
        self.codes.held[slice(*self.messages[place])] = 0
        masters, part = Masters(rows, first, 0), Part(*self.columns(range(place, place + 1)), self.rows, 1)
        change = code_ops.assess(masters, self.codes, part)
        code_ops.emit(masters, self.codes, part, change, TritSpec(self.codes.block).nbytes(part.blocks, part.blocks))


class CodePublisher(Publication):
    """Publishes changes of codes; every member of a route those of its rows.

    Args:
        store: the codes.
        route: ``(weights, optimizer)``, or ``(weights, world)`` for a start.
        run_numel: elements of a run.
        meter: counts under "publish".
        lane: where it runs.

    Attributes:
        most: of each run's last publish, by its first slot: blocks that escaped on the member with most.
    """

    def __init__(self, store: CodeStore, route: Route, run_numel: int, meter: Meter, lane: Lane) -> None:
        super().__init__(store.padded_numels, store.urgency, run_numel, route=route, meter=meter, lane=lane)
        self._store = store
        self.most: dict[int, int] = {}

    def _begin(self, runs: Sequence[Updated]) -> Begun:
        store, members, assessed = self._store, self._route.size, []
        for run in runs:
            assert run.masters is not None
            own = Masters(run.masters, run.first, self._route.index)
            part = Part(*store.columns(run.slots), store.rows // members, members)
            assessed.append((own, part, code_ops.assess(own, store.codes, part)))
        most = self._most([change for *_, change in assessed])
        for run, (own, part, change), escaped in zip(runs, assessed, most, strict=True):
            self.most[run.slots[0]] = escaped
            nbytes = TritSpec(store.codes.block).nbytes(part.blocks, escaped)
            reads = [own.table, change.scales, change.escaped, change.order, change.count]
            yield run.slots, self._lane.run(partial(self._publish, own, part, change, nbytes), reads)

    def _most(self, changes: Sequence[Change]) -> list[int]:
        """Of each run: how many blocks escape on the member that has most of them, which sizes all their messages.

        The one time that a publish waits for the device; its runs wait together.
        """
        counts = torch.cat([change.count for change in changes])
        came = all_gather(self._route, counts.view(torch.uint8), self._counted).wait()
        most: list[int] = came.contiguous().view(torch.int64).view(-1, len(changes)).amax(0).tolist()
        return most

    def _publish(self, own: Masters, part: Part, change: Change, nbytes: int) -> Handle[None]:
        store, without = self._store, self._route.index
        handle = all_gather(self._route, code_ops.emit(own, store.codes, part, change, nbytes), self._counted)
        return Handle(None, (), lambda: code_ops.apply(handle.wait(), store.codes, part, without))


class ResidentWeights:
    """This rank's weight shards, as codes; does what :class:`~zero_topo.engine.weights.Weights` does.

    Args:
        layout: the slots.
        mesh: the groups.
        meter: counts bytes.
        options: as for weights that are held as they are; the primary's format is that of the codes.
        like: a tensor of the model's dtype and device.
        codes: which slots have codes, and how they are published.

    Attributes:
        own: ``[N / O, F]`` in the model's dtype: the rows that the optimizer updates, of all slots.
    """

    needs_masters = True

    def __init__(
        self, layout: Layout, mesh: Mesh, meter: Meter, options: WeightOptions, like: Tensor, codes: CodeOptions
    ) -> None:
        plan, coded, lane = layout.plan, codes.coded, codes.lane
        self.layout = layout
        self.own = like.new_zeros(layout.shape(plan.optimizer))
        self._mesh, self._meter, self._run_numel = mesh, meter, options.run_numel
        slots = [i for i, is_coded in enumerate(coded) if not is_coded]
        numels, urgency = tuple(layout.numels[i] for i in slots), tuple(layout.urgency[i] for i in slots)
        sub = Layout(replace(plan, secondary=None), layout.rank, numels, urgency)
        sent = None if plan.weights == 1 else options.primary
        self._plain = Weights(sub, mesh, meter, replace(options, primary=sent, secondary=None), like, lane)
        columns = torch.cat([torch.arange(0), *(torch.arange(*span) for span in layout.spans(slots))])
        self._plain_columns = columns.to(like.device)
        self._columns_on = {columns.device: columns, like.device: self._plain_columns}
        self._kinds = [list(accumulate(coded, initial=0)), list(accumulate((not c for c in coded), initial=0))]
        places = [(c, self._kinds[not c][index]) for index, c in enumerate(coded)]
        self._places = places
        self._store = CodeStore(layout, codes, like.device)
        wire = replace(options.publish, spec=BlockSpec(8, codes.block))
        self._source = Coded(self._plain.rows, self._store.codes, wire, places, self._store.messages)
        exact = wire_of(None, like.dtype)
        self._exact = Rows(layout, mesh.route(1, plan.optimizer), self.own, exact)
        routes = (plan.weights, plan.optimizer), (plan.weights, plan.world_size)
        self._publisher, self._starter = (
            CodePublisher(self._store, mesh.route(*route), options.run_numel, meter, lane) for route in routes
        )
        self._gathering = options.gathering
        self._noted: list[tuple[range, Tensor]] = []
        self._updated: torch.Event | None = None
        self._scales: Tensor | None = None

    # -- gather ----------------------------------------------------------------------------------------------------

    def gather(self, slots: Sequence[int], phase: str) -> Handle[list[Tensor]]:
        """As :meth:`Weights.gather`; "gather_exact" of slots that have codes is of the owners' rows."""
        return self._gathering.run(partial(self._begin, slots, phase))

    def _begin(self, slots: Sequence[int], phase: str) -> Handle[list[Tensor]]:
        self.finish(slots)
        counted = Counted(self._meter, phase)
        if phase != "gather_exact":
            return gathered(self.layout, self._source, slots, self.own, counted)
        parts = []
        if coded := [i for i in slots if self._places[i][0]]:
            parts.append((coded, gathered(self.layout, self._exact, coded, self.own, counted)))
        if plain := [i for i in slots if not self._places[i][0]]:
            places = [self._places[i][1] for i in plain]
            parts.append((plain, gathered(self._plain.layout, self._plain.exact, places, self.own, counted)))
        return together(slots, parts)

    # -- updates ---------------------------------------------------------------------------------------------------

    @property
    def own_row(self) -> Tensor:
        """The rank's own world shard, ``[F]``, a view: DeepSpeed's flat parameter buffer."""
        return self.own[self.layout.row(self.layout.plan.optimizer)]

    def optimizer_rows(self) -> Tensor:
        """The rows the optimizer of this rank updates, ``[N / O, F]``."""
        return self.own

    def publish(self, slots: range | None = None, masters: Tensor | None = None) -> None:
        """Take note of updated masters, for :meth:`begin`, which brings them to all codes and plain shards.

        Args:
            slots: consecutive slots; None is all.
            masters: their masters, ``[N / O, columns]``, unchanged until the step has ended.
        """
        assert masters is not None
        slots = range(len(self.layout.numels)) if slots is None else slots
        self.finish(slots)
        self._noted.append((slots, masters))
        self._updated = recorded_event(self.own.device)

    def begin(self) -> None:
        """Begin to publish all that was updated, codes last; collective."""
        noted, self._noted = self._noted, []
        for slots, masters in noted:
            if plain := self._by_kind(slots)[1]:
                spans = self._plain.layout.spans(plain)
                columns = slice(spans[0][0], spans[-1][1])
                places = self._columns_on[masters.device][columns] - self.layout.begins[slots[0]]
                updated = masters.index_select(1, places).to(self.own)
                self._plain.optimizer_rows()[:, columns].copy_(updated)
                self.own.index_copy_(1, self._plain_columns[columns], updated)
                self._plain.publish(plain)
        self._plain.begin()
        for slots, masters in noted:
            if coded := self._by_kind(slots)[0]:
                first, rows = self.layout.begins[slots[0]], masters.to(self.own.device, torch.float32)
                self.own[:, first : first + rows.shape[1]].copy_(rows)
                self._publisher.start(coded, rows, first)
                if rows is not masters:
                    self._publisher.begin()  # else copies of all masters would be on the device at once
        self._publisher.begin()
        if noted:
            self._updated = recorded_event(self.own.device)

    def _by_kind(self, slots: range) -> tuple[range, range]:
        """The places of consecutive slots, of those that have codes and of the others."""
        coded, plain = (range(kind[slots.start], kind[slots.stop]) for kind in self._kinds)
        return coded, plain

    def finish(self, slots: Sequence[int] | None = None) -> None:
        """Finish what publish has under way for some slots, or for all."""
        slots = range(len(self.layout.numels)) if slots is None else slots
        if self._updated is not None:
            self._updated.wait()
        if not all(set(slots).isdisjoint(of) for of, _ in self._noted):
            self.begin()
        places = [self._places[i] for i in slots]
        self._plain.finish([place for coded, place in places if not coded])
        changed = self._publisher.finish([place for coded, place in places if coded])
        if changed:
            self._updated = recorded_event(self.own.device)

    def publish_world(self, index: int | None = None, masters: Tensor | None = None) -> None:
        """Rebuild all copies from each rank's own world shard: at start-up, after a load, after an edit. Collective.

        Args:
            index: of the one slot that was edited; None is all, and begins with scales anew but for those loaded.
            masters: FP32 ``[F]``, those of the own row; None takes the row itself.
        """
        plan = self.layout.plan
        slots = range(len(self.layout.numels)) if index is None else range(index, index + 1)
        self.finish(slots)
        spans = self.layout.spans(slots)
        columns = slice(spans[0][0], spans[-1][1])
        counted = Counted(self._meter, "publish")
        all_gather_rows(
            self._mesh.route(plan.optimizer, plan.world_size), self.own[:, columns], counted, self._run_numel
        )
        coded, plain = self._by_kind(slots)
        if plain:
            self._plain.own_row.copy_(self.own_row[self._plain_columns])
            self._plain.publish_world(None if index is None else plain[0])
        if index is None:
            scales = torch.zeros_like(self._store.own_scales()) if self._scales is None else self._scales
            self._store.begin_anew(scales)
            self._scales = None
        if coded:
            values = self.own_row if masters is None else masters
            self._starter.start(coded, values[None, columns].float(), columns.start)
            self._starter.finish()
        self._updated = recorded_event(self.own.device)

    def write_back(self, index: int, full: Tensor) -> None:
        """Take over a parameter that every rank holds whole and alike, if it was edited (Note [Exact weights])."""
        plan, (coded, place) = self.layout.plan, self._places[index]
        rows = rows_of(full.detach().reshape(-1), plan)
        self.finish([index])
        held, given = self.layout.slot(self.own, index), self.layout.subset(rows, 1, plan.optimizer)
        if not self._differ(held, given):
            return
        held.copy_(given)
        if coded:
            self._store.recode(place, self.layout.subset(rows, 1, plan.weights).float(), self.layout.begins[index])
        else:
            self._plain.write_back(place, full)
        self._updated = recorded_event(self.own.device)

    def _differ(self, held: Tensor, given: Tensor) -> bool:
        """Whether the rows of any rank are not bit for bit those given. Collective; waits for the device."""
        bits = torch.int16 if held.dtype.itemsize == 2 else torch.int32
        differ = (held.contiguous().view(bits) != given.contiguous().view(bits)).any().view(1).view(torch.uint8)
        counted = Counted(self._meter, "gather_exact")
        return bool(all_gather(self._exact.route, differ, counted).wait().any())

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside the masters: the scales of the own world shard. They make codes of masters."""
        return {"scales": self._store.own_scales()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over scales for the next :meth:`publish_world` of everything, if they are of as many blocks.

        A rank that chooses its scales anew agrees with the others all the same: it sends them.
        """
        saved, own = state.get("scales"), self._store.own_scales()
        self._scales = own.copy_(saved) if isinstance(saved, Tensor) and saved.shape == own.shape else None

    # -- accounting ------------------------------------------------------------------------------------------------

    @property
    def escaped(self) -> tuple[int, ...] | None:
        """Of each run of the last publish: blocks that escaped on the rank with most; None before the first."""
        return tuple(most for _, most in sorted(self._publisher.most.items())) or None

    def memory(self) -> dict[str, int]:
        """Bytes of the weights on this rank: codes, plain slots, and the optimizer's rows."""
        return {"weights": sum(tensor.nbytes for tensor in self.tensors()), "secondary": 0}

    def tensors(self) -> list[Tensor]:
        """What is held; views of these are not."""
        return [self._store.codes.held, *self._plain.tensors(), self.own]

    def copies(self) -> list[Tensor]:
        """What must be bit-identical on all ranks that share it (for debug checks)."""
        return [torch.cat([self._store.codes.held, self._plain.primary.view(-1).view(torch.uint8)])]
