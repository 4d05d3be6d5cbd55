# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Draws the memory that each scheme would need on a rank. matplotlib is imported when it is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zero_topo.observe.plots import decimal_unit, say_under

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
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
OTHER = "#777777"


def memory_bars(rows: Mapping[str, Mapping[str, int]], capacity: int | None, title: str, notes: str) -> Figure:
    """Draw a rank's memory under each scheme, stacked by role, and its capacity.

    Args:
        rows: scheme -> role -> bytes.
        capacity: bytes that a rank has, drawn as a line; None if not known.
        title: over the picture.
        notes: under it: of which job.
    """
    from matplotlib.figure import Figure

    unit, name = decimal_unit(max(sum(held.values()) for held in rows.values()))
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    bottoms = dict.fromkeys(rows, 0.0)
    found = {role for held in rows.values() for role in held}
    for role in (*(role for role in COLOURS if role in found), *sorted(found - set(COLOURS))):
        heights = [held.get(role, 0) / unit for held in rows.values()]
        axes.bar(
            list(rows),
            heights,
            0.62,
            list(bottoms.values()),
            label=role,
            color=COLOURS.get(role, OTHER),
            edgecolor="white",
            linewidth=0.5,
        )
        bottoms = {key: bottom + height for (key, bottom), height in zip(bottoms.items(), heights, strict=True)}
    for index, bottom in enumerate(bottoms.values()):
        axes.annotate(f"{bottom:.1f}", (index, bottom), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    if capacity is not None:
        axes.axhline(capacity / unit, color="#b03030", linewidth=1, linestyle="--", label="memory of a rank")
    axes.set(ylabel=f"{name} on each rank", title=title)
    axes.title.set_fontsize(10)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    say_under(figure, notes)
    return figure
