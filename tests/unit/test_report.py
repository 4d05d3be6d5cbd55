# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The report of a run: its numbers, files and page, what it prints, and what it says of folders
that are no runs.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Run
from tests.plans import resolve
from zero_topo.cost import Workload, memory_bytes, step_bytes
from zero_topo.observe.report import Stats, build_report
from zero_topo.observe.runlog import (
    log_evaluation,
    log_step,
    read_metrics,
)
from zero_topo.observe.tables import render
from zero_topo.topology.presets import emulated
from zero_topo.units import format_bytes

RESULT: dict[str, Any] = {
    "title": "A model",
    "world_size": 8,
    "settings": {"data": Path("x")},
    "deepspeed": {"bf16": {}, "comet": {"api_key": "mine"}},
}


CONFIG = resolve(emulated(2, 2, 2), scheme="topo", quantize={"resident": None})
RUN = Stats(
    config=CONFIG,
    steps=3,
    micro_batches=2,
    step_bytes={},
    total_bytes={},
    memory={},
    work=Workload.uniform([100_003, 50, 7], micro_batches=2),
    accumulation_itemsize=2,
    optimizer_itemsize=12,
    calls={},
    phase_seconds={"gather_forward": 0.25},
    sync_report={"density_asked": 0.01, "union": 0.03},
    peak_memory=0,
    on_device=True,
    predicted_memory={"weights": 3_000_000, "messages": 500_000},
)
"""A run of the scheme topo with parameters that do not divide evenly."""
SENT, STORED = (
    step_bytes(RUN.config, RUN.work),
    memory_bytes(RUN.config, RUN.work, accumulation_itemsize=2),
)
EXACT = SENT, STORED, 4_250_000
"""A rank that sent and holds exactly what the formulas say."""


NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
HOSTILE = "A <script>alert(1)</script> & \"run\" 'of' </title></pre>"
PEAK = "Peak memory: 4.25 MB of the device; predicted for tensors: 3.50 MB."


@pytest.fixture(autouse=True)
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has the package without extras: it leaves no page."""
    monkeypatch.setattr("zero_topo.observe.report.find_spec", lambda _: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's, with the log of three steps and one evaluation."""
    for step, loss in enumerate((5.5, 4.0, 3.0), 1):
        log_step(tmp_path, step, loss, 1e-3, 20.5, {("scatter", "node"): 10})
    assert log_evaluation(tmp_path, 3, 2.5) == 2.5
    return tmp_path


def reported(folder: Path, **changes: Any) -> dict[str, Any]:
    """The report of eight ranks in a folder."""
    return build_report(folder, RUN, [EXACT] * 8, **(RESULT | changes))


def test_report_sets_measured_bytes_next_to_the_formula_and_zero3(folder: Path) -> None:
    """Every phase and domain has what was measured, this plan's formula and ZeRO-3's on the same
    machine and model.
    """
    report = reported(folder)["zero_topo"]
    stock = step_bytes(resolve(RUN.config.topology, scheme="zero3"), RUN.work)
    rows = {(row["phase"], row["domain"]): row for row in report["sent"]}
    for key in {*SENT, *stock, *rows}:
        row = rows[key]
        assert row["min"] == row["max"] == row["formula"] == SENT.get(key, 0)
        assert row["zero3"] == stock.get(key, 0)
    memory = {row["role"]: row for row in report["memory"]}
    assert {role: row["formula"] for role, row in memory.items()} == STORED
    assert memory["weights"]["zero3"] * 4 == memory["weights"]["formula"]


def test_report_shows_ranks_that_differ(folder: Path) -> None:
    """A rank that sent more than the others is seen in the table, not averaged away."""
    key = ("scatter", "node")
    most = SENT[key] + 5_000_000
    build_report(folder, RUN, [*[EXACT] * 7, ({**SENT, key: most}, *EXACT[1:])], **RESULT)
    assert f"{format_bytes(SENT[key])} .. {format_bytes(most)}" in render(folder)


def test_report_prints_every_number_again_from_its_folder(folder: Path) -> None:
    """The tables come from report.json alone, fit 80 columns and name domains, phases, roles and
    losses.
    """
    report = reported(folder)
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "report.json"}
    (folder / "metrics.jsonl").unlink()
    text = render(folder)
    assert max(len(line) for line in text.splitlines() if "  " in line) <= 80  # of the tables
    for row in report["zero_topo"]["sent"]:
        assert format_bytes(max(row["max"], row["zero3"])) in text
    named = ("secondary", "publish", "5.500 -> 3.000", "evaluation 2.500", "1 min 02 s")
    for word in (*named, "gather forward 250", "union 0.03", PEAK):
        assert word in text, word
    assert json.loads((folder / "report.json").read_text()) == report


def test_log_keeps_steps_and_evaluations_in_order(folder: Path) -> None:
    """Lines can be read back while the run goes on, and without a folder (other ranks) none is
    written.
    """
    lines = read_metrics(folder)
    assert [line.get("loss", line.get("eval_loss")) for line in lines] == [5.5, 4.0, 3.0, 2.5]
    assert lines[0]["sent"] == {"scatter/node": 10}
    log_step(None, 1, 1.0, 1.0, 1.0)


def test_a_damaged_log_is_named(tmp_path: Path) -> None:
    """A cut line is an error with the place, not a traceback of json."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval_loss": NaN}\n{"ste')
    with pytest.raises(ValueError, match=r"metrics.*line 2: "):
        read_metrics(tmp_path)


# -- the page --------------------------------------------------------------------------------------


def test_the_page_has_the_runs_numbers_and_nothing_in_it_acts(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No script, no address outside of it, no key to an account; a title with tags is shown, not
    obeyed. The command writes the same bytes any time later.
    """
    monkeypatch.undo()
    report = reported(folder, title=HOSTILE, settings={"data": HOSTILE})
    text = (folder / "report.html").read_text()
    body = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    tags = set(re.findall(r"<(\w+)", body))
    sources = re.findall(r'\b(?:src|href|on\w+)="([^"]*)"', body)
    shown = unescape(re.sub(r"<[^>]*>", " ", body))
    known = set(NUMBER.findall(render(folder) + json.dumps(report)))
    written = NUMBER.findall(shown)
    assert len(written) > 90 and not set(written) - known
    assert shown.count("<script>alert(1)</script>") == 3  # title, heading, arguments
    assert "script" not in tags and "default-src 'none'" in text
    assert not re.search(r"<script|@import|url\(", text)
    image = "data:image/svg+xml;base64,"
    pictures = [b64decode(source.removeprefix(image)).decode() for source in sources]
    assert len(pictures) == 3 and all(source.startswith(image) for source in sources)
    for picture in pictures:
        assert "<svg" in picture and not re.search(r'<script|href="(?!#|data:)', picture)
    for file in (text, json.dumps(report)):
        assert "mine" not in file and "hidden" in file
    (folder / "report.html").unlink()
    status, out, _ = run("report", str(folder))
    assert status == 0 and f"Written: {folder / 'report.html'}" in out
    assert (folder / "report.html").read_text() == text


def test_a_folder_that_may_not_be_written_to_still_prints(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's run: the tables, then what to do."""
    reported(folder)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("zero_topo.observe.page._svg", lambda _: "")
    monkeypatch.setattr(Path, "write_text", refuse)
    status, out, said = run("report", str(folder))
    assert status == 2 and "Sent by each rank" in out and "Permission denied" in said
