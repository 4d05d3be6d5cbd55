# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Prints the progress of a run: a line now and then, nothing on ranks other than 0."""

from __future__ import annotations

import time
from collections.abc import Mapping

from zero_topo.observe.tables import pace_words
from zero_topo.units import format_seconds

LINES = 12  # about this many


class Progress:
    """Shows a progress bar of optimizer steps.

    Args:
        total: steps of the whole run.
        done: steps taken before this run began (resume).
        quiet: print nothing.
    """

    def __init__(self, total: int, done: int = 0, quiet: bool = False) -> None:
        self._total, self._first, self._quiet = total, done, quiet
        self._every = max(1, (total - done) // LINES)
        self._began = time.perf_counter()

    def advance(self, step: int, loss: float, pace: Mapping[str, float]) -> None:
        """Print a line if it is due; ``step``, which is done, counts from 1, ``loss`` is in nats per byte."""
        if step % self._every == 0 or step in (self._first + 1, self._total):
            passed = format_seconds(time.perf_counter() - self._began)
            words = (
                f"step {step:>{len(str(self._total))}}/{self._total}",
                f"loss {loss:.3f}",
                passed,
                pace_words(pace),
            )
            self.note("  ".join(filter(None, words)))

    def note(self, text: str) -> None:
        """Print a line."""
        if not self._quiet:
            print(text, flush=True)
