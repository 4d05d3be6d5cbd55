# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What commands that measure share: where results go, a record that grows, a bar, a failure told in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import Progress

from zero_topo.bench import records
from zero_topo.observe.runlog import new_run_folder

FAILED = 1
Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of a table.")]
Record = Annotated[Path | None, typer.Option(help="File for the record; default: a new folder under runs/.")]
Plots = Annotated[Path | None, typer.Option(help="Folder for the pictures; default: where the record is.")]


class Outputs(Protocol):
    """The options that say where a benchmark's results go."""

    @property
    def as_json(self) -> bool: ...
    @property
    def record(self) -> Path | None: ...
    @property
    def plots(self) -> Path | None: ...


def record_file(outputs: Outputs, benchmark: str) -> Path:
    return outputs.record or new_run_folder(f"bench-{benchmark}") / "record.json"


class Keeper:
    """Writes a record that grows."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.begun = False

    def __call__(self, content: Mapping[str, Any]) -> None:
        """Write what is measured so far."""
        records.write(self.file, content)
        self.begun = True


@contextmanager
def failures_told(keep: Keeper) -> Iterator[None]:
    """If the block fails: what the ranks said instead of a traceback of ours, and where to find what was measured."""
    try:
        yield
    except BaseException as error:
        if keep.begun:
            typer.echo(f"zero-topo: what was measured until then is in {keep.file}", err=True)
        if not isinstance(error, RuntimeError):
            raise
        typer.echo(f"zero-topo: {error}", err=True)
        raise typer.Exit(FAILED) from error


def finish(content: Mapping[str, Any], outputs: Outputs, report: ModuleType, record: Path | None = None) -> None:
    """Write the record and its pictures, and print the table or the JSON.

    Args:
        content: the record.
        outputs: where to.
        report: a module with ``draw(content, folder)`` and ``show(content)``.
        record: the record's file, if one was begun.
    """
    file = record or record_file(outputs, content["benchmark"])
    records.write(file, content)
    pictures = report.draw(content, outputs.plots or file.parent)
    if outputs.as_json:
        print(json.dumps(content, indent=2))
        return
    report.show(content)
    print(f"Written: {', '.join(str(path) for path in (file, *pictures))}")


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """A bar on stderr if that is a terminal; gives what is to be called with a few words at each step."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=total)

        def tick(words: str, done: int = 0) -> None:
            bar.update(task, description=words, advance=done)

        yield tick
