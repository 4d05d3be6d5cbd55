# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Publish: updated weights travel from the optimizer shards back to the weight shards, run by run.

Note [Delta publish]
    With ``"delta"`` the owner of a row sends ``q = Q(master - w)``, where ``w`` is what every rank holds of it, and
    every rank, the owner included, puts ``w + q`` in its place: one FP32 sum, one rounding to the type of the weights.
    Since the owner's ``w`` goes through the very same arithmetic, all copies stay bit-identical, and what ``q`` or the
    rounding left out is in the next difference: the FP32 master is the error's memory. A row of a parameter is filled
    up to whole blocks, so a norm never shares a scale with a matrix.

Note [Publish under forward]
    Updated slots are collected over all sub-groups of the optimizer. At the end of the step all runs begin, in the
    order in which the model needs them (:meth:`Publication.begin`): vectors, which often are a sub-group of their own,
    are needed by the first module. A run is finished when a gather first needs one of its parameters
    (:meth:`Publication.finish`). Every slot carries the version of its weights, and a gather of another version than
    the present one raises instead of reading it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from zero_topo.collectives.all_gather import all_gather_pieces, spread
from zero_topo.collectives.handle import Handle
from zero_topo.collectives.lane import Lane
from zero_topo.collectives.meter import Counted, Meter
from zero_topo.collectives.pack import members, merged, places_of, span_pieces
from zero_topo.collectives.wire import Wire
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Mesh, Route
from zero_topo.plan import packed_runs
from zero_topo.quant.spec import Reduce


@dataclass(frozen=True)
class PublishOptions:
    """Format of the messages (of differences if it quantizes), and elements per collective."""

    wire: Wire
    run_numel: int


@dataclass(frozen=True)
class Updated:
    """Consecutive slots, the FP32 masters that they are published from, if from these, and the first one's column."""

    slots: range
    masters: Tensor | None
    first: int


class Publication:
    """Publishes slots run by run, and knows which version of each is held.

    Args:
        sizes: elements of each slot, with padding.
        order: of each slot, its place in the order in which the model needs them.
        run_numel: elements of a run.
        route: ``(weights, optimizer)``.
        meter: counts under "publish".
        lane: where it runs.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        order: Sequence[int],
        run_numel: int,
        *,
        route: Route,
        meter: Meter,
        lane: Lane,
    ) -> None:
        self._sizes, self._order, self._run_numel = sizes, order, run_numel
        self._route, self._meter, self._lane = route, meter, lane
        self._counted = Counted(meter, "publish")
        self._wanted = [0] * len(sizes)  # version of the weights, by slot
        self._held = [0] * len(sizes)  # version that is held
        self._updated: list[Updated] = []
        self._pending: list[tuple[range, Handle[None]]] = []

    @property
    def busy(self) -> bool:
        """Whether anything is under way to or from other ranks."""
        return self._lane.overlaps and self._route.size > 1 and bool(self._pending or self._updated)

    def _begin(self, runs: Sequence[Updated]) -> Iterator[tuple[range, Handle[None]]]:
        """Begin to publish some runs; each with its handle."""
        raise NotImplementedError

    def begin(self) -> None:
        """Begin to publish all that was updated, what the model needs first at first; collective."""
        if not self._updated:
            return
        updated, self._updated = self._updated, []
        runs = [replace(of, slots=run) for of in updated for run in runs_of(of.slots, self._sizes, self._run_numel)]
        runs.sort(key=lambda run: min(self._order[slot] for slot in run.slots))
        with self._meter.timing("publish"):
            self._pending += self._begin(runs)

    def start(self, slots: range, masters: Tensor | None = None, first: int = 0) -> None:
        """Take note of consecutive slots whose optimizer rows were updated, for :meth:`begin`.

        Args:
            slots: the slots.
            masters: FP32 ``[rows, columns]`` of these slots; None where the rows hold the new weights already.
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
        super().__init__(sizes, layout.needed, options.run_numel, route=route, meter=meter, lane=lane)
        self._layout, self._primary, self._options = layout, primary, options

    def _begin(self, runs: Sequence[Updated]) -> Iterator[tuple[range, Handle[None]]]:
        for run in runs:
            reads = [] if run.masters is None else [run.masters]
            yield run.slots, self._lane.run(partial(self._publish, run), reads)

    def _publish(self, run: Updated) -> Handle[None]:
        spans, masters, first = self._layout.spans(run.slots), run.masters, run.first
        wire, by_member = self._options.wire, members(self._primary, self._route.size)
        spans = merged(spans, wire.block)
        pieces = span_pieces(by_member, spans, wire.block)
        if masters is None:
            if self._route.size == 1:
                return Handle(None, (), lambda: None)
            return all_gather_pieces(self._route, pieces, wire, self._counted)
        begin, end = spans[0][0], spans[-1][1]  # slots are neighbours
        # What turns what all ranks hold into (almost) what the masters say.
        differences = masters[:, begin - first : end - first] - by_member[self._route.index][:, begin:end]
        message = wire.encoded(span_pieces(differences, places_of(spans), wire.block))
        add = Reduce(accumulate=True)
        wire.decode(message, [piece.member(self._route.index) for piece in pieces], add)
        return spread(self._route, message, pieces, wire, self._counted, add)


def runs_of(slots: range, sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive slots in runs of at most ``limit`` elements, ``sizes`` being those of all slots."""
    runs = packed_runs([sizes[slot] for slot in slots], limit)
    return [range(slots.start + run.start, slots.start + run.stop) for run in runs]
