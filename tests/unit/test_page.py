# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The page of a run's report: what it says is what the run's files say, and nothing in them can act
on it.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Run
from tests.plans import resolve
from tests.unit.test_report import EXACT, RESULT, RUN, SENT, STORED, folder
from zero_topo.config import ResolvedConfig
from zero_topo.observe.page import HOST
from zero_topo.observe.plots import ROLE_COLOURS
from zero_topo.observe.report import build_report
from zero_topo.observe.tables import render
from zero_topo.observe.tree import tree_svg
from zero_topo.topology.presets import emulated, load_preset

__all__ = ["folder"]

NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
HOSTILE = "A <script>alert(1)</script> & \"run\" 'of' </title></pre>"


class Page(HTMLParser):
    """A page's text, its tags and what they name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text, self.tags, self.sources = "", set[str](), list[str]()
        self._hidden = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._hidden = tag == "style"
        self.sources += [
            value or "" for name, value in attrs if name in ("src", "href") or name.startswith("on")
        ]

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else f" {data} "


def pictures(page: Page) -> list[str]:
    """The SVG of each image."""
    return [
        b64decode(source.removeprefix("data:image/svg+xml;base64,")).decode()
        for source in page.sources
    ]


def test_every_number_is_the_runs(folder: Path) -> None:
    """What is written on the page stands in the tables, which come from report.json, or in
    report.json itself.
    """
    report = build_report(folder, RUN, [EXACT] * 8, **(RESULT | {"title": "A model of 7 layers"}))
    page = Page(folder / "report.html")
    known = set(NUMBER.findall(render(folder) + json.dumps(report) + " step 3 "))
    written = NUMBER.findall(page.text.replace(HOST, ""))
    assert len(written) > 90 and not set(written) - known
    for words in (
        "103.68 KB",
        "5.500 -> 3.000",
        "scheme topo: weights",
        f"torch {metadata.version('torch')}",
        "61.2 TFLOP/s",
        "Step 3",
    ):
        assert words in re.sub(r"\s+", " ", page.text), words
    assert len(pictures(page)) == 5 and all("<svg" in picture for picture in pictures(page))


def test_pictures_show_what_the_log_holds(folder: Path) -> None:
    """Other losses, spans, bytes or memory are other pictures, and no other picture changes."""
    build_report(folder, RUN, [EXACT] * 8, **RESULT)
    usual, log = pictures(Page(folder / "report.html")), (folder / "metrics.jsonl").read_text()
    more = {key: 2 * nbytes for key, nbytes in SENT.items()}
    stored = {role: 2 * nbytes for role, nbytes in STORED.items()}
    cases = {
        0: (log.replace('"loss": 4.0', '"loss": 4.5'), EXACT),
        1: (log, (more, STORED, 0)),
        2: (log, (SENT, stored, 0)),
        4: (log.replace("0.375", "0.3"), EXACT),
    }
    for place, (lines, rank) in cases.items():
        (folder / "metrics.jsonl").write_text(lines)
        build_report(folder, RUN, [rank] * 8, **RESULT)
        found = pictures(Page(folder / "report.html"))
        assert [at for at in range(5) if found[at] != usual[at]] == [place]


def test_the_page_is_alone_and_nothing_in_it_acts(folder: Path) -> None:
    """No script, no address outside of it, and a policy that forbids both; a title with tags is
    shown, not obeyed.
    """
    build_report(
        folder, RUN, [EXACT] * 8, **(RESULT | {"title": HOSTILE, "settings": {"data": HOSTILE}})
    )
    page = Page(folder / "report.html")
    assert "script" not in page.tags and not [
        source for source in page.sources if not source.startswith("data:image")
    ]
    assert page.text.count("<script>alert(1)</script>") == 3  # title, heading, arguments
    text = (folder / "report.html").read_text()
    assert (
        "default-src 'none'" in text
        and "<script" not in text
        and "@import" not in text
        and "url(" not in text
    )
    assert not [svg for svg in pictures(page) if re.search(r'<script|href="(?!#|data:)', svg)]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("title",), 7),
        (("seconds",), float("inf")),
        (("steps",), "3"),
        (("versions",), {"torch": 2}),
        (("settings",), None),
        (("zero_topo", "sent", 0, "max"), "<b>"),
        (("zero_topo", "memory"), [{}]),
        (("zero_topo", "config", "notes"), "x"),
        (("zero_topo", "topology", "nodes"), [[]]),
        (("zero_topo", "phase_seconds"), {"sync": float("nan")}),
        ((0, "step"), "<form action=//there>"),
        ((3, "timeline"), [["sync", 0.1]]),
        ((0,), []),
    ],
)
def test_a_strangers_files_are_one_line_or_a_page(
    path: tuple[str | int, ...], value: object, folder: Path, run: Run
) -> None:
    """A report that has other types than ours is refused, naming the place; none of it gets into
    the page unread.
    """
    report, log = build_report(folder, RUN, [EXACT] * 8, **RESULT), folder / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    *way, last = path
    part: Any = lines if isinstance(path[0], int) else report
    for key in way:
        part = part[key]
    part[last] = value
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "report.html").unlink()
    status, _, err = run("report", str(folder))
    assert status == 2 and len(err.splitlines()) == 1 and not (folder / "report.html").exists(), err


def test_no_name_acts_on_the_terminal(folder: Path, run: Run) -> None:
    """Names come from files: what would move the cursor or set the clipboard is written as an
    escape, everywhere.
    """
    bad = "\x1b]52;c;eA==\x07\u202e"
    (folder / bad).mkdir()
    machine = folder / bad / "machine.json"
    machine.write_text(
        json.dumps({"name": bad, "nodes": 1, "gpus_per_node": 2, "ranks_per_gpu": 1})
    )
    build_report(folder, RUN, [(SENT, {bad: 1}, 0)], **(RESULT | {"title": bad}))
    for words in (("topology", "--from", str(machine)), ("report", str(folder)), ("check", bad)):
        _, out, err = run(*words)
        said = out + err
        assert re.search(r"\\(x1b|u001b)]52;c;eA==.*\\u202e", said) and not re.search(
            "[\x1b\x07\u202e]", said
        ), words


def test_the_same_run_is_the_same_bytes(folder: Path, run: Run, tmp_path: Path) -> None:
    """Written at the end of the run, and by the command any time later, elsewhere too; no date, no
    random name.
    """
    build_report(folder, RUN, [EXACT] * 8, **RESULT)
    first = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    status, out, _ = run("report", str(folder))
    assert status == 0 and f"Written: {folder / 'report.html'}" in out
    assert (folder / "report.html").read_bytes() == first
    other = tmp_path / "elsewhere.html"
    assert (
        run("report", str(folder), "--json", "--html", str(other))[0] == 0
        and other.read_bytes() == first
    )


def test_somebodys_page_is_not_written_over(folder: Path, run: Run) -> None:
    """A file of that name that is no report stays, until --force; --json alone writes none."""
    build_report(folder, None, [], **RESULT)
    mine = folder / "report.html"
    mine.write_text("my page about zero_topo")
    status, _, said = run("report", str(folder))
    assert (
        status == 2
        and "is no result of this kind" in said
        and run("report", str(folder), "--json")[0] == 0
    )
    assert mine.read_text() == "my page about zero_topo"
    assert run("report", str(folder), "--force")[0] == 0 and "my page" not in mine.read_text()


def test_a_run_of_stock_zero3_or_of_before_has_a_page(folder: Path, run: Run) -> None:
    """Its loss, the sentence that says why there is no more, and its config; no versions where none
    were kept.
    """
    report = build_report(folder, None, [], **RESULT)
    page = Page(folder / "report.html")
    assert "stock ZeRO-3" in page.text and len(pictures(page)) == 1
    del report["versions"]
    (folder / "report.json").write_text(json.dumps(report))
    assert run("report", str(folder))[0] == 0 and "2.13.0" not in Page(folder / "report.html").text


def test_reports_hold_no_key_to_an_account(folder: Path) -> None:
    """Comet's key is in the DeepSpeed config; a report is passed on."""
    build_report(folder, RUN, [EXACT], **RESULT)
    for name in ("report.json", "report.html"):
        assert "mine" not in (folder / name).read_text() and "hidden" in (folder / name).read_text()


