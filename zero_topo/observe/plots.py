# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of a run's report. matplotlib is imported when one is drawn, and no global figure is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zero_topo.plan import PHASES
from zero_topo.topology.model import LINKED_DOMAINS
from zero_topo.units import GB, KB, MB, format_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from zero_topo.cost.step import Job

COLOURS = {
    "gather_forward": "#2f6db5",
    "gather_backward": "#7fb0e0",
    "gather_exact": "#c5daf0",
    "scatter": "#d9822b",
    "sync": "#3f9c55",
    "publish": "#a5d6a0",
}
OTHER = "#999999"
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "gather_forward": "weights, forward: all-gather",
        "gather_backward": "weights, backward: all-gather",
        "gather_exact": "persistent weights: all-gather",
        "scatter": "gradients, backward: reduce-scatter",
        "sync": "gradients, once per step: sync",
        "publish": "updated weights: publish",
    }
)
"""Phase -> what moves when, and by which collective."""
_LEVELS = ("gpu: between\nranks of a GPU", "node: between\nGPUs of a node", "world: between\nnodes")
_ABOVE: Mapping[str, Any] = MappingProxyType({"textcoords": "offset points", "ha": "center", "fontsize": 8})


def loss_curve(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw training and evaluation loss over steps.

    Args:
        metrics: lines of ``metrics.jsonl``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for key, name, style, colour in (
        ("loss", "training", "-", "#2f6db5"),
        ("eval_loss", "evaluation", "o", "#d9822b"),
    ):
        lines = [line for line in metrics if key in line]
        axes.plot([line["step"] for line in lines], [line[key] for line in lines], style, color=colour, label=name)
    axes.set(xlabel="optimizer step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def bytes_by_domain(measured: Mapping[str, Any]) -> Figure:
    """Draw the bytes a rank sends per optimizer step in each domain, measured and of ZeRO-3, stacked by phase.

    Args:
        measured: the ``zero_topo`` part of a report.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows, batches = measured["sent"], measured["micro_batches"]
    unit, name = decimal_unit(max((sum(row[key] for row in rows) for key in ("max", "zero3")), default=0))
    figure = Figure(figsize=(7, 4.6), layout="constrained")
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
    axes.set_xticks(range(len(LINKED_DOMAINS)), _LEVELS)
    axes.set(ylabel=f"{name} per optimizer step")
    ranks = measured["config"]["world_size"]
    axes.set_title(f"Sent by each of {ranks:,} ranks in a step of {batches} micro-batch{'es' * (batches > 1)}", size=10)
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    phases = [phase for phase in COLOURS if any(row["phase"] == phase for row in rows)]
    handles = [Patch(color=COLOURS[phase], label=NAMES[phase]) for phase in phases]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def step_timeline(line: Mapping[str, Any]) -> Figure:
    """Draw when the host of a rank worked or waited for each phase of a step, and when for none.

    Args:
        line: of ``metrics.jsonl``, with ``step``, ``seconds`` and ``timeline``.
    """
    from matplotlib.figure import Figure

    spans, end = line["timeline"], line["seconds"]
    rows = [phase for phase in PHASES if any(span[0] == phase for span in spans)]
    figure = Figure(figsize=(9, 1.4 + 0.3 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    # many narrow bars: as an image also inside of an SVG, or it would be as large as the step is long
    own: Mapping[str, Any] = {"linewidth": 0.3, "rasterized": True}
    edges = [0.0, *(edge for _, begin, stop in spans for edge in (begin, stop)), max([end, *(s[2] for s in spans)])]
    idle = [(a, b - a) for place, (a, b) in enumerate(pairwise(edges)) if place % 2 == 0 and b > a]
    axes.broken_barh(idle, (-0.4, 0.8), color=OTHER, **own)
    for place, phase in enumerate(rows, 1):
        bars = [(begin, stop - begin) for name, begin, stop in spans if name == phase]
        axes.broken_barh(bars, (place - 0.4, 0.8), color=COLOURS[phase], **own)
    axes.set_yticks(range(len(rows) + 1), ["all else: computing, data", *(NAMES[phase] for phase in rows)], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=f"seconds of step {line['step']}, on rank 0", xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def say_under(figure: Figure, notes: str) -> None:
    """Write notes under a picture, small, from its left edge."""
    figure.supxlabel(notes, fontsize=7, x=0.01, ha="left", parse_math=False)


def job_line(job: Job, ranks: Iterable[int], micro_batches: Iterable[int]) -> str:
    """Return the notes for :func:`say_under`: the model, the number of ranks, and the size of an optimizer step."""
    counts, batches = (", ".join(f"{n:,}" for n in sorted(set(numbers))) for numbers in (ranks, micro_batches))
    model, each = job.model, f"{job.micro_batch} x {job.model.sequence:,} tokens"
    of = f"{model.name} ({format_count(model.params)} parameters)"
    return f"{of}; ranks: {counts}; micro-batches (K) per optimizer step: {batches}, each of {each} on a rank"


def decimal_unit(largest: float) -> tuple[int, str]:
    """Return the decimal unit in which ``largest`` bytes reads well."""
    return next(((size, name) for size, name in ((GB, "GB"), (MB, "MB")) if largest >= size), (KB, "KB"))
