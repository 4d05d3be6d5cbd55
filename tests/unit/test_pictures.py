# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Pictures of README and docs are drawn from the records, and every page has its own."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.pictures import PICTURES
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
