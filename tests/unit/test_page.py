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

import pytest

from tests.commands import Run
from tests.unit.test_report import EXACT, RESULT, RUN, folder
from zero_topo.observe.report import build_report
from zero_topo.observe.tables import render

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
    known = set(NUMBER.findall(render(folder) + json.dumps(report)))
    written = NUMBER.findall(page.text)
    assert len(written) > 90 and not set(written) - known
    for words in (
        "103.68 KB",
        "5.500 -> 3.000",
        "scheme topo: weights",
        f"torch {metadata.version('torch')}",
    ):
        assert words in re.sub(r"\s+", " ", page.text), words
    assert len(pictures(page)) == 3 and all("<svg" in picture for picture in pictures(page))


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


def test_the_same_run_is_the_same_bytes(folder: Path, run: Run) -> None:
    """Written at the end of the run, and by the command any time later; no date, no random name."""
    build_report(folder, RUN, [EXACT] * 8, **RESULT)
    first = (folder / "report.html").read_bytes()
    (folder / "report.html").unlink()
    status, out, _ = run("report", str(folder))
    assert status == 0 and f"Written: {folder / 'report.html'}" in out
    assert (folder / "report.html").read_bytes() == first


@pytest.mark.parametrize("part", ["title", "zero_topo"])
def test_a_report_that_lacks_a_part_is_one_line(folder: Path, run: Run, part: str) -> None:
    """Somebody wrote another report.json: the line has the file and the part."""
    report = build_report(folder, RUN, [EXACT] * 8, **RESULT)
    del report[part]
    (folder / "report.json").write_text(json.dumps(report))
    status, _, said = run("report", str(folder))
    assert status == 2 and len(said.splitlines()) == 1 and f"report.json lacks '{part}'" in said


def test_reports_hold_no_key_to_an_account(folder: Path) -> None:
    """Comet's key is in the DeepSpeed config; a report is passed on."""
    build_report(folder, RUN, [EXACT], **RESULT)
    for name in ("report.json", "report.html"):
        assert "mine" not in (folder / name).read_text() and "hidden" in (folder / name).read_text()


def test_a_folder_that_may_not_be_written_to_still_prints(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's run: the tables, then what to do."""
    build_report(folder, RUN, [EXACT] * 8, **RESULT)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    status, out, said = run("report", str(folder))
    assert status == 2 and "Sent by each rank" in out and "copy the folder" in said
