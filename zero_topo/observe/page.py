# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Writes the pictures of a run's report, and all of it as one HTML file without scripts or links.

``report.html.jinja`` is its template. The page has the tables of ``tables.py`` and the pictures of
``plots.py``. The same run gives the same bytes. Pictures are images, so that nothing in them can
act on the page; a dark page inverts them. Jinja2, which torch requires, escapes every value.
"""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_topo.observe import plots, tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HTML = "report.html"
PNG_DPI = 120


def write_page(
    report: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], folder: Path
) -> Path:
    """Write ``report.html``, ``loss.png`` and, of a run with zero_topo, ``bytes.png`` and
    ``memory.png``.

    Args:
        report: the content of ``report.json``.
        metrics: lines of ``metrics.jsonl``.
        folder: the run's folder.

    Returns:
        The path of the page.
    """
    from jinja2 import Environment

    measured = report["zero_topo"]
    details = {"Arguments": report["settings"], "DeepSpeed config": report["deepspeed"]}
    sections: list[tuple[str, str, Figure, tables.Table | None]] = [
        ("Loss", "loss", plots.loss_curve(metrics), None)
    ]
    lines = list(tables.run_lines(report))
    last_lines: list[str] = []
    if measured is None:
        lines.append(tables.STOCK)
    else:
        details |= {"The whole plan": measured["config"], "The machine": measured["topology"]}
        bytes_sent = plots.bytes_by_domain(measured)
        memory = plots.memory_bars(_memory_columns(measured))
        sections += [
            ("Bytes sent", "bytes", bytes_sent, tables.sent_table(measured)),
            ("Memory", "memory", memory, tables.memory_table(measured)),
        ]
        lines += [*measured["config"]["notes"], *tables.summary(measured)]
        last_lines += tables.last_step_lines(measured)
    template = resources.files(__package__).joinpath("report.html.jinja")
    page = Environment(autoescape=True, trim_blocks=True).from_string(
        template.read_text(encoding="utf-8")
    )
    text = page.render(
        title=report["title"],
        lines=lines,
        sections=[(title, _svg(figure), table) for title, _, figure, table in sections],
        last_lines=last_lines,
        versions=report["versions"],
        details={name: json.dumps(content, indent=2) for name, content in details.items()},
    )
    for _, name, figure, _ in sections:
        figure.savefig(folder / f"{name}.png", dpi=PNG_DPI)
    path = folder / HTML
    path.write_text(text, encoding="utf-8")
    return path


def _memory_columns(measured: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    columns = {"this run": "max", "formula": "formula", "ZeRO-3": "zero3"}
    stored = {}
    for name, key in columns.items():
        stored[name] = {row["role"]: row[key] or 0 for row in measured["memory"]}
    return stored


def _svg(figure: Figure) -> str:
    """Return the figure as base64 of an SVG, without a date or random names."""
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": HTML}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return b64encode(file.getvalue()).decode()
