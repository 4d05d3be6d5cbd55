# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A record of ``benchmarks soak`` as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from zero_topo.observe.console import figures_table, wide_console

WIDTH = 84
PICTURES = ("soak.png",)
NOTE = (
    "Means of the first and the last tenth after the warm-up, of the rank to which most was added."
)


def show(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a record's table."""
    console = wide_console(WIDTH, console)
    console.print(f"{content['settings']['steps']} optimizer steps with everything on")
    made = figures_table(("held", "before", "after", "added", "allowed", "flat"))
    for cells in rows(content["results"]):
        made.add_row(*cells)
    console.print(made)
    console.print(NOTE)


def rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row of cells for each thing that is counted."""
    return [
        [
            row["name"].replace("_", " "),
            *(f"{row[key]:,.0f}" for key in ("before", "after")),
            *(f"{100 * row[key]:.2f}%" for key in ("added", "allowed")),
            str(row["flat"]),
        ]
        for row in results
    ]


def draw(content: Mapping[str, Any]) -> dict[str, Figure]:
    """The picture, by its file's name: the counts of each rank, as a share of those after the
    warm-up.
    """
    samples = content["samples"][len(content["samples"]) // 10 :]
    figure = Figure(figsize=(12, 5), dpi=120, layout="constrained")
    for axes, row in zip(figure.subplots(2, 5).flat, content["results"], strict=True):
        for rank in range(len(samples[0]["ranks"])):
            values = [sample["ranks"][rank][row["name"]] for sample in samples]
            axes.plot(
                [sample["step"] for sample in samples],
                [value / values[0] for value in values],
                linewidth=1,
            )
        axes.set_title(row["name"], fontsize=9)
        axes.ticklabel_format(useOffset=False)
    return {PICTURES[0]: figure}
