# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""When tasks run that wait for each other and for what they need alone, such as a stream or a link.

Note [Order]
    Everything that tasks hold (a stream, a link) serves them in the order of the program, as the queues of a GPU do: a
    task begins once the tasks it waits for have ended and the ones before it have let go of what it needs. Two
    collectives on one link thus take turns. Beginnings are then maxima of sums of durations: a faster link or a
    faster rank never makes anything later, a step lasts at least as long as whatever is busy longest, and at most as
    long as all tasks one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMPUTE = "compute"


@dataclass(frozen=True)
class Event:
    """Something that happened; times in seconds from the beginning of the step.

    Attributes:
        name: what.
        phase: as the meter's, or "compute", or "optimizer".
        stream: "compute", "pack", or the domain whose link it used.
        begin_s: when it began.
        end_s: when it ended.
        bytes: what this rank sent.
    """

    name: str
    phase: str
    stream: str
    begin_s: float
    end_s: float
    bytes: float


@dataclass(frozen=True)
class Task:
    """What is to be done.

    Attributes:
        name, phase, stream, nbytes: as the event's.
        seconds: how long it takes.
        holds: what it needs alone -> seconds from its beginning until it lets go, at most ``seconds``.
        after: indices of tasks, earlier in the program, that must have ended.
    """

    name: str
    phase: str
    stream: str
    seconds: float
    holds: Mapping[str, float]
    after: tuple[int, ...]
    nbytes: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """When each task of a program ran.

    Attributes:
        events: one for each task.
        causes: for each task the task that let it begin when it did, or None at the beginning.
    """

    events: tuple[Event, ...]
    causes: tuple[int | None, ...]

    @property
    def end_s(self) -> float:
        """When the last task ended."""
        return max((event.end_s for event in self.events), default=0.0)

    def exposed(self) -> dict[str, float]:
        """Seconds by phase for which the compute stream worked, or waited for a task of that phase; sums to the end."""
        seconds: defaultdict[str, float] = defaultdict(float)
        last = 0.0
        for index, event in enumerate(self.events):
            if event.stream != COMPUTE:
                continue
            self._blame(index, last, seconds)
            seconds[event.phase] += event.end_s - event.begin_s
            last = event.end_s
        return dict(seconds)

    def _blame(self, index: int, since: float, seconds: defaultdict[str, float]) -> None:
        """Gives the wait before a task to the tasks that it was for, the last one first."""
        until = self.events[index].begin_s
        cause = self.causes[index]
        while cause is not None and until > since:
            begin = max(since, self.events[cause].begin_s)
            if begin < until:
                seconds[self.events[cause].phase] += until - begin
                until = begin
            cause = self.causes[cause]


def schedule(tasks: Sequence[Task]) -> Timeline:
    """Run a program; see Note [Order]."""
    free: dict[str, tuple[float, int]] = {}
    events: list[Event] = []
    causes: list[int | None] = []
    for index, task in enumerate(tasks):
        begin, cause = 0.0, None
        for earlier in task.after:
            if events[earlier].end_s > begin:
                begin, cause = events[earlier].end_s, earlier
        for held in task.holds:
            moment, holder = free.get(held, (0.0, 0))
            if moment > begin:
                begin, cause = moment, holder
        for held, seconds in task.holds.items():
            free[held] = (begin + seconds, index)
        events.append(Event(task.name, task.phase, task.stream, begin, begin + task.seconds, task.nbytes))
        causes.append(cause)
    return Timeline(tuple(events), tuple(causes))
