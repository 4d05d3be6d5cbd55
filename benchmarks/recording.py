# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What commands that measure share: where results go, a record that grows, a bar, a failure in one
line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks import records
from zero_topo.cli.options import Force
from zero_topo.cli.output import print_json
from zero_topo.observe.console import bar
from zero_topo.observe.files import BENCH, check_files, write_png
from zero_topo.observe.runlog import new_run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAILED = 1


@dataclass(frozen=True)
class Outputs:
    """Where the results of a command go; its own options are added to these."""

    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON instead of a table.")
    ] = False
    record: Annotated[
        Path | None, typer.Option(help="File for the record; default: a new folder under runs/.")
    ] = None
    force: Force = False
    plots: Annotated[
        Path | None, typer.Option(help="Folder for the pictures; default: where the record is.")
    ] = None


def measure(
    outputs: Outputs,
    report: ModuleType,
    total: int,
    run: Callable[[records.Tick], records.GrowingRecord],
) -> dict[str, Any]:
    """Run a benchmark, write its record as it grows, then its pictures, and print the table or the
    JSON.

    If it fails, print what its ranks printed instead of a traceback of ours, and where to find what
    was measured.

    Args:
        outputs: where to.
        report: a module with ``show(content)``, and ``draw(content)``: pictures by the names of
            their files, those of its ``PICTURES``.
        total: ticks of the whole run.
        run: measures.

    Returns:
        The whole record.
    """
    folder = outputs.plots or (outputs.record and outputs.record.parent)
    pictures = [(folder / name, ".png", BENCH) for name in report.PICTURES] if folder else []
    check_files([(outputs.record, "", '"benchmark": '), *pictures], outputs.force)
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
    drawn = save(report.draw(content), outputs.plots or file.parent)
    if outputs.as_json:
        print_json(content)
    else:
        report.show(content)
        print(f"Written: {', '.join(str(path) for path in (file, *drawn))}")
    return content


def save(pictures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write pictures into a folder, which is made; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures.items():
        write_png(figure, folder / name, BENCH, dpi="figure")
    return [folder / name for name in pictures]


def _tick(move: Callable[..., None], words: str, done: int) -> None:
    move(description=words, advance=done)
