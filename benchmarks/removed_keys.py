# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Writes the table of the block's removed keys: `python -m benchmarks.removed_keys PAGE`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from zero_topo.config.removed import REMOVED
from zero_topo.strict import as_json

TABLE = re.compile(r"(<!-- removed keys:[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = ["| key of the block | what to do instead |", "|---|---|"]


def removed_rows() -> list[str]:
    """One row for each key or value that the parser rejects as removed."""
    rows = []
    for removed in REMOVED:
        value = "" if removed.value is None else f": {as_json(removed.value)}"
        rows.append(f"| `{removed.key}{value}` | {removed.instead} |")
    return rows


def main(page: Path) -> None:
    """Write the table between the page's markers."""
    rows = "\n".join([*HEAD, *removed_rows(), ""])
    text = page.read_text(encoding="utf-8")
    page.write_text(TABLE.sub(lambda found: found[1] + rows + found[2], text), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
