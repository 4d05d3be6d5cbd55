# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Counts the bytes each exchange sends, per phase and domain, and the seconds a rank spends on each
phase.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch._C._profiler import _RecordFunctionFast

Key = tuple[str, str]


class Meter:
    """Counts the bytes this rank sends by ``(phase, domain)``, since the start and in the current
    optimizer step.

    A member of a group of ``d`` ranks that contributes a message of ``b`` bytes sends
    ``(d - 1) * b``: the volume of every bandwidth-optimal algorithm (ring, pairwise, direct),
    whatever algorithm the backend uses. Exchanges for which a backend sends more (gloo's own
    reduce-scatter sends every byte twice) are never used.

    Attributes:
        step: bytes of the current optimizer step, to which each group adds.
        last_step: bytes of the last closed optimizer step.
        last_seconds: seconds by phase of the last closed optimizer step, see :meth:`timing`.
        total: bytes of all closed optimizer steps.
    """

    def __init__(self) -> None:
        self.step: Counter[Key] = Counter()
        self.last_step: Counter[Key] = Counter()
        self.total: Counter[Key] = Counter()
        # By phase, since the start; the watching rank compares them
        self.calls: Counter[str] = Counter()
        # Host seconds by phase of the current step, and of the last one
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.last_seconds: Mapping[str, float] = {}
        # Phases that the host is in, innermost last; `phase` reads them from any thread. Only the
        # clock of the innermost phase runs, since `_mark`.
        self._open: list[str] = []
        self._mark = 0.0
        self.steps = 0

    def record(self, phase: str, domain: str, nbytes: int) -> None:
        """Add one collective of DeepSpeed or FSDP2 in which this rank sent ``nbytes``; zero bytes
        leave no entry.
        """
        if nbytes:
            self.step[phase, domain] += nbytes
            self.calls[phase] += 1

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Time a phase in which the host works or waits: encoding, blocking in a collective,
        decoding.

        Work that overlaps the computation counts only from when the host waits for it. An inner
        phase stops the clock of the outer one. On a GPU only host time is measured. A profiler
        shows ``zero_topo.<phase>``.
        """
        # Without a profiler, torch.profiler.record_function takes 20 us, 30 times as long as this
        # (0.7 us).
        with _RecordFunctionFast(f"zero_topo.{phase}"):
            self._tick()
            self._open.append(phase)
            try:
                yield
            except RuntimeError as error:
                # Backends raise it when a rank has died; it names an address at best.
                error.add_note(f"zero_topo: in {phase} of step {self.steps}")
                raise
            finally:
                self._tick()
                self._open.pop()

    def phase(self) -> str:
        """Return the phase that the host works or waits for now, from any thread; empty outside of
        all phases.
        """
        return next(reversed(self._open), "")

    def _tick(self) -> None:
        now = time.perf_counter()
        if self._open:
            # The innermost phase gets the time since the last change of phases.
            self._seconds[self._open[-1]] += now - self._mark
        self._mark = now

    def end_step(self) -> None:
        """Close an optimizer step: :attr:`last_step` then has its counts."""
        self.total.update(self.step)
        self.last_step = self.step
        self.step = Counter()
        # Not copied: the next step gets new ones.
        self.last_seconds = self._seconds
        self._seconds = defaultdict(float)
        self.steps += 1

    def reset_step(self) -> None:
        """Discard the counts since the last :meth:`end_step` (evaluation, set-up)."""
        self.step = Counter()
        self._seconds = defaultdict(float)
