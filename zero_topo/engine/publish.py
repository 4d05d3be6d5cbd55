# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Publish: updated weights travel from the optimizer shards back to the weight shards, run by run.

Note [Delta publish]
    With ``"delta"`` the owner of a row sends ``q = Q(master - w)``, where ``w`` is what every rank holds of it, and
    every rank, the owner included, puts ``w + q`` in its place: one FP32 sum, one rounding to the type of the weights.
    Since the owner's ``w`` goes through the very same arithmetic, all copies stay bit-identical, and what ``q`` or the
    rounding left out is in the next difference: the FP32 master is the error's memory. A row of a parameter is filled
    up to whole blocks, so a norm never shares a scale with a matrix.

Note [Publish under forward]
    Updated slots are collected over all sub-groups of the optimizer, and begin together (:meth:`Publisher.begin`),
    when the first is needed or the step ends. Persistent parameters come first, in runs of their own: DeepSpeed gathers
    them at the end of the step, which waits for these alone, and ends with the parameters whole, as in stock ZeRO-3.
    Other runs follow in the order in which the model needs them: vectors, which often are a sub-group of their own, are
    needed by the first module. A run is finished when a gather first needs one of its parameters
    (:meth:`Publisher.finish`). Every slot carries the version of its weights, and a gather of another version than
    the present one raises instead of reading it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor

from zero_topo.collectives.meter import Counted, Meter
from zero_topo.collectives.queue import Handle, OrderedQueue
from zero_topo.collectives.transport import all_gather_views, members
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Route
from zero_topo.plan import packed_runs
from zero_topo.quant.operands import Range, View, merged, packed_ranges, range_views
from zero_topo.quant.ops import dequantize, quantize
from zero_topo.quant.spec import Format

Update = tuple[Sequence[int], Tensor | None, int]
"""Parameters, their masters ``[rows, columns]`` (None: their rows have the new weights), the first master's column."""

Planner = Callable[[Sequence[Update], Mapping[int, int]], list[Update]]
"""Cuts updates of the parameters that have a size into runs; see :func:`runs_of`."""


Begun = Iterator[tuple[Sequence[int], Handle[None]]]
"""Runs under way: the parameters that one collective carries, and its handle."""


class Publisher:
    """Publishes parameters run by run, and knows which version of each is stored.

    Args:
        count: parameters.
        codecs: each begins the runs of those updated parameters that it sends, in its own format.
        meter: counts under "publish".
    """

    def __init__(self, count: int, codecs: Sequence[Callable[[Sequence[Update]], Begun]], meter: Meter) -> None:
        self._codecs, self._meter = codecs, meter
        # How often each parameter was updated, and how many of these updates have arrived. The host counts; a gather
        # compares both, so that no weights are read between their update and the end of their publish.
        self._wanted = [0] * count
        self._held = [0] * count
        # Updates of this step, which wait for the first reader or the step's end to begin together.
        self._updates: list[Update] = []
        # Begun, oldest first: the lane's stream writes the shards; who waits for the handle may read them.
        self._pending: list[tuple[Sequence[int], Handle[None]]] = []

    def begin(self) -> bool:
        """Begin to publish all that was updated; collective. Whether there was anything."""
        updates, self._updates = self._updates, []
        if not updates:
            return False
        with self._meter.timing("publish"):
            for begin in self._codecs:
                self._pending += begin(updates)
        return True

    def start(self, slots: Sequence[int], masters: Tensor | None = None, first: int = 0) -> None:
        """Take note of consecutive parameters whose optimizer rows were updated, for :meth:`begin`.

        Args:
            slots: the parameters.
            masters: ``[rows, columns]`` of these, unchanged until the step has ended; None where the rows have the new
                weights already.
            first: the column that the first of the masters is.
        """
        for slot in slots:
            assert self._held[slot] == self._wanted[slot], "finish the last publish first"
            self._wanted[slot] += 1
        self._updates.append((slots, masters, first))

    def finish(self, slots: Iterable[int] | None = None) -> list[int]:
        """Finish what is under way for some parameters, or for all; collective where publish takes two hops.

        Returns:
            The parameters whose weights changed.

        Raises:
            RuntimeError: if a parameter still is not of the present version.
        """
        wanted = set(range(len(self._wanted)) if slots is None else slots)
        for updated, *_ in self._updates:
            if not wanted.isdisjoint(updated):
                self.begin()
                break
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


