# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Draws predicted speed over ranks. matplotlib is imported when it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from zero_topo.observe.plots import say_under

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINES = ("#2f6db5", "#d9822b", "#3f9c55", "#b3476b", "#7a5fb0", "#8c6d46")
_STYLES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
APART = 1.015


def scaling(points: Sequence[Mapping[str, Any]], title: str, notes: str) -> Figure:
    """Draw TFLOP/s per rank over ranks: a colour for each scheme, a style for each number of micro-batches.

    A thin bar at each point, drawn a little apart from the others', is the range of its prediction.

    Args:
        points: the results of ``simulate --json``.
        title: above the picture.
        notes: under it: of which job, and what is assumed.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.add_subplot()
    colours = dict(zip(dict.fromkeys(point["scheme"] for point in points), _LINES * len(points), strict=False))
    styles = dict(zip(dict.fromkeys(point["micro_batches"] for point in points), _STYLES * len(points), strict=False))
    for place, ((scheme, count), line) in enumerate(_lines(points).items()):
        ranks = [point["ranks"] * APART**place for point in line]
        speeds = [point["tflops_per_gpu"] for point in line]
        bounds = [(p["step_s"] / p["range"]["high_s"], p["step_s"] / p["range"]["low_s"]) for p in line]
        off = [[v * (1 - low) for v, (low, _) in zip(speeds, bounds, strict=True)]]
        off += [[v * (high - 1) for v, (_, high) in zip(speeds, bounds, strict=True)]]
        colour = colours[scheme]
        axes.plot(ranks, speeds, linestyle=styles[count], marker="o", markersize=3, color=colour)
        axes.errorbar(ranks, speeds, off, fmt="none", ecolor=colour, alpha=0.4, linewidth=0.8, capsize=1.5)
    axes.set(xlabel="ranks", ylabel="TFLOP/s per rank (predicted)", title=title, xscale="log")
    ticks = sorted({point["ranks"] for point in points})
    axes.set_xticks(ticks, [f"{rank:,}" for rank in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    handles = [Line2D([], [], color=colour, label=scheme) for scheme, colour in colours.items()]
    handles += [Line2D([], [], color="black", linestyle=style, label=f"K = {count}") for count, style in styles.items()]
    axes.legend(handles=handles, frameon=False, fontsize=8)
    say_under(figure, notes)
    return figure


def _lines(points: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], list[Mapping[str, Any]]]:
    """Group the points by scheme and number of micro-batches."""
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for point in points:
        found.setdefault((point["scheme"], point["micro_batches"]), []).append(point)
    return found
