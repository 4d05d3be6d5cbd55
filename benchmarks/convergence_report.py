# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A record of ``benchmarks convergence`` as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.console import figures_table, wide_console
from zero_topo.units import MB

STOCK = "stock"
WIDTH = 116
NOTE = (
    "Differences are from stock with the same seed, in percent of its loss; worst is the seed "
    "farthest away. chaos is stock after a small change of its initial weights: what is not larger "
    "than that says nothing. MB crossing: what a rank sends out of its node in a step for sync and "
    "publish."
)


def show(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a record's table, with what is needed to read it."""
    console = wide_console(WIDTH, console)
    settings = content["settings"]
    seeds = len({job["seed"] for job in settings["jobs"]})
    console.print(
        f"{settings['steps']} optimizer steps, {seeds} seed{'s' * (seeds > 1)}, losses in nats per "
        "byte"
    )
    console.print(table(content["results"]))
    console.print(NOTE)


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each scheme."""
    names = ("last tenth", "whole run", "evaluation")
    made = figures_table(
        ("scheme", *(column for name in names for column in (name, "mean", "worst")), "MB crossing")
    )
    for row in results:
        cells = [row["scheme"]]
        for measure in (row["last"], row["overall"], row["evaluation"]):
            shares = [f"{100 * measure['difference'][key]:+.2f}%" for key in ("mean", "worst")]
            cells += [f"{measure['loss']:.4f}", *(["-", "-"] if row["scheme"] == STOCK else shares)]
        crossing = row.get("crossing_bytes")  # that records of before it was counted lack
        made.add_row(*cells, "-" if crossing is None else f"{crossing / MB:.3f}")
    return made
