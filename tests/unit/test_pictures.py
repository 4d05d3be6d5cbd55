# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Pictures of README and docs are drawn from the records, and every page has its own."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from benchmarks.pictures import PICTURES, cluster
from tests.documents import PAGES, README, record
from tests.launching import ROOT

FOLDER = ROOT / "docs/pictures"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_the_records_say(name: str) -> None:
    """Drawn again it equals the file committed: neither a record nor the file may change alone."""
    committed = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert committed == PICTURES[name](), "run: python -m benchmarks.pictures docs/pictures"
    root = ElementTree.fromstring(committed)
    assert root.findtext(f"{SVG}title") and "@media(prefers-color-scheme:dark)" in committed


def test_each_picture_is_shown_and_described() -> None:
    """The README shows one; a page names no picture that is not drawn, and none is left over."""
    image = re.compile(r"!\[([^]]+)\]\((?:docs/)?pictures/([\w-]+)\.svg\)")
    shown = {path.name: image.findall(path.read_text()) for path in PAGES}
    readme = image.findall(README.read_text())
    assert [name for _, name in readme] == ["cluster"]
    assert {name for found in shown.values() for _, name in found} == set(PICTURES)
    assert {path.stem for path in FOLDER.iterdir()} == set(PICTURES)
    assert {page for page, found in shown.items() if found} >= {
        "measured.md",
        "losses.md",
        "schemes.md",
    }


def test_bars_are_as_long_as_their_values() -> None:
    """Of the emulated cluster: step time of unmodified DeepSpeed and of each scheme, one scale."""
    root = ElementTree.fromstring(cluster(1))
    widths = [
        float(rect.get("width", "0"))
        for rect in root.iter(f"{SVG}rect")
        if rect.get("class") in ("s0", "s6")
    ]
    found = {
        row["scheme"]: row for row in record("cluster-t8")["results"] if row["micro_batches"] == 1
    }
    stock = next(row for row in record("cluster-t8-stock")["results"] if row["scheme"] == "stock")
    seconds = [
        stock["step_s"]["median"],
        found["zero3"]["step_s"]["median"],
        found["zero++"]["step_s"]["median"],
    ]
    assert widths[0] / widths[1] == pytest.approx(seconds[0] / seconds[1], rel=0.01)
    assert widths[1] / widths[2] == pytest.approx(seconds[1] / seconds[2], rel=0.01)
