# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Formats the output of benchmarks: tables of figures, and a console wide enough for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def figures_table(
    columns: Sequence[str], title: str | None = None, left: Collection[str] | None = None
) -> Table:
    """Return a table without rows.

    Args:
        columns: their headings.
        title: above it.
        left: columns of words, set left, by default the first one; the others, of figures, are set
            right.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    words = columns[:1] if left is None else left
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", no_wrap=True)
    return table


def wide_console(width: int, console: Console | None = None) -> Console:
    """A console, by default of stdout, of at least so many columns: a cut number is worse than a
    broken line.
    """
    console = console or Console(highlight=False)
    console.width = max(console.width, width)
    return console
