# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a user reads, README and docs, as data: its commands, its tables."""

from __future__ import annotations

import re

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


def tables() -> dict[str, list[str]]:
    """Rows of each table that a comment ``<!-- name: ... -->`` precedes and ``<!-- end -->`` ends, by that name.

    Raises:
        ValueError: if two have one name, which a test could hold only one of.
    """
    found: dict[str, list[str]] = {}
    for path in DOCUMENTS:
        for name, body in re.findall(r"<!-- ([\w, ]+):[^>]*-->\n(.*?)<!-- end -->", path.read_text(), re.DOTALL):
            if name in found:
                raise ValueError(f"two tables are named {name}; rename that of {path.name}")
            found[name] = body.splitlines()[2:]
    return found
