# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A record of ``benchmarks sparse`` as a table and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.sparse import WHOLE
from zero_topo.observe.console import figures_table, wide_console
from zero_topo.units import format_bytes, format_seconds

WIDTH = 128
PICTURES = ("sparse.png",)
NOTE = (
    "Words per k: 4-byte words that a rank sends for each element it selects; busiest: of the rank "
    "that sends most. Error: of the received sums against the sum of all ranks' gradients and "
    "residuals. Xi: of the received sums against the k largest of these, over the norm of the "
    "gradients. Seconds are those of this machine's loopback interface."
)


def show(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a record."""
    console = wide_console(WIDTH, console)
    console.print(table(content["results"]))
    console.print(NOTE)


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each result, in sections of one source and number of ranks."""
    counts = ("bytes per rank", "words per k", "busiest")
    columns = (
        "gradients",
        "ranks",
        "density",
        "mode",
        *counts,
        "seconds",
        "exchange",
        "error",
        "xi",
    )
    made = figures_table(columns, left=("gradients", "mode"))
    order = sorted(results, key=lambda row: (row["source"], row["ranks"], -row["density"]))
    for place, row in enumerate(order):
        after = order[place + 1] if place + 1 < len(order) else row
        words = row["words_per_k"]
        # Older records have neither the busiest rank nor xi.
        busiest = (
            f"{words * row['bytes_busiest'] / row['bytes_per_rank']:.2f}"
            if "bytes_busiest" in row
            else "-"
        )
        made.add_row(
            row["source"],
            str(row["ranks"]),
            f"{row['density']:g}",
            row["mode"],
            format_bytes(row["bytes_per_rank"]),
            f"{words:.2f}",
            busiest,
            format_seconds(row["seconds"]["median"]),
            format_seconds(row["exchange_s"]),
            f"{row['error']:.2e}",
            f"{row['xi']:.3g}" if "xi" in row else "-",
            end_section=(row["source"], row["ranks"]) != (after["source"], after["ranks"]),
        )
    return made


def draw(content: Mapping[str, Any]) -> dict[str, Figure]:
    """The picture, by its file's name: words per selected element against ranks, and error against
    bytes.
    """
    sparse = [row for row in content["results"] if row["mode"] not in WHOLE]
    sources = list(dict.fromkeys(row["source"] for row in content["results"]))
    figure = Figure(figsize=(11, 4.2 * len(sources)), dpi=120, layout="constrained")
    panels = figure.subplots(len(sources), 2, squeeze=False)
    for (left, right), source in zip(panels, sources, strict=True):
        for mode in dict.fromkeys(row["mode"] for row in sparse):
            rows = [row for row in sparse if (row["source"], row["mode"]) == (source, mode)]
            least = min((row["density"] for row in rows), default=0)
            few = sorted(
                (row for row in rows if row["density"] == least), key=lambda row: row["ranks"]
            )
            left.plot(
                [row["ranks"] for row in few], [row["words_per_k"] for row in few], "o-", label=mode
            )
            most = max((row["ranks"] for row in rows), default=0)
            many = sorted(
                (row for row in rows if row["ranks"] == most), key=lambda row: row["density"]
            )
            right.plot(
                [row["bytes_per_rank"] for row in many],
                [row["error"] for row in many],
                "o-",
                label=mode,
            )
        left.set(
            title=f"{source} gradients, least density",
            xlabel="ranks",
            ylabel="words per k",
            yscale="log",
        )
        right.set(title="most ranks", xlabel="bytes per rank", ylabel="error", xscale="log")
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        left.legend(frameon=False, fontsize=8)
    return {PICTURES[0]: figure}
