# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Counts the bytes each collective sends, per phase and domain, and the seconds a rank spends on each phase."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

Key = tuple[str, str]

PHASES = ("gather_forward", "gather_backward", "gather_exact", "scatter", "sync", "publish")


class Meter:
    """Bytes this rank sends, keyed ``(phase, domain)``, since the start and within the current optimizer step.

    A member of a group of ``d`` ranks that contributes a message of ``b`` bytes sends ``(d - 1) * b``: the volume of
    every bandwidth-optimal algorithm (ring, pairwise, direct), whatever the backend underneath does. An exchange that
    a backend inflates (gloo's own reduce-scatter sends twice) is never used.

    Args:
        enabled: False makes every call free of cost.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._step: Counter[Key] = Counter()
        self._last: Counter[Key] = Counter()
        self._total: Counter[Key] = Counter()
        self.calls: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._last_seconds: Mapping[str, float] = {}
        self._open: list[str] = []
        self._mark = 0.0
        self.steps = 0

    def record(self, phase: str, domain: str, nbytes: int) -> None:
        """Add one collective in which this rank sent ``nbytes``; zero bytes leave no entry."""
        if self._enabled and nbytes:
            self._step[phase, domain] += nbytes
            self.calls[phase] += 1

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """The host works for, or waits for, a phase: encoding, blocking in a collective, decoding.

        What runs beside the computation costs nothing until it is waited for. A phase inside another stops the outer
        one's clock. On a GPU this is the host's time alone.
        """
        if not self._enabled:
            yield
            return
        self._tick()
        self._open.append(phase)
        try:
            yield
        finally:
            self._tick()
            self._open.pop()

    def _tick(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._mark
        self._mark = now

    def end_step(self) -> None:
        """Close an optimizer step: its counts become :meth:`last_step`."""
        self._total.update(self._step)
        self._last, self._step = self._step, Counter()
        self._last_seconds, self._seconds = self._seconds, defaultdict(float)
        self.steps += 1

    def reset_step(self) -> None:
        """Forget what was counted since the last :meth:`end_step` (evaluation, set-up)."""
        self._step, self._seconds = Counter(), defaultdict(float)

    def last_step(self) -> Mapping[Key, int]:
        """Bytes of the last closed optimizer step."""
        return dict(self._last)

    def last_seconds(self) -> Mapping[str, float]:
        """Seconds by phase of the last closed optimizer step, see :meth:`timing`."""
        return dict(self._last_seconds)

    def total(self) -> Mapping[Key, int]:
        """Bytes of all closed optimizer steps."""
        return dict(self._total)
