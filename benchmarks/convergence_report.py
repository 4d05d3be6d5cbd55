# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A record of ``benchmarks convergence`` as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.cluster_report import COLOURS
from zero_topo.observe.console import figures_table, wide_console
from zero_topo.units import MB

STOCK = "stock"
CHAOS = "chaos"
WIDTH = 116
PICTURES = ("convergence.png",)
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


def draw(content: Mapping[str, Any]) -> dict[str, Figure]:
    """The picture, by its file's name: losses, and differences from stock, both averaged over seeds
    and smoothed.
    """
    curves = {name: _mean_curve(seeds) for name, seeds in content["curves"].items()}
    window = max(1, len(curves[STOCK]) // 20)
    figure = Figure(figsize=(12, 4.5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, (name, curve) in enumerate(curves.items()):
        style = (
            {"color": "black", "linestyle": ":"}
            if name == CHAOS
            else {"color": COLOURS[index % len(COLOURS)]}
        )
        smooth = _smoothed(curve, window)
        stock = _smoothed(curves[STOCK], window)
        steps = range(window, window + len(smooth))
        left.plot(steps, smooth, label=name, linewidth=1.2, **style)
        if name != STOCK:
            shares = [100 * (mine / other - 1) for mine, other in zip(smooth, stock, strict=True)]
            right.plot(steps, shares, linewidth=1.2, **style)
    left.set(
        xlabel="optimizer step",
        ylabel="loss, nats per byte",
        title=f"mean over seeds and {window} steps",
    )
    right.set(xlabel="optimizer step", ylabel="percent", title="difference from stock")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside right upper")
    return {PICTURES[0]: figure}


def _mean_curve(seeds: Mapping[str, Sequence[float]]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*seeds.values(), strict=True)]


def _smoothed(curve: Sequence[float], window: int) -> list[float]:
    """Means of all runs of ``window`` steps."""
    return [sum(curve[end - window : end]) / window for end in range(window, len(curve) + 1)]
