# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A record of ``benchmarks scale`` as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.console import figures_table, wide_console

WIDTH = 100
LAUNCHING = ("operations", "kernels", "collectives")
NOTE = (
    "Launches: ATen operations that are neither views nor allocations, calls of kernels, and "
    "collectives. Milliseconds are this host's, without any network. Inside DeepSpeed's engine, "
    "what it does beyond moving bytes is in them."
)


def show(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a record."""
    console = wide_console(WIDTH, console)
    params = content["settings"]["params"]
    results = content["results"]
    for row in content["real"]:
        syncs = sum(counts["syncs"] for counts in row["phases"].values())
        added, own = (launches(row[part]) / params for part in ("phases", "plain"))
        console.print(
            f"{row['scheme']} inside DeepSpeed's engine on {row['ranks']} real ranks: {added:.1f} "
            "launches per "
            f"parameter and {syncs} host syncs, beyond the model's and AdamW's {own:.1f}"
        )
    if results:
        console.print(by_ranks(results, "launches per parameter and step, by ranks", _launches))
        console.print(
            by_ranks(results, "milliseconds of the host per step, by ranks", _milliseconds)
        )
        console.print(by_phase(results, params))
    console.print(NOTE)


def launches(phases: Mapping[str, Any]) -> int:
    """Of all phases of a step."""
    return sum(counts[kind] for counts in phases.values() for kind in LAUNCHING)


def by_ranks(
    results: Sequence[Mapping[str, Any]], title: str, cell: Callable[[Mapping[str, Any]], str]
) -> Table:
    """A line for each scheme, a column for each number of ranks."""
    sizes = sorted({row["ranks"] for row in results})
    made = figures_table(("scheme", *(f"{size:,}" for size in sizes)), title)
    for scheme in dict.fromkeys(row["scheme"] for row in results):
        found = {row["ranks"]: cell(row) for row in results if row["scheme"] == scheme}
        made.add_row(scheme, *(found.get(size, "-") for size in sizes))
    return made


def by_phase(results: Sequence[Mapping[str, Any]], params: int) -> Table:
    """A line for each scheme on the most ranks it was measured on: launches by phase, and what else
    is counted.
    """
    phases = list(results[0]["phases"])
    words = (
        "scheme",
        "ranks",
        *(phase.replace("gather_", "") for phase in phases),
        "host syncs",
        "groups",
    )
    made = figures_table(words, "launches per parameter, by phase")
    most = {row["scheme"]: row for row in sorted(results, key=lambda row: int(row["ranks"]))}
    for scheme, row in most.items():
        found = [launches({phase: row["phases"][phase]}) / params for phase in phases]
        syncs = sum(counts["syncs"] for counts in row["phases"].values())
        cells = [f"{value:.1f}" for value in found]
        made.add_row(scheme, f"{row['ranks']:,}", *cells, str(syncs), str(row["communicators"]))
    return made


def _launches(row: Mapping[str, Any]) -> str:
    return f"{row['launches_per_parameter']:.1f}"


def _milliseconds(row: Mapping[str, Any]) -> str:
    return f"{1000 * row['step_s']['median']:.1f}"
