# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A run's report as one HTML file: no script, nothing fetched, and the same bytes whenever it is written again.

It shows the tables of ``tables.py`` and the pictures of ``plots.py``, and no number that the run's files do not hold.
Pictures are images, so that what is in one cannot act on the page; a dark page inverts them.
"""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from zero_topo.observe import plots
from zero_topo.observe.files import PAGE
from zero_topo.observe.memory_figure import memory_bars
from zero_topo.observe.tables import STOCK, last_step_lines, memory_table, run_lines, sent_table
from zero_topo.observe.tree import Tree, tree_svg
from zero_topo.plan import Plan
from zero_topo.topology.model import Topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HTML = "report.html"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem;
  overflow-wrap: anywhere; background: Canvas; color: CanvasText; }
img { max-width: 100%; height: auto; background: #fff; }
figure { margin: 1rem 0; text-align: center; }
div, pre { overflow-x: auto; }
pre { overflow-wrap: normal; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: bold; }
th, td { padding: .15rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
.left { text-align: left; }
@media (prefers-color-scheme: dark) { img { filter: invert(.9) hue-rotate(180deg); } }
"""
HOST = (
    "On the host of rank 0, counted from the end of the step before: packing, waiting, unpacking. What runs beside the "
    "computation takes no time here until it is waited for."
)


def write_page(report: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the page.

    Args:
        report: what ``report.json`` holds.
        metrics: lines of ``metrics.jsonl``.
        path: where to.
    """
    head = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="{PAGE}">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(report['title'])}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
    ]
    path.write_text("\n".join([*head, *_body(report, metrics), "</body>\n</html>\n"]), encoding="utf-8")


def _body(report: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    measured = report["zero_topo"]
    yield f"<h1>{escape(report['title'])}</h1>"
    yield from _paragraphs([*run_lines(report), *([STOCK] if measured is None else measured["config"]["notes"])])
    yield from _picture("Loss", plots.loss_curve(metrics))
    if measured is not None:
        yield from _measured(measured)
        for line in (line for line in metrics if "timeline" in line):
            yield from _picture(f"Step {line['step']}", plots.step_timeline(line))
            yield from _paragraphs([HOST])
        yield from _paragraphs(last_step_lines(measured))
    yield "<h2>Versions and settings</h2>"
    found = "".join(
        f'<tr><td class="left">{escape(name)}<td class="left">{escape(version or "not installed")}'
        for name, version in report.get("versions", {}).items()
    )
    yield f"<div><table>{found}</table></div>"
    plan = {} if measured is None else {"The plan in full": measured["config"], "The machine": measured["topology"]}
    for name, content in {"Arguments": report["settings"], "DeepSpeed config": report["deepspeed"], **plan}.items():
        text = escape(json.dumps(content, indent=2))
        yield f"<details><summary>{name}</summary><pre>{text}</pre></details>"


def _measured(measured: Mapping[str, Any]) -> Iterator[str]:
    """What was sent and held, and by which plan."""
    yield from _picture("Bytes sent", plots.bytes_by_domain(measured))
    yield _table(sent_table(measured))
    columns = {"this run": "max", "formula": "formula", "ZeRO-3": "zero3"}
    held = {name: {row["role"]: row[key] or 0 for row in measured["memory"]} for name, key in columns.items()}
    yield from _picture("Memory", memory_bars(held, None, "Held by each rank", ""))
    yield _table(memory_table(measured))
    config, topology = measured["config"], Topology.from_json(measured["topology"])
    plan = Plan(topology.world_size, **config["degrees"], order=topology.order, inner=config["inner"])
    wire = {**config["quantize"], "sync": config["sync"]["mode"]}
    yield from _picture("Plan", tree_svg(Tree(plan, topology, wire)))


def _picture(title: str, drawn: Figure | str) -> Iterator[str]:
    """A section's heading and its picture."""
    data = b64encode(drawn.encode() if isinstance(drawn, str) else _svg(drawn)).decode()
    yield f"<h2>{escape(title)}</h2>"
    yield f'<figure><img alt="{escape(title)}, drawn" src="data:image/svg+xml;base64,{data}"></figure>'


def _svg(figure: Figure) -> bytes:
    """The same bytes for the same figure: no date, no random names."""
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": PAGE}):
        figure.savefig(file, format="svg", dpi=200, metadata={"Date": None})
    return file.getvalue()


def _table(table: Table) -> str:
    """A table of the terminal."""
    sides = ['class="left"' if column.justify == "left" else "" for column in table.columns]
    columns = [[column.header, *column.cells] for column in table.columns]
    rows = [
        "".join(
            f"<{tag} {side}>{escape(Text.from_markup(str(cell)).plain)}"
            for cell, side in zip(cells, sides, strict=True)
        )
        for tag, cells in zip(["th", *["td"] * table.row_count], zip(*columns, strict=True), strict=True)
    ]
    return f"<div><table><caption>{escape(str(table.title))}</caption><tr>{'<tr>'.join(rows)}</table></div>"


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    yield from (f"<p>{escape(line)}</p>" for line in lines)