def test_a_folder_that_may_not_be_written_to_still_prints(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's run: the tables, then which option writes elsewhere."""
    build_report(folder, RUN, [EXACT] * 8, **RESULT)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    status, out, said = run("report", str(folder))
    assert status == 2 and "Sent by each rank" in out and "--html FILE.html" in said


@pytest.mark.parametrize("ranks", [8, 384], ids=["all", "the first node"])
def test_the_plan_of_many_ranks_shows_the_first(ranks: int) -> None:
    """Above 16 ranks eight are drawn, each bar filled by one part as wide as its share, and the
    world is named.
    """
    machine = emulated(2, 2, 2) if ranks == 8 else load_preset("frontier", ranks)
    config: ResolvedConfig = resolve(machine, scheme="topo")
    svg = tree_svg(
        config.plan, machine, {"weights": "int8/256", "gradients": None, "sync": "oktopk"}
    )
    assert svg.count('font-weight="bold">rank ') == 8 and "INT8" in svg and "oktopk" in svg
    assert ("the first 8 of 384 ranks" in svg) == (ranks == 384)
    if ranks == 384:
        wide = re.findall(
            rf'width="([\d.]+)" height="15" rx="0" fill="{ROLE_COLOURS["weights"]}"', svg
        )
        assert wide == ["24"] * 8
