# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Publish: updated weights travel from the optimizer shards back to the weight shards, run by run.

Note [Delta publish]
    With ``"delta"`` the owner of a row sends ``q = Q(master - w)``, where ``w`` is what every rank holds of it, and
    every rank, the owner included, puts ``w + q`` in its place: one FP32 sum, one rounding to the type of the weights.
    Since the owner's ``w`` goes through the very same arithmetic, all copies stay bit-identical, and what ``q`` or the
    rounding left out is in the next difference: the FP32 master is the error's memory. A row of a parameter is filled
    up to whole blocks, so a norm never shares a scale with a matrix.

Note [Publish under forward]
    Updated slots are collected over all sub-groups of the optimizer, and begin together (:meth:`Publication.begin`),
    when the first is needed or the step ends. Persistent parameters come first, in runs of their own: DeepSpeed gathers
    them at the end of the step, which waits for these alone, and ends with the parameters whole, as in stock ZeRO-3.
    Other runs follow in the order in which the model needs them: vectors, which often are a sub-group of their own, are
    needed by the first module. A run is finished when a gather first needs one of its parameters
    (:meth:`Publication.finish`). Every slot carries the version of its weights, and a gather of another version than
    the present one raises instead of reading it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from zero_topo.collectives.all_gather import all_gather_pieces, spread
from zero_topo.collectives.handle import Handle
from zero_topo.collectives.lane import Lane
from zero_topo.collectives.meter import Counted, Meter
from zero_topo.collectives.pack import Span, members, merged, places_of, span_pieces
from zero_topo.collectives.wire import Wire
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Mesh, Route
from zero_topo.plan import packed_runs
from zero_topo.quant.pieces import Piece
from zero_topo.quant.spec import Reduce


@dataclass(frozen=True)
class PublishOptions:
    """Format of the messages (of differences if it quantizes), and elements per collective."""

    wire: Wire
    run_numel: int


@dataclass(frozen=True)
class Updated:
    """Slots, the masters that they are published from, if from these, and the first master's column."""

    slots: Sequence[int]
    masters: Tensor | None
    first: int


Begun = Iterator[tuple[Sequence[int], Handle[None]]]
"""Runs of slots, each with the handle of its publish."""


