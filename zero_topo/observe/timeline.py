# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Simulated steps as pictures and as a trace for a browser's trace viewer. matplotlib is imported when one is drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_topo.cost.events import COMPUTE
from zero_topo.cost.simulator import Simulation
from zero_topo.cost.sweep import Point
from zero_topo.observe.plots import COLOURS, OTHER
from zero_topo.topology.model import LINKED_DOMAINS

STREAMS = (COMPUTE, "pack", *LINKED_DOMAINS)
MICROSECONDS = 10**6
_OWN = {COMPUTE: "#555555", "optimizer": "#b3476b"}
_LINES = ("#2f6db5", "#d9822b", "#3f9c55", "#b3476b", "#7a5fb0", "#8c6d46")
_STYLES = ("-", "--", ":", "-.")


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
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n", encoding="utf-8")


def timeline(steps: Mapping[str, Simulation], path: Path) -> None:
    """Steps one above the other, on one scale of time: what each stream does, as PNG.

    Args:
        steps: name -> step.
        path: where to.
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
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _bars(step: Simulation) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Phase -> stream -> (begin, length)."""
    bars: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for event in step.events:
        spans = bars.setdefault(event.phase, {}).setdefault(event.stream, [])
        spans.append((event.begin_s, event.end_s - event.begin_s))
    return bars


def _colour(phase: str) -> str:
    return _OWN.get(phase) or COLOURS.get(phase, OTHER)


def scaling(points: Sequence[Point], title: str, path: Path) -> None:
    """TFLOP/s per rank over ranks, a line for each scheme and number of micro-batches, as PNG.

    Args:
        points: simulated steps.
        title: above the picture.
        path: where to.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    schemes = list(dict.fromkeys(point.scheme for point in points))
    counts = list(dict.fromkeys(point.micro_batches for point in points))
    for count, style in zip(counts, _STYLES * len(counts), strict=False):
        for scheme, colour in zip(schemes, _LINES * len(schemes), strict=False):
            line = [point for point in points if (point.scheme, point.micro_batches) == (scheme, count)]
            axes.plot(
                [point.ranks for point in line],
                [point.simulation.tflops_per_gpu for point in line],
                style,
                marker="o",
                markersize=3,
                color=colour,
                label=f"{scheme}, K = {count}",
            )
    axes.set(xlabel="ranks", ylabel="TFLOP/s per rank (simulated)", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
