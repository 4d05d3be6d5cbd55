# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The page of what DeepSpeed has removed: each config that replaces another starts, and migrate writes the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Run
from tests.launching import ROOT

PAGE = (ROOT / "docs/removed-features.md").read_text()
SECTIONS = {
    name.strip(): tuple(json.loads(block) for block in re.findall(r"```json\n(.*?)```", body, re.DOTALL))
    for name, _, body in (section.partition("\n") for section in PAGE.split("\n## ")[1:])
}


@pytest.mark.parametrize("name", ["MiCS", "LoCo"])
def test_migrate_writes_what_the_page_shows(name: str, tmp_path: Path, run: Run) -> None:
    before, after = SECTIONS[name]
    file = tmp_path / "before.json"
    file.write_text(json.dumps(before))
    status, out, _ = run("migrate", str(file), "--json")
    written: dict[str, Any] = json.loads(out)["config"]
    assert status == 0 and written == after
