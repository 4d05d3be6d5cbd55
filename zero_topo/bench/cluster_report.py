# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A record of ``bench cluster`` as a table and as pictures. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from zero_topo.bench.emulated_cluster.spec import LEVELS, Spec
from zero_topo.units import MB, format_bytes, format_seconds

BASELINE = "zero3"
WIDTH = 96
COLOURS = ("#8c8c8c", "#bdbdbd", "#2f6db5", "#7fb0e0", "#d9822b", "#f0c08a", "#3f9c55", "#a5d6a0", "#8e5aa8", "#c9a7da")
STOCK_NOTE = "stock: gloo's own reduce-scatter sends every byte twice; stock-ring sends it once, as NCCL and RCCL do."
PICTURES = ("step_time.png", "bytes.png")
LINKS = {"gcd": "of a die", "gpu": "of a GPU", "node": "of a node (uplink)"}


def show(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a record's table, with what is needed to read it."""
    console = console or Console(highlight=False)
    console.width = max(console.width, WIDTH)  # a cut number is worse than a broken line
    spec = Spec.from_json("spec", content["spec"])
    rates = " / ".join(str(getattr(spec.rates, level)) for level in LEVELS)
    console.print(
        f"{spec.name}: {spec.nodes} nodes x {spec.gpus_per_node} GPUs x {spec.gcds_per_gpu} dies, links of a die / GPU "
        f"/ node {rates} Mbit/s; model {format_bytes(content['message_bytes'])} in 16 bits; forward and backward of a "
        f"micro-batch {format_seconds(content['compute_s_per_micro_batch'])} without communication",
        soft_wrap=True,
    )
    console.print(table(content["results"]))
    if any(row["scheme"].startswith("stock") for row in content["results"]):
        console.print(STOCK_NOTE)


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each result, in sections of equal micro-batches."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left", title_style="bold")
    made.title = "Optimizer steps"
    for column in (
        "micro-batches",
        "scheme",
        "step, median",
        "min - max",
        f"{BASELINE} /",
        "floor",
        "uplink",
        "formula",
    ):
        made.add_column(column, justify="left" if column == "scheme" else "right", no_wrap=True)
    made.add_column("drops", justify="right")
    for count in dict.fromkeys(row["micro_batches"] for row in results):
        rows = [row for row in results if row["micro_batches"] == count]
        for row in rows:
            made.add_row(*_cells(row, ratio(row, rows)), end_section=row is rows[-1])
    return made


def _cells(row: Mapping[str, Any], times: float | None) -> list[str]:
    step = row["step_s"]
    return [
        str(row["micro_batches"]),
        row["scheme"],
        format_seconds(step["median"]),
        f"{step['min']:.2f} - {step['max']:.2f}",
        "-" if times is None else f"{times:.2f}",
        format_seconds(row["floor_s"]["serial"]),
        format_bytes(row["uplink_bytes_per_step_per_node"]),
        format_bytes(row["uplink_formula"]),
        str(row["drops"]),
    ]


def ratio(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """How many times longer a step of the baseline takes; None if it was not measured."""
    base = next((other for other in rows if other["scheme"] == BASELINE), None)
    return None if base is None else float(base["step_s"]["median"] / row["step_s"]["median"])


def draw(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the record's pictures, PNG; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in PICTURES]
    _step_times(content["results"], paths[0])
    _level_bytes(content["results"], paths[1])
    return paths


def _step_times(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Median step time by scheme and number of micro-batches, with its spread and the floor."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for place, width, colour, row in _bars(results):
        step = row["step_s"]
        spread = [[step["median"] - step["min"]], [step["max"] - step["median"]]]
        axes.bar(place, step["median"], width, yerr=spread, capsize=2, color=colour, label=row["scheme"])
        floor = row["floor_s"]["serial"]
        axes.plot([place - width / 2, place + width / 2], [floor, floor], color="black", linewidth=1.2)
    axes.set(
        yscale="log", ylabel="seconds per optimizer step", title="bars: median and spread; lines: the links' floor"
    )
    _finish(figure, axes, results)
    figure.savefig(path, dpi=120)


def _level_bytes(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Bytes that leave each unit per optimizer step, counted by the kernel, one panel for each level of links."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    panels = figure.subplots(1, len(LEVELS), sharey=True)
    for axes, level in zip(panels, LEVELS, strict=True):
        for place, width, colour, row in _bars(results):
            axes.bar(place, row["level_bytes"][level] / MB, width, color=colour, label=row["scheme"])
        axes.set(yscale="log", title=f"link {LINKS[level]}")
        _finish(figure, axes, results, legend=level == LEVELS[0])
    panels[0].set_ylabel("MB sent per optimizer step")
    figure.savefig(path, dpi=120)


def _bars(results: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, str, Mapping[str, Any]]]:
    """Place, width and colour of each result's bar: a group for each number of micro-batches."""
    schemes = list(dict.fromkeys(row["scheme"] for row in results))
    counts = list(dict.fromkeys(row["micro_batches"] for row in results))
    width = 0.8 / len(schemes)
    bars = []
    for row in results:
        index = schemes.index(row["scheme"])
        place = counts.index(row["micro_batches"]) + (index - (len(schemes) - 1) / 2) * width
        bars.append((place, width * 0.92, COLOURS[index % len(COLOURS)], row))
    return bars


def _finish(figure: Any, axes: Any, results: Sequence[Mapping[str, Any]], legend: bool = True) -> None:
    counts = list(dict.fromkeys(row["micro_batches"] for row in results))
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlabel("micro-batches per optimizer step")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        labelled = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(labelled.values(), labelled, frameon=False, loc="outside right upper")
