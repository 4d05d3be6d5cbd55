# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A run's report as tables on the terminal; each fits 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_topo.observe.console import bytes_or_dash, figures_table, wide_console
from zero_topo.observe.runlog import read_report
from zero_topo.units import format_seconds

WIDTH = 80
STOCK = 'This run used stock ZeRO-3, which counts nothing: add a "zero_topo" block to the JSON to see bytes and memory.'


def render(folder: Path, console: Console | None = None) -> None:
    """Print the report of the run in ``folder``.

    Raises:
        ValueError: if there is none.
    """
    console = wide_console(WIDTH, console)
    report = read_report(folder)
    measured = report["zero_topo"]
    _print_run(console, report)
    if measured is None:
        console.print(STOCK)
    else:
        for note in measured["config"]["notes"]:
            console.print(f"- {note}", markup=False)
        console.print()
        console.print(sent_table(measured))
        console.print(memory_table(measured))
        for line in last_step_lines(measured):
            console.print(line, markup=False)
    files = sorted(path.name for path in folder.iterdir() if path.suffix in (".html", ".json", ".jsonl", ".png"))
    console.print(f"More in {folder}: {', '.join(files)}", markup=False, soft_wrap=True)


def last_step_lines(measured: Mapping[str, Any]) -> Iterator[str]:
    """Where this rank's last step went, and what a sparse mode of sync says of it."""
    if measured["phase_seconds"]:
        parts = [f"{phase.replace('_', ' ')} {format_seconds(s)}" for phase, s in measured["phase_seconds"].items()]
        yield f"Time of rank 0's last step in communication: {', '.join(parts)}."
    if measured["sync"]:
        parts = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in measured["sync"].items()]
        yield f"Sync of rank 0's last step: {', '.join(parts)}."


def _print_run(console: Console, report: Mapping[str, Any]) -> None:
    console.print(f"\n{report['title']}", style="bold", markup=False)
    for line in run_lines(report):
        console.print(line)


def run_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Steps and losses; of a run that took no step, none."""
    pace = report["seconds_per_step"]
    if pace is not None:
        took = f"in {format_seconds(report['seconds'])}, {format_seconds(pace)} per step"
        yield f"{report['steps']} steps on {report['world_size']} ranks {took}"
        losses = f"{report['first_loss']:.3f} -> {report['last_loss']:.3f} nats/byte"
        yield f"loss {losses}, evaluation {report['eval_loss']:.3f}"


def sent_table(measured: Mapping[str, Any]) -> Table:
    """Bytes per domain and phase, with a sum for each domain."""
    batches = measured["micro_batches"]
    per_step = f"per optimizer step of {batches} micro-batch{'es' if batches > 1 else ''}"
    columns = ("domain", "phase", "measured", "formula", "ZeRO-3")
    table = figures_table(columns, f"Sent by each rank {per_step}", left=columns[:2])
    for domain in dict.fromkeys(row["domain"] for row in measured["sent"]):
        rows = [row for row in measured["sent"] if row["domain"] == domain]
        for row in rows:
            table.add_row(
                escape(domain),
                escape(row["phase"].replace("_", ", ")),
                _range(row),
                *(bytes_or_dash(row[key]) for key in ("formula", "zero3")),
            )
        total = {key: sum(row[key] for row in rows) for key in ("min", "max", "formula", "zero3")}
        cells = (escape(domain), "all", _range(total), bytes_or_dash(total["formula"]), bytes_or_dash(total["zero3"]))
        table.add_row(*(f"[bold]{cell}" for cell in cells), end_section=True)
    return table


def memory_table(measured: Mapping[str, Any]) -> Table:
    """Bytes per role, with their sum; the measured column spans the ranks if they differ."""
    table = figures_table(("role", "measured", "formula", "of it padding", "ZeRO-3"), "Held by each rank")
    keys = ("formula", "padding", "zero3")
    rows = measured["memory"]
    for row in rows:
        table.add_row(escape(row["role"]), _range(row), *(bytes_or_dash(row[key]) for key in keys))
    total = {key: sum(row[key] or 0 for row in rows) for key in ("min", "max", *keys)}
    table.add_row(
        "[bold]all", *(f"[bold]{cell}" for cell in (_range(total), *(bytes_or_dash(total[key]) for key in keys)))
    )
    return table


def _range(row: Mapping[str, int]) -> str:
    low, high = row["min"], row["max"]
    return bytes_or_dash(low) if low == high else f"{bytes_or_dash(low)} .. {bytes_or_dash(high)}"
