# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A record of ``benchmarks faults`` as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from zero_topo.observe.console import figures_table, wide_console

WIDTH = 100
PICTURES = ()
COLUMNS = ("fault", "rounds", "reported by", "reported after", "launch ended after", "then", "bits")
NOTE = (
    "Seconds after the fault, the least and the most of all rounds; a rank waits {watch_s:g} s "
    "before it asks."
)


def show(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a record's table."""
    console = wide_console(WIDTH, console)
    made = figures_table(COLUMNS, left=COLUMNS)
    for cells in rows(content["results"]):
        made.add_row(*cells)
    console.print(made)
    console.print(NOTE.format(**content["settings"]))


def rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row of cells for each kind of fault."""
    made = []
    for kind in sorted({row["kind"] for row in results}):
        same = [row for row in results if row["kind"] == kind]
        reported = [seconds for row in same for seconds in row["told_s"].values()]
        ended = [row["ended_s"] for row in same if row["ended_s"] is not None]
        counts = {len(row["told_s"]) for row in same}
        tellers = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
        then = "restarts" if same[0]["restarted"] else "goes on"
        equal = "equal" if all(row["equal"] for row in same) else "differ"
        made.append(
            [
                kind,
                str(len(same)),
                f"{tellers} ranks" if reported else "-",
                _interval(reported),
                _interval(ended),
                then,
                equal,
            ]
        )
    return made


def _interval(seconds: Sequence[float]) -> str:
    return f"{min(seconds):.1f} to {max(seconds):.1f} s" if seconds else "-"


def draw(content: Mapping[str, Any]) -> dict[str, Any]:
    """No picture."""
    return {}
