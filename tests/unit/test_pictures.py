# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Pictures of README and docs are drawn from the records, and every page has its own."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from benchmarks.pictures import PICTURES
from tests.documents import PAGES, README
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