class Publication:
    """Publishes slots run by run, and knows which version of each is held.

    Args:
        sizes: elements of each slot, with padding.
        urgency: what slots are sorted by; see :class:`Layout`.
        run_numel: elements of a run.
        route: ``(weights, optimizer)``.
        meter: counts under "publish".
        lane: where it runs.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        urgency: Sequence[tuple[bool, int]],
        run_numel: int,
        *,
        route: Route,
        meter: Meter,
        lane: Lane,
    ) -> None:
        self._sizes, self._urgency, self._run_numel = sizes, urgency, run_numel
        self._route, self._meter, self._lane = route, meter, lane
        self._counted = Counted(meter, "publish")
        self._wanted = [0] * len(sizes)  # version of the weights, by slot
        self._held = [0] * len(sizes)  # version that is held
        self._updated: list[Updated] = []
        self._pending: list[tuple[Sequence[int], Handle[None]]] = []

    def _begin(self, runs: Sequence[Updated]) -> Begun:
        """Begin to publish some runs; each with its handle."""
        raise NotImplementedError

    def begin(self) -> None:
        """Begin to publish all that was updated, the most urgent at first; collective."""
        if not self._updated:
            return
        updated, self._updated = self._updated, []
        runs = []
        for of in updated:
            for later in (False, True):
                slots = [i for i in of.slots if self._urgency[i][0] is later]
                runs += [replace(of, slots=run) for run in runs_of(slots, self._sizes, self._run_numel)]
        runs.sort(key=lambda run: min(self._urgency[i] for i in run.slots))
        with self._meter.timing("publish"):
            self._pending += self._begin(runs)

    def start(self, slots: range, masters: Tensor | None = None, first: int = 0) -> None:
        """Take note of consecutive slots whose optimizer rows were updated, for :meth:`begin`.

        Args:
            slots: the slots.
            masters: ``[rows, columns]`` of these slots, unchanged until the step has ended; None where the rows hold
                the new weights already.
            first: the column that the first of the masters is.
        """
        assert all(self._held[slot] == self._wanted[slot] for slot in slots), "finish the last publish first"
        for slot in slots:
            self._wanted[slot] += 1
        self._updated.append(Updated(slots, masters, first))

    def finish(self, slots: Iterable[int] | None = None) -> list[int]:
        """Finish what is under way for some slots, or for all; collective where publish takes two hops.

        Returns:
            The slots whose weights changed.

        Raises:
            RuntimeError: if a slot still is not of the present version.
        """
        wanted = set(range(len(self._wanted)) if slots is None else slots)
        if not all(wanted.isdisjoint(of.slots) for of in self._updated):
            self.begin()
        changed: list[int] = []
        waiting = []
        for part, handle in self._pending:
            if wanted.isdisjoint(part):
                waiting.append((part, handle))
                continue
            with self._meter.timing("publish"):
                handle.wait()
            changed += part
            for slot in part:
                self._held[slot] += 1
        self._pending = waiting
        stale = [slot for slot in wanted if self._held[slot] != self._wanted[slot]]
        if stale:
            raise RuntimeError(f"weights of slots {sorted(stale)[:8]} are about to be read before they were published")
        return changed


class Publisher(Publication):
    """Publishes into a primary weight shard.

    Args:
        layout: the slots.
        mesh: holds the route ``(weights, optimizer)``.
        primary: ``[N / W, F]``.
        options: the format; with differences, masters are needed.
        meter: counts under "publish".
        lane: where it runs.
    """

    def __init__(
        self, layout: Layout, mesh: Mesh, primary: Tensor, options: PublishOptions, meter: Meter, lane: Lane
    ) -> None:
        plan = layout.plan
        sizes, route = layout.padded_numels, mesh.route(plan.weights, plan.optimizer)
        super().__init__(sizes, layout.urgency, options.run_numel, route=route, meter=meter, lane=lane)
        self._layout, self._primary, self._options = layout, primary, options

    def _begin(self, runs: Sequence[Updated]) -> Begun:
        for run in runs:
            parts = [self._layout.spans(range(*part)) for part in merged((i, i + 1) for i in run.slots)]  # neighbours
            rows = [] if run.masters is None else [self._columns(run.masters, run.first, part) for part in parts]
            yield run.slots, self._lane.run(partial(self._publish, parts, rows), rows)

    def _columns(self, masters: Tensor, first: int, spans: Sequence[Span]) -> Tensor:
        begin, end = spans[0][0] - first, spans[-1][1] - first
        return masters[:, begin:end].to(self._primary.device, torch.float32)

    def _publish(self, parts: Sequence[Sequence[Span]], masters: Sequence[Tensor]) -> Handle[None]:
        wire, by_member = self._options.wire, members(self._primary, self._route.size)
        parts = [merged(spans, wire.block) for spans in parts]
        pieces = span_pieces(by_member, chain(*parts), wire.block)
        if not masters:
            if self._route.size == 1:
                return Handle(None, (), lambda: None)
            return all_gather_pieces(self._route, pieces, wire, self._counted)
        own, differences = by_member[self._route.index], list[Piece]()
        for spans, rows in zip(parts, masters, strict=True):
            # What turns what all ranks hold into (almost) what the masters say.
            differ = rows - own[:, spans[0][0] : spans[-1][1]]
            differences += span_pieces(differ, places_of(spans), wire.block)
        message = wire.encode(differences)
        add = Reduce(accumulate=True)
        wire.decode(message, [piece.member(self._route.index) for piece in pieces], add)
        return spread(self._route, message, pieces, wire, self._counted, add)


def runs_of(slots: Sequence[int], sizes: Sequence[int], limit: int) -> list[Sequence[int]]:
    """Slots in runs of at most ``limit`` elements, ``sizes`` being those of all slots."""
    return [slots[run.start : run.stop] for run in packed_runs([sizes[slot] for slot in slots], limit)]
