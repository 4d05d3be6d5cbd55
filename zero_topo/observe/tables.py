# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Renders a run's report as tables of plain text; each fits 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_topo.observe.runlog import read_report
from zero_topo.units import format_bytes, format_seconds

STOCK = (
    'This run used stock ZeRO-3, which counts nothing: add a "zero_topo" block to the JSON to '
    "see bytes and memory."
)
GAP = 2  # spaces between columns
SLOWEST = {"world": "Between nodes", "node": "Inside a node", "gpu": "Inside a GPU"}


Table = Mapping[str, Any]
"""Of a report: ``title``, the line above; ``rows``, the headings and then one tuple of cells for
each line; and ``words``: how many columns, from the left, hold words and are set left. The others
hold figures.
"""


def table_text(table: Table) -> str:
    """Return a table as aligned text."""
    widths = [max(map(len, column)) for column in zip(*table["rows"], strict=True)]
    lines = []
    for row in table["rows"]:
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if index < table["words"] else cell.rjust(width))
        lines.append((" " * GAP).join(cells).rstrip())
    rule = "-" * (sum(widths) + GAP * (len(widths) - 1))
    return "\n".join([table["title"], lines[0], rule, *lines[1:], ""])


def render(folder: Path) -> str:
    """Return the report of the run in ``folder`` as text.

    Raises:
        ValueError: if there is none.
    """
    report = read_report(folder)
    measured = report["zero_topo"]
    lines = ["", report["title"], *run_lines(report)]
    if measured is None:
        lines.append(STOCK)
    else:
        lines += [
            *(f"- {note}" for note in measured["config"]["notes"]),
            "",
            measured_text(measured),
        ]
    files = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix in (".html", ".json", ".jsonl", ".png")
    )
    return "\n".join([*lines, f"More in {folder}: {', '.join(files)}"])


def measured_text(measured: Mapping[str, Any]) -> str:
    """Return bytes, memory and times of a report's ``zero_topo`` part as text."""
    tables = sent_table(measured), memory_table(measured)
    return "\n".join([*map(table_text, tables), *summary(measured), *last_step_lines(measured)])


def summary(measured: Mapping[str, Any]) -> Iterator[str]:
    """What a rank sends over the slowest links and what it stores, next to those of ZeRO-3."""
    for domain, name in SLOWEST.items():
        rows = [row for row in measured["sent"] if row["domain"] == domain]
        sent = _summed(rows, ("max", "zero3"))
        if sent["zero3"]:
            times = f", {sent['zero3'] / sent['max']:.1f} times as much" if sent["max"] else ""
            yield (
                f"{name}: a rank sends {format_bytes(sent['max'])} in a step; ZeRO-3 sends "
                f"{format_bytes(sent['zero3'])}{times}."
            )
            break
    stored = _summed(measured["memory"], ("max", "zero3"))
    yield (
        f"Memory: a rank stores {format_bytes(stored['max'])}; ZeRO-3 stores "
        f"{format_bytes(stored['zero3'])}."
    )


def last_step_lines(measured: Mapping[str, Any]) -> Iterator[str]:
    """Peak memory and its prediction, the time of rank 0's last step, and what the mode of sync
    reports of it.
    """
    peak = measured.get("peak")
    if peak is not None:
        of = (
            "the device"
            if peak["on_device"]
            else "the process, with Python and its libraries, as there is no device"
        )
        predicted = (
            f"; predicted for tensors: {format_bytes(peak['predicted'])}"
            if peak["predicted"]
            else ""
        )
        yield f"Peak memory: {_range(peak)} of {of}{predicted}."
    if measured["phase_seconds"]:
        parts = [
            f"{phase.replace('_', ' ')} {format_seconds(s)}"
            for phase, s in measured["phase_seconds"].items()
        ]
        yield f"Time of rank 0's last step in communication: {', '.join(parts)}."
    if measured["sync"]:
        parts = [
            f"{name.replace('_', ' ')} {value:.4g}" for name, value in measured["sync"].items()
        ]
        yield f"Sync of rank 0's last step: {', '.join(parts)}."


def run_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Steps, their time and losses; nothing for a run without a step."""
    seconds = report["seconds_per_step"]
    if seconds is not None:
        took = f"in {format_seconds(report['seconds'])}, {format_seconds(seconds)} per step"
        yield f"{report['steps']} steps on {report['world_size']} ranks {took}"
    if report["first_loss"] is not None:
        evaluated = "" if report["eval_loss"] is None else f", evaluation {report['eval_loss']:.3f}"
        yield f"loss {report['first_loss']:.3f} -> {report['last_loss']:.3f}{evaluated}"


def sent_table(measured: Mapping[str, Any]) -> Table:
    """Bytes per domain and phase, with a sum for each domain."""
    batches = measured["micro_batches"]
    rows = [("domain", "phase", "measured", "formula", "ZeRO-3")]
    for domain in dict.fromkeys(row["domain"] for row in measured["sent"]):
        of_domain = [row for row in measured["sent"] if row["domain"] == domain]
        total = _summed(of_domain, ("min", "max", "formula", "zero3"))
        for row in (*of_domain, {"domain": domain, "phase": "all", **total}):
            figures = _range(row), *(bytes_or_dash(row[key]) for key in ("formula", "zero3"))
            rows.append((domain, row["phase"].replace("_", ", "), *figures))
    step = f"optimizer step of {batches} micro-batch{'es' if batches > 1 else ''}"
    return {"title": f"Sent by {_who(measured)} per {step}", "words": 2, "rows": rows}


def memory_table(measured: Mapping[str, Any]) -> Table:
    """Bytes per role, with their sum; the measured column spans the ranks if they differ."""
    keys = ("formula", "zero3")
    total = _summed(measured["memory"], ("min", "max", *keys))
    rows = [("role", "measured", "formula", "ZeRO-3")]
    for row in (*measured["memory"], {"role": "all", **total}):
        figures = [bytes_or_dash(row[key]) for key in keys]
        rows.append((row["role"], _range(row), *figures))
    return {"title": f"Memory of {_who(measured)}", "words": 1, "rows": rows}


def _summed(rows: Sequence[Mapping[str, Any]], keys: Iterable[str]) -> dict[str, int]:
    """Return the sums of columns of a table; a missing number counts as 0."""
    sums = dict.fromkeys(keys, 0)
    for row in rows:
        for key in sums:
            sums[key] += row[key] or 0
    return sums


def _who(measured: Mapping[str, Any]) -> str:
    """Return which ranks were measured: all, or the one that wrote the report alone."""
    return (
        "one rank" if measured.get("ranks") == 1 < measured["config"]["world_size"] else "each rank"
    )


def _range(row: Mapping[str, int]) -> str:
    low = row["min"]
    high = row["max"]
    return bytes_or_dash(low) if low == high else f"{bytes_or_dash(low)} .. {bytes_or_dash(high)}"


def bytes_or_dash(nbytes: int | None) -> str:
    """A cell: bytes with their unit, or a dash for none."""
    return format_bytes(nbytes) if nbytes else "-"
