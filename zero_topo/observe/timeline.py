# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Simulated steps as pictures and as a trace for a browser's trace viewer. matplotlib is imported when one is drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zero_topo.cost.events import COMPUTE
from zero_topo.cost.simulator import Simulation
from zero_topo.cost.sweep import Point
from zero_topo.observe.marks import TRACE
from zero_topo.observe.plots import COLOURS, OTHER, say_under
from zero_topo.topology.model import LINKED_DOMAINS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STREAMS = (COMPUTE, "pack", *LINKED_DOMAINS)
MICROSECONDS = 10**6
_OWN = {COMPUTE: "#555555", "optimizer": "#b3476b"}
_LINES = ("#2f6db5", "#d9822b", "#3f9c55", "#b3476b", "#7a5fb0", "#8c6d46")
_STYLES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")


APART = 1.015


def write_trace(steps: Mapping[str, Simulation], path: Path) -> None:
    """Steps in the trace event format of chrome://tracing and Perfetto: a process for each, a thread for each stream.

    Args:
        steps: name -> step.
        path: a .json file.
    """
    events: list[dict[str, Any]] = []
    for process, (name, step) in enumerate(steps.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for thread, stream in enumerate(STREAMS):
            label = stream if stream in STREAMS[:2] else f"{stream} link"
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": label}})
        events += [
            {
                "ph": "X",
                "name": event.name,
                "cat": event.phase,
                "pid": process,
                "tid": STREAMS.index(event.stream),
                "ts": event.begin_s * MICROSECONDS,
                "dur": (event.end_s - event.begin_s) * MICROSECONDS,
                "args": {"bytes": round(event.bytes)},
            }
            for event in step.events
        ]
    content = {"otherData": {"producer": TRACE}, "displayTimeUnit": "ms", "traceEvents": events}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def timeline(steps: Mapping[str, Simulation], notes: str) -> Figure:
    """Steps one above the other, on one scale of time: what each stream does.

    Args:
        steps: name -> step.
        notes: under the picture: of which job.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 0.6 + 1.3 * len(steps)), layout="constrained")
    axes = figure.subplots(len(steps), sharex=True, squeeze=False)[:, 0]
    seen: dict[str, str] = {}
    for axis, (name, step) in zip(axes, steps.items(), strict=True):
        for phase, bars in _bars(step).items():
            seen[phase] = _colour(phase)
            for stream, spans in bars.items():
                axis.broken_barh(spans, (STREAMS.index(stream) - 0.4, 0.8), color=seen[phase], linewidth=0.4)
        axis.set_yticks(range(len(STREAMS)), STREAMS, fontsize=7)
        axis.invert_yaxis()
        axis.set_title(f"{name}: {step.step_s:.3g} s", loc="left", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("seconds")
    handles = [Patch(color=colour, label=phase) for phase, colour in seen.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8)
    say_under(figure, notes)
    return figure


def _bars(step: Simulation) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Phase -> stream -> (begin, length)."""
    bars: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for event in step.events:
        spans = bars.setdefault(event.phase, {}).setdefault(event.stream, [])
        spans.append((event.begin_s, event.end_s - event.begin_s))
    return bars


def _colour(phase: str) -> str:
    return _OWN.get(phase) or COLOURS.get(phase, OTHER)


def scaling(points: Sequence[Point], title: str, notes: str) -> Figure:
    """TFLOP/s per rank over ranks: a colour for each scheme, a style for each number of micro-batches.

    A thin bar at each point, drawn a little apart from the others', is the range of its prediction.

    Args:
        points: simulated steps.
        title: above the picture.
        notes: under it: of which job, and what is assumed.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.add_subplot()
    colours = dict(zip(dict.fromkeys(point.scheme for point in points), _LINES * len(points), strict=False))
    styles = dict(zip(dict.fromkeys(point.micro_batches for point in points), _STYLES * len(points), strict=False))
    for place, ((scheme, count), line) in enumerate(_lines(points).items()):
        ranks = [point.ranks * APART**place for point in line]
        speeds = [point.simulation.tflops_per_gpu for point in line]
        bounds = [(p.simulation.step_s / p.range.high_s, p.simulation.step_s / p.range.low_s) for p in line]
        off = [[v * (1 - low) for v, (low, _) in zip(speeds, bounds, strict=True)]]
        off += [[v * (high - 1) for v, (_, high) in zip(speeds, bounds, strict=True)]]
        colour = colours[scheme]
        axes.plot(ranks, speeds, linestyle=styles[count], marker="o", markersize=3, color=colour)
        axes.errorbar(ranks, speeds, off, fmt="none", ecolor=colour, alpha=0.4, linewidth=0.8, capsize=1.5)
    axes.set(xlabel="ranks", ylabel="TFLOP/s per rank (simulated)", title=title, xscale="log")
    ticks = sorted({point.ranks for point in points})
    axes.set_xticks(ticks, [f"{rank:,}" for rank in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    handles = [Line2D([], [], color=colour, label=scheme) for scheme, colour in colours.items()]
    handles += [Line2D([], [], color="black", linestyle=style, label=f"K = {count}") for count, style in styles.items()]
    axes.legend(handles=handles, frameon=False, fontsize=8)
    say_under(figure, notes)
    return figure


def _lines(points: Sequence[Point]) -> dict[tuple[str, int], list[Point]]:
    """The points of each scheme and number of micro-batches."""
    found: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        found.setdefault((point.scheme, point.micro_batches), []).append(point)
    return found
