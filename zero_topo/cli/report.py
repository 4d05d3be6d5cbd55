# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo report``: a run's report again, from the files it left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zero_topo.cli.options import Force
from zero_topo.cli.output import print_json
from zero_topo.observe.documents import Report
from zero_topo.observe.files import check_files

DOCUMENT = Report


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of a run, such as runs/NAME.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print report.json instead of tables.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", help="File for the HTML page; default: report.html in the folder."
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Print traffic and memory of a run, next to ZeRO-3's. Writes an HTML page with figures as
    well.
    """
    from zero_topo.observe.files import PAGE
    from zero_topo.observe.page import HTML, write_page
    from zero_topo.observe.runlog import read_metrics, read_report
    from zero_topo.observe.tables import render

    found = read_report(folder, DOCUMENT)
    file = html or (None if as_json else folder / HTML)
    check_files([(file, ".html", PAGE)], force)
    if as_json:
        print_json(found)
    else:
        print(render(folder))
    if file is not None:
        try:
            write_page(found, read_metrics(folder), file)
        except PermissionError as error:
            raise ValueError(
                f"{error}: name a file that you may write with --html FILE.html"
            ) from None
        if not as_json:
            print(f"Written: {file}")
