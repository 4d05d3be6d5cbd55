# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a user reads, README and docs, as data: its commands, its tables."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.launching import ROOT

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = (README, *PAGES)
_COMMANDS = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Every line of a shell block of the documents, once."""
    bodies = [body for path in DOCUMENTS for body in _COMMANDS.findall(path.read_text())]
    return list(dict.fromkeys(line for body in bodies for line in body.splitlines()))


def starting(*starts: str) -> list[str]:
    """The commands that start so."""
    return [line for line in commands() if line.startswith(starts)]


def blocks() -> dict[str, dict[str, Any]]:
    """The DeepSpeed configs with a ``zero_topo`` block that the documents show, by page and number
    of the line.
    """
    found = {}
    for path in DOCUMENTS:
        text = path.read_text()
        for match in re.finditer(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            body = match[1].strip()
            shown = json.loads(body if body.startswith("{") else f"{{{body}}}")
            if "zero_topo" in shown:
                found[f"{path.name}:{text.count(chr(10), 0, match.start()) + 1}"] = shown
    return found


def tables() -> dict[str, list[str]]:
    """Rows of each table that a comment ``<!-- name: ... -->`` precedes and ``<!-- end -->`` ends,
    by that name.

    Raises:
        ValueError: if two have one name, which a test could hold only one of.
    """
    found: dict[str, list[str]] = {}
    for path in DOCUMENTS:
        for name, body in re.findall(
            r"<!-- ([\w, ]+):[^>]*-->\n(.*?)<!-- end -->", path.read_text(), re.DOTALL
        ):
            if name in found:
                raise ValueError(f"two tables are named {name}; rename that of {path.name}")
            found[name] = body.splitlines()[2:]
    return found


def record(name: str) -> Any:
    """A record of ``benchmarks/records``."""
    return json.loads((ROOT / f"benchmarks/records/{name}.json").read_text())


def row(cells: list[str]) -> str:
    """As Markdown."""
    return f"| {' | '.join(cells)} |"
