# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of a run's report, and of memory.

matplotlib is imported when one is drawn, and no global figure is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from zero_topo.topology.model import LINKED_DOMAINS
from zero_topo.units import GB, KB, MB

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = {
    "gather_forward": "#2f6db5",
    "gather_backward": "#7fb0e0",
    "gather_exact": "#c5daf0",
    "scatter": "#d9822b",
    "sync": "#3f9c55",
    "publish": "#a5d6a0",
}
OTHER = "#999999"
ROLE_COLOURS = {
    "weights": "#2f6db5",
    "secondary": "#7fb0e0",
    "gradients": "#d9822b",
    "optimizer": "#3f9c55",
    "residual": "#8a5fb0",
    "masks": "#c3a6dd",
    "sync": "#9c7fc4",
    "gathered": "#c5daf0",
    "bucket": "#f2c99a",
    "step": "#a5d6a0",
    "messages": "#d9a3a3",
    "activations": "#bbbbbb",
}
NAMES: Mapping[str, str] = {
    "gather_forward": "weights, forward: all-gather",
    "gather_backward": "weights, backward: all-gather",
    "gather_exact": "persistent weights: all-gather",
    "scatter": "gradients, backward: reduce-scatter",
    "sync": "gradients, once per step: sync",
    "publish": "updated weights: publish",
}
"""Phase -> what moves when, and by which collective."""
_LEVELS = ("gpu: between\nranks of a GPU", "node: between\nGPUs of a node", "world: between\nnodes")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty picture of a size in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def loss_curve(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw training and evaluation loss over steps.

    Args:
        metrics: lines of ``metrics.jsonl``.
    """
    figure, axes = _figure(7, 4)
    for key, name, style, colour in (
        ("loss", "training", "-", "#2f6db5"),
        ("eval_loss", "evaluation", "o", "#d9822b"),
    ):
        lines = [line for line in metrics if key in line]
        axes.plot(
            [line["step"] for line in lines],
            [line[key] for line in lines],
            style,
            color=colour,
            label=name,
        )
    axes.set(xlabel="optimizer step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def bytes_by_domain(measured: Mapping[str, Any]) -> Figure:
    """Draw the bytes a rank sends per optimizer step in each domain, measured and of ZeRO-3,
    stacked by phase.

    Args:
        measured: the ``zero_topo`` part of a report.
    """
    from matplotlib.patches import Patch

    rows = measured["sent"]
    batches = measured["micro_batches"]
    sent = sum(row["max"] for row in rows)
    unit, name = decimal_unit(max(sent, sum(row["zero3"] for row in rows)))
    figure, axes = _figure(7, 4.6)
    for place, key, label in ((-0.2, "max", "this run"), (0.2, "zero3", "ZeRO-3")):
        for index, domain in enumerate(LINKED_DOMAINS):
            # Experts' domains have a prefix, and lie on the same links.
            shown = [row for row in rows if row["domain"].split("_")[-1] == domain and row[key]]
            parts = [(row[key] / unit, COLOURS.get(row["phase"], OTHER)) for row in shown]
            _stacked(axes, index + place, 0.36, parts, label)
    axes.set_xticks(range(len(LINKED_DOMAINS)), _LEVELS)
    axes.set(ylabel=f"{name} per optimizer step")
    ranks = measured["config"]["world_size"]
    axes.set_title(
        f"Sent by each of {ranks:,} ranks in a step of {batches} micro-batch{'es' * (batches > 1)}",
        size=10,
    )
    phases = [phase for phase in COLOURS if any(row["phase"] == phase for row in rows)]
    handles = [Patch(color=COLOURS[phase], label=NAMES[phase]) for phase in phases]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def memory_bars(rows: Mapping[str, Mapping[str, int]]) -> Figure:
    """Draw a rank's memory, stacked by role.

    Args:
        rows: name of a bar -> role -> bytes.
    """
    from matplotlib.patches import Patch

    unit, name = decimal_unit(max(sum(stored.values()) for stored in rows.values()))
    figure, axes = _figure(7.5, 4.2)
    colours = _role_colours({role for stored in rows.values() for role in stored})
    for index, stored in enumerate(rows.values()):
        total = f"{sum(stored.values()) / unit:.1f}"
        parts = [(stored.get(role, 0) / unit, colour) for role, colour in colours.items()]
        _stacked(axes, index, 0.62, parts, total)
    axes.set_xticks(range(len(rows)), list(rows))
    axes.set(ylabel=f"{name} on each rank")
    axes.set_title("Memory per rank", size=10)
    _legend_right(axes, [Patch(color=colour, label=role) for role, colour in colours.items()])
    return figure


def _role_colours(roles: Set[str]) -> dict[str, str]:
    """Return the colours of roles, known ones first."""
    known = {role: colour for role, colour in ROLE_COLOURS.items() if role in roles}
    return known | dict.fromkeys(sorted(roles - known.keys()), OTHER)


def _legend_right(axes: Axes, handles: Sequence[Artist]) -> None:
    axes.legend(
        handles=handles, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )


def _stacked(
    axes: Axes, place: float, width: float, parts: Iterable[tuple[float, str]], label: str
) -> None:
    """Draw a bar of stacked parts (height, colour), with a label above it."""
    bottom = 0.0
    for height, colour in parts:
        axes.bar(place, height, width, bottom, color=colour, edgecolor="white", linewidth=0.5)
        bottom += height
    axes.annotate(
        label, (place, bottom), (0, 3), textcoords="offset points", ha="center", fontsize=8
    )
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)


def decimal_unit(largest: float) -> tuple[int, str]:
    """Return the decimal unit in which ``largest`` bytes reads well."""
    return next(
        ((size, name) for size, name in ((GB, "GB"), (MB, "MB")) if largest >= size), (KB, "KB")
    )
