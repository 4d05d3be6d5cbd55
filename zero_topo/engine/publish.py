# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Publish: the all-gather of updated weights from the optimizer shards to the weight shards after a step.

Note [Delta publish]
    With ``"delta"`` the owner of a row sends ``q = Q(master - w)``, where ``w`` is the row as every rank stores it.
    Every rank, the owner included, replaces ``w`` by ``w + q``: one FP32 sum, rounded once to the dtype of the weights.
    All ranks do the same arithmetic on the same bits, so all copies stay bit-identical. The error of ``q`` and of the
    rounding is part of the next difference: the FP32 master serves as error feedback. Each row of a parameter is padded
    to whole blocks, so a norm never shares a scale with a matrix.

Note [Publish under forward]
    Updated parameters are collected over all sub-groups of the optimizer. Their publish begins
    (:meth:`Publisher.begin`) when the first of them is needed or the step ends. Persistent parameters are published
    first, in separate runs: DeepSpeed gathers them at the end of the step, which waits for these runs only. Other runs
    follow in the order in which the model needs them: vectors, often a separate sub-group, are needed by the first
    module. A run is finished when a gather first needs one of its parameters (:meth:`Publisher.finish`). Each parameter
    has a version count, and a gather of a stale version raises an error instead of reading it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

from torch import Tensor

from zero_topo.collectives.meter import Meter
from zero_topo.collectives.queue import Handle
from zero_topo.plan import packed_runs

Update = tuple[Sequence[int], Tensor | None, int]
"""Parameters, their masters ``[rows, columns]`` (None: the rows already have the new weights), and the first column."""

Planner = Callable[[Sequence[Update], Mapping[int, int]], list[Update]]
"""Cuts updates into runs, with the sizes of those parameters that take part; see :func:`runs_of`."""

Begun = Iterator[tuple[Sequence[int], Handle[None]]]
"""Runs in progress: the parameters that one collective carries, and its handle."""


class Publisher:
    """Publishes parameters run by run, and tracks which version of each is stored.

    Args:
        count: number of parameters.
        codecs: each begins the runs of the updated parameters that it sends in its format.
        meter: counts under "publish".
    """

    def __init__(self, count: int, codecs: Sequence[Callable[[Sequence[Update]], Begun]], meter: Meter) -> None:
        self._codecs, self._meter = codecs, meter
        # By parameter: the number of updates, and the number of finished publishes. The host counts both; a gather
        # compares them, so no weights are read between their update and the end of their publish.
        self._wanted = [0] * count
        self._held = [0] * count
        # Updates of this step whose publish has not begun: the first reader or the step's end begins all.
        self._updates: list[Update] = []
        # Runs begun, oldest first: the queue's stream writes the shards; whoever has waited for the handle may read.
        self._pending: list[tuple[Sequence[int], Handle[None]]] = []

    def begin(self) -> bool:
        """Begin to publish all updated parameters; return whether there were any. Collective."""
        updates, self._updates = self._updates, []
        if not updates:
            return False
        with self._meter.timing("publish"):
            for begin in self._codecs:
                self._pending += begin(updates)
        return True

    def start(self, slots: Sequence[int], masters: Tensor | None = None, first: int = 0) -> None:
        """Record consecutive parameters whose optimizer rows were updated, for :meth:`begin`.

        Args:
            slots: the parameters.
            masters: their masters ``[rows, columns]``, unchanged until the step has ended; None if the rows already
                have the new weights.
            first: the column of the layout at which the masters begin.
        """
        for slot in slots:
            assert self._held[slot] == self._wanted[slot], "finish the last publish first"
            self._wanted[slot] += 1
        self._updates.append((slots, masters, first))

    def finish(self, slots: Iterable[int] | None = None) -> list[int]:
        """Finish the publishes of some parameters, or of all; collective if it is hierarchical.

        Returns:
            The parameters whose weights changed.

        Raises:
            RuntimeError: if a parameter still has a stale version.
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
            raise RuntimeError(f"weights of parameters {sorted(stale)[:8]} would be read before publish updated them")
        return changed


def runs_of(
    urgency: Sequence[tuple[bool, int]], limit: int, updates: Sequence[Update], sizes: Mapping[int, int]
) -> list[Update]:
    """Cut updates into runs of at most ``limit`` elements, the most urgent first, persistent parameters apart.

    Args:
        urgency: by parameter: whether its publish may continue after the step, and its position in the model's order.
        limit: elements of a run; a larger parameter is a run of its own.
        updates: of some parameters.
        sizes: elements of the parameters that take part.
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