class RowCodec:
    """Publishes rows of a primary weight shard, in a dtype or as quantized differences to the masters.

    Args:
        layout: the parameters; those of no columns are stored elsewhere.
        sizes: of each parameter that it publishes: elements with padding, over the whole world.
        route: ``(weights, optimizer)``.
        primary: ``[N / W, F]``.
        wire: the format; if it quantizes, masters are needed.
        counted: meter and phase.
        planned: cuts updates into runs.
        lane: where runs are started and finished.
    """

    def __init__(
        self,
        layout: Layout,
        sizes: Mapping[int, int],
        route: Route,
        primary: Tensor,
        wire: Format,
        counted: Counted,
        planned: Planner,
        lane: OrderedQueue,
    ) -> None:
        self._layout, self._sizes, self._route, self._primary = layout, sizes, route, primary
        self._wire, self._counted, self._planned, self._lane = wire, counted, planned, lane

    def begin(self, updates: Sequence[Update]) -> Begun:
        """Begin to publish some updates; with differences these have masters, and else none."""
        for slots, masters, first in self._planned(updates, self._sizes):
            parts, rows = [self._layout.spans(slots)], list[Tensor]()
            if masters is not None:
                parts = [self._layout.spans(range(*part)) for part in merged((i, i + 1) for i in slots)]  # neighbours
                tables = [masters[:, part[0][0] - first : part[-1][1] - first] for part in parts]
                rows = [table.to(self._primary.device, torch.float32) for table in tables]
            yield slots, self._lane.run(partial(self._publish, parts, rows), rows)

    def _publish(self, parts: Sequence[Sequence[Range]], masters: Sequence[Tensor]) -> Handle[None]:
        wire, by_member = self._wire, members(self._primary, self._route.size)
        parts = [merged(spans, wire.block_size) for spans in parts]
        pieces = range_views(by_member, chain(*parts), wire.block_size)
        if not masters:
            if self._route.size == 1:
                return Handle(None, (), lambda: None)
            return all_gather_views(self._route, pieces, wire, self._counted)
        own, differences = by_member[self._route.index], list[View]()
        for spans, rows in zip(parts, masters, strict=True):
            # What turns what all ranks hold into (almost) what the masters say.
            differ = rows - own[:, spans[0][0] : spans[-1][1]]
            differences += range_views(differ, packed_ranges(spans), wire.block_size)
        message = quantize(differences, wire)
        dequantize(message, wire, [piece.member(self._route.index) for piece in pieces], accumulate=True)
        return all_gather_views(self._route, pieces, wire, self._counted, message, accumulate=True)


def runs_of(
    urgency: Sequence[tuple[bool, int]], limit: int, updates: Sequence[Update], sizes: Mapping[int, int]
) -> list[Update]:
    """Updates cut into runs of at most ``limit`` elements, the most urgent first, persistent parameters apart.

    Args:
        urgency: of each parameter: whether publish may go on after the step, and its place among those the model needs.
        limit: elements of a run; a parameter above it is a run of its own.
        updates: of some parameters.
        sizes: elements of those parameters that take part.
    """
    runs: list[tuple[tuple[bool, int], Update]] = []
    for slots, masters, first in updates:
        for later in (False, True):
            part = [slot for slot in slots if slot in sizes and urgency[slot][0] is later]
            for run in packed_runs([sizes[slot] for slot in part], limit):
                carried = part[run.start : run.stop]
                runs.append((min(map(urgency.__getitem__, carried)), (carried, masters, first)))
    runs.sort(key=itemgetter(0))
    return [run for _, run in runs]
