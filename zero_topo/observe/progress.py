# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How far a run is: a bar on a terminal, a line now and then in a log file, nothing on ranks other than 0."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from zero_topo.units import format_seconds

LINES = 12  # about this many lines in a log file


class Progress:
    """Follows optimizer steps; use it in a ``with`` block.

    Args:
        total: steps of the whole run.
        done: steps taken before this run began (resume).
        quiet: print nothing.
        console: where to; default is stdout.
    """

    def __init__(self, total: int, done: int = 0, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(quiet=quiet, highlight=False)
        self._total, self._first, self._quiet = total, done, quiet
        self._every = max(1, (total - done) // LINES)
        self._began = time.perf_counter()
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
        self._bar = Bar(*columns, TimeRemainingColumn(), console=self._console)
        self._task = self._bar.add_task("training", total=total, completed=done, loss="-")

    def __enter__(self) -> Progress:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    @property
    def _live(self) -> bool:
        return self._console.is_terminal and not self._quiet

    def advance(self, step: int, loss: float) -> None:
        """A step is done; ``step`` counts from 1, ``loss`` is in nats per byte."""
        if self._live:
            self._bar.update(self._task, completed=step, loss=f"{loss:.3f}")
            return
        if step % self._every == 0 or step in (self._first + 1, self._total):
            passed = format_seconds(time.perf_counter() - self._began)
            self.note(f"step {step:>{len(str(self._total))}}/{self._total}  loss {loss:.3f}  {passed}")

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if not self._quiet:
            self._console.print(text)
