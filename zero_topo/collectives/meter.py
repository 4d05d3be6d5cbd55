# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Counts the bytes each exchange sends, per phase and domain, and the seconds a rank spends on each phase."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from torch._C._profiler import _RecordFunctionFast

from zero_topo.collectives.queue import Handle

Key = tuple[str, str]
Span = tuple[str, float, float]
"""A phase, and when the host began and ended to work or wait for it."""
MOST_SPANS = 1 << 14  # 2 MB; evaluations without a step between them have no end
T = TypeVar("T")


@dataclass(frozen=True)
class Exchange:
    """One collective of one group, as this rank takes part in it.

    Attributes:
        op: to all others the same message, or to each its own.
        phase: one of ``plan.PHASES``.
        domain: smallest domain that holds the group.
        members: ranks of the group.
        nbytes: what this rank sends to the others.
        even: whether every member sends as much.
    """

    op: Literal["all_gather", "all_to_all"]
    phase: str
    domain: str
    members: int
    nbytes: int
    even: bool


class Listener(Protocol):
    """Is asked at each exchange whether it wants to time it."""

    def listens(self, exchange: Exchange) -> bool:
        """Whether to time this one, which then blocks."""

    def timing(self, exchange: Exchange) -> AbstractContextManager[None]:
        """Around an exchange, from before it begins until it has finished."""


class Meter:
    """Bytes this rank sends, keyed ``(phase, domain)``, since the start and within the current optimizer step.

    A member of a group of ``d`` ranks that contributes a message of ``b`` bytes sends ``(d - 1) * b``: the volume of
    every bandwidth-optimal algorithm (ring, pairwise, direct), whatever the backend underneath does. An exchange that
    a backend inflates (gloo's own reduce-scatter sends twice) is never used.

    Args:
        enabled: False counts nothing.

    Attributes:
        listener: is asked at each exchange whether it wants it timed, counted or not.
    """

    listener: Listener | None = None

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        # Bytes of the step under way, of the last closed one, and of all closed ones: `end_step` moves them on.
        self._step: Counter[Key] = Counter()
        self._last: Counter[Key] = Counter()
        self._total: Counter[Key] = Counter()
        self.calls: Counter[str] = Counter()  # by phase, since the start; a rank that watches the others compares them
        # Seconds of the host by phase since `_began`, in sum and one after the other; and of the last closed step.
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._last_seconds: Mapping[str, float] = {}
        self._began = time.perf_counter()
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._last_spans: Collection[Span] = ()
        # Phases that the host is in, innermost last: `phase` reads them from any thread. Only the innermost one's clock
        # runs, since `_mark`.
        self._open: list[str] = []
        self._mark = 0.0
        self.steps = 0

    def record(self, phase: str, domain: str, nbytes: int) -> None:
        """Add one collective in which this rank sent ``nbytes``; zero bytes leave no entry."""
        if self._enabled and nbytes:
            self._step[phase, domain] += nbytes
            self.calls[phase] += 1

    def exchange(self, exchange: Exchange, begin: Callable[..., Handle[T]], *arguments: Any) -> Handle[T]:
        """Begin and count an exchange; if a listener wants to time it, also finish it.

        Args:
            exchange: what it is.
            begin: starts it.
            arguments: of ``begin``.

        Returns:
            What ``begin`` returned.
        """
        self.record(exchange.phase, exchange.domain, exchange.nbytes)
        if self.listener is None or not self.listener.listens(exchange):
            return begin(*arguments)
        with self.listener.timing(exchange):
            handle = begin(*arguments)
            handle.wait()
        return handle

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """The host works for, or waits for, a phase: encoding, blocking in a collective, decoding.

        What runs beside the computation costs nothing until it is waited for. A phase inside another stops the outer
        one's clock. On a GPU this is the host's time alone. A profiler sees ``zero_topo.<phase>``, also of a meter that
        is off.
        """
        # torch.profiler.record_function costs 30 times as much where no profiler runs: 20 us to these 0.7.
        with _RecordFunctionFast(f"zero_topo.{phase}"):
            self._tick()
            self._open.append(phase)
            try:
                yield
            except RuntimeError as error:  # of a backend, when a rank has died: it names an address at best
                error.add_note(f"zero_topo: in {phase} of step {self.steps}")
                raise
            finally:
                self._tick()
                self._open.pop()

    def phase(self) -> str:
        """The phase that the host works or waits for now, from any thread; empty outside of all."""
        return next(reversed(self._open), "")

    def _tick(self) -> None:
        now = time.perf_counter()
        if self._open and self._enabled:
            self._seconds[self._open[-1]] += now - self._mark
            self._spans.append((self._open[-1], self._mark - self._began, now - self._began))
        self._mark = now

    def end_step(self) -> None:
        """Close an optimizer step: its counts become :meth:`last_step`."""
        self._total.update(self._step)
        self._last, self._step = self._step, Counter()
        self._last_seconds, self._last_spans = self._seconds, self._spans
        self._restart_clock()
        self.steps += 1

    def reset_step(self) -> None:
        """Forget what was counted since the last :meth:`end_step` (evaluation, set-up)."""
        self._step = Counter()
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._began, self._seconds, self._spans = time.perf_counter(), defaultdict(float), deque(maxlen=MOST_SPANS)

    def last_step(self) -> Mapping[Key, int]:
        """Bytes of the last closed optimizer step."""
        return dict(self._last)

    def last_seconds(self) -> Mapping[str, float]:
        """Seconds by phase of the last closed optimizer step, see :meth:`timing`."""
        return dict(self._last_seconds)

    def last_spans(self) -> Collection[Span]:
        """What :meth:`last_seconds` sums, in order, in seconds since the step before was closed; the last 16,384."""
        return self._last_spans

    def total(self) -> Mapping[Key, int]:
        """Bytes of all closed optimizer steps."""
        return dict(self._total)


@dataclass(frozen=True)
class Counted:
    """Where what is sent is counted, and as what.

    Attributes:
        meter: counts the bytes.
        phase: one of ``plan.PHASES``.
    """

    meter: Meter
    phase: str
