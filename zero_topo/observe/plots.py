# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The pictures of a run's report. matplotlib is imported when one is drawn, and no global figure is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_topo.topology.model import LINKED_DOMAINS
from zero_topo.units import GB, KB, MB

COLOURS = {
    "gather_forward": "#2f6db5",
    "gather_backward": "#7fb0e0",
    "gather_exact": "#c5daf0",
    "scatter": "#d9822b",
    "sync": "#3f9c55",
    "publish": "#a5d6a0",
}
OTHER = "#999999"


def loss_curve(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Training and evaluation loss over steps, as PNG.

    Args:
        metrics: lines of ``metrics.jsonl``.
        path: where to.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    steps = [line for line in metrics if "loss" in line]
    evaluations = [line for line in metrics if "eval_loss" in line]
    axes.plot([line["step"] for line in steps], [line["loss"] for line in steps], color="#2f6db5", label="training")
    axes.plot(
        [line["step"] for line in evaluations],
        [line["eval_loss"] for line in evaluations],
        "o",
        color="#d9822b",
        label="evaluation",
    )
    axes.set(xlabel="optimizer step", ylabel="loss, nats per byte")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def bytes_by_domain(measured: Mapping[str, Any], path: Path) -> None:
    """What a rank sends per optimizer step in each domain, measured and by ZeRO-3's formula, stacked by phase, as PNG.

    Args:
        measured: the ``zero_topo`` part of a report.
        path: where to.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = measured["sent"]
    unit, name = _unit(max((sum(row[key] for row in rows) for key in ("max", "zero3")), default=0))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for place, key in ((-0.2, "max"), (0.2, "zero3")):
        for index, domain in enumerate(LINKED_DOMAINS):
            bottom = 0.0
            for row in (row for row in rows if row["domain"] == domain and row[key]):
                height = row[key] / unit
                colour = COLOURS.get(row["phase"], OTHER)
                axes.bar(index + place, height, 0.36, bottom, color=colour, edgecolor="white", linewidth=0.5)
                bottom += height
            axes.annotate("this run" if key == "max" else "ZeRO-3", (index + place, bottom), (0, 3), **_ABOVE)
    axes.set_xticks(
        range(len(LINKED_DOMAINS)), ["gpu\n(between dies)", "node\n(between GPUs)", "world\n(between nodes)"]
    )
    axes.set(ylabel=f"{name} sent by each rank per optimizer step")
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    phases = [phase for phase in COLOURS if any(row["phase"] == phase for row in rows)]
    axes.legend(handles=[Patch(color=COLOURS[phase], label=phase) for phase in phases], frameon=False)
    figure.savefig(path, dpi=120)


_ABOVE: Mapping[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8}


def _unit(largest: float) -> tuple[int, str]:
    """The decimal unit in which ``largest`` bytes reads well."""
    return next(((size, name) for size, name in ((GB, "GB"), (MB, "MB")) if largest >= size), (KB, "KB"))
