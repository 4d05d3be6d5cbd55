# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A record of ``bench quantizers`` as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.console import figures_table, wide_console
from zero_topo.units import format_bytes

WIDTH = 96
OPS = ("quantize", "dequantize", "dequantize_reduce")


def show(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a record: one line per buffer and kernel, GB/s and the share of a copy's traffic in
    brackets.
    """
    console = wide_console(WIDTH, console)
    where = content["device"] or content["machine"]["processor"]
    size = format_bytes(content["settings"]["nbytes"])
    console.print(
        f"{where}; buffers of {size}; GB/s read and written (share of a plain copy's in the same "
        "run)"
    )
    console.print(table(content["results"]))
    for row in content.get("turns", ()):
        ratio = row["ratio"]
        console.print(
            f"{row['op']}, {row['dtype']}: NF4 takes {ratio['median']:.2f} of INT4's time "
            f"({ratio['lower_quartile']:.2f} to {ratio['upper_quartile']:.2f})"
        )
    for name, why in content["skipped"].items():
        console.print(f"not measured: {name}: {why}", soft_wrap=True)


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Lines by type, format, backend and threads; a column per operation."""
    made = figures_table(("type", "bits", "block", "backend", "threads", *OPS), left=("backend",))
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in results:
        key = (row["dtype"], row["bits"], row["block_size"], row["backend"], row["threads"])
        lines.setdefault(key, {})[row["op"]] = f"{row['gb_per_s']:.1f} ({row['memcpy_ratio']:.2f})"
    for key, cells in lines.items():
        made.add_row(*map(str, key), *(cells.get(op, "-") for op in OPS))
    return made
