# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Writes a run's report as one HTML file: no script, nothing fetched, and the same bytes whenever
it is written again.

``report.html.jinja`` is its template. It shows the tables of ``tables.py`` and the pictures of
``plots.py``, and no number that the run's files do not hold. Pictures are images, so that what is
in one cannot act on the page; a dark page inverts them. Jinja2, which torch requires, escapes every
value.
"""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_topo.observe import plots
from zero_topo.observe.files import PAGE
from zero_topo.observe.tables import STOCK, last_step_lines, memory_table, run_lines, sent_table
from zero_topo.observe.tree import tree_svg
from zero_topo.plan import Plan
from zero_topo.topology.model import Topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HTML = "report.html"
HOST = (
    "Host time of rank 0 from the end of the step before: packing, waiting, unpacking. "
    "Communication that overlaps with computation takes no time here until the host waits for it."
)


def write_page(report: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the page.

    Args:
        report: what ``report.json`` holds.
        metrics: lines of ``metrics.jsonl``.
        path: where to.
    """
    from jinja2 import Environment

    measured = report["zero_topo"]
    plan = (
        {}
        if measured is None
        else {"The whole plan": measured["config"], "The machine": measured["topology"]}
    )
    details = {"Arguments": report["settings"], "DeepSpeed config": report["deepspeed"], **plan}
    template = (
        resources.files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    )
    page = Environment(autoescape=True, trim_blocks=True).from_string(template)
    text = page.render(
        mark=PAGE,
        title=report["title"],
        lines=[*run_lines(report), *([STOCK] if measured is None else measured["config"]["notes"])],
        sections=list(_sections(measured, metrics)),
        versions=report.get("versions", {}),
        details={name: json.dumps(content, indent=2) for name, content in details.items()},
    )
    path.write_text(text, encoding="utf-8")


def _sections(
    measured: Mapping[str, Any] | None, metrics: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the pictures with their titles, tables and lines, in the page's order."""
    yield _section("Loss", plots.loss_curve(metrics))
    if measured is None:
        return
    yield _section("Bytes sent", plots.bytes_by_domain(measured), table=sent_table(measured))
    columns = {"this run": "max", "formula": "formula", "ZeRO-3": "zero3"}
    stored = {}
    for name, key in columns.items():
        stored[name] = {row["role"]: row[key] or 0 for row in measured["memory"]}
    yield _section("Memory", plots.memory_bars(stored), table=memory_table(measured))
    config = measured["config"]
    topology = Topology.from_json(measured["topology"])
    plan = Plan(
        topology.world_size, **config["degrees"], order=topology.order, inner=config["inner"]
    )
    wire = {**config["quantize"], "sync": config["sync"]["mode"]}
    yield _section("Plan", tree_svg(plan, topology, wire))
    for line in (line for line in metrics if "timeline" in line):
        yield _section(f"Step {line['step']}", plots.step_timeline(line), lines=[HOST])
    yield {"lines": list(last_step_lines(measured))}


def _section(title: str, drawn: Figure | str, **more: Any) -> dict[str, Any]:
    picture = drawn.encode() if isinstance(drawn, str) else _svg(drawn)
    return {"title": title, "picture": b64encode(picture).decode(), **more}


def _svg(figure: Figure) -> bytes:
    """The same bytes for the same figure: no date, no random names."""
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": PAGE}):
        figure.savefig(file, format="svg", dpi=200, metadata={"Date": None})
    return file.getvalue()
