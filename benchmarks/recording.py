# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What commands that measure share: where results go, a record that grows, a bar, a failure in one
line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks import records
from zero_topo.cli.output import print_json
from zero_topo.observe.runlog import new_run_folder

FAILED = 1
Result = Mapping[str, Any]
Columns = Mapping[str, Callable[[Result], object]]


@dataclass(frozen=True)
class Outputs:
    """Where the results of a command go; its own options are added to these."""

    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON instead of a table.")
    ] = False
    record: Annotated[
        Path | None, typer.Option(help="File for the record; default: a new folder under runs/.")
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --record.")] = False


def measure(
    outputs: Outputs,
    columns: Columns,
    total: int,
    run: Callable[[records.Tick], records.GrowingRecord],
) -> dict[str, Any]:
    """Run a benchmark, write its record as it grows, and print the table or the JSON.

    If it fails, print what its ranks printed instead of a traceback of ours, and where to find what
    was measured.

    Args:
        outputs: where to.
        columns: of the table that is printed: what a result has there, by heading.
        total: ticks of the whole run.
        run: measures.

    Returns:
        The whole record.
    """
    if outputs.record is not None and outputs.record.exists() and not outputs.force:
        raise ValueError(f"{outputs.record} exists; give another name, or --force")
    content: dict[str, Any] = {}
    file = outputs.record
    try:
        # closed at once, not when it is forgotten: a run takes down what it has built
        with bar("starting", total) as move, closing(run(partial(_tick, move))) as growing:
            for content in growing:
                file = file or new_run_folder(f"bench-{content['benchmark']}") / "record.json"
                records.write(file, content)
    except BaseException as error:
        if content:
            typer.echo(f"zero-topo: what was measured until then is in {file}", err=True)
        if not isinstance(error, RuntimeError):
            raise
        typer.echo(f"zero-topo: {error}", err=True)
        raise typer.Exit(FAILED) from error
    assert file is not None, "nothing was measured"
    if outputs.as_json:
        print_json(content)
    else:
        print(table(content["results"], columns))
        print(f"Written: {file}")
    return content


def table(results: Sequence[Result], columns: Columns) -> str:
    """One line for each result."""
    rows = [list(columns)]
    for result in results:
        rows.append([str(cell(result)) for cell in columns.values()])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


@contextmanager
def bar(words: str, total: float) -> Iterator[Callable[..., None]]:
    """A bar on stderr if that is a terminal; gives what moves it, by the keywords of rich's
    ``Progress.update``.

    Args:
        words: before it, at first.
        total: of the whole.
    """
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        yield partial(shown.update, shown.add_task(words, total=total))


def _tick(move: Callable[..., None], words: str, done: int) -> None:
    move(description=words, advance=done)
