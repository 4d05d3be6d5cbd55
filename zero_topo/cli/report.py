# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo report``: a run's report again, from the files it left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zero_topo.cli.output import print_json


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of a run, such as runs/NAME.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print report.json instead of tables.")
    ] = False,
) -> None:
    """Print traffic and memory of a run, next to ZeRO-3's, and write its pictures and HTML page."""
    from zero_topo.observe.page import write_page
    from zero_topo.observe.runlog import REPORT, read_metrics, read_report
    from zero_topo.observe.tables import render

    found = read_report(folder)
    if as_json:
        print_json(found)
        return
    try:
        print(render(folder))
        print(f"Written: {write_page(found, read_metrics(folder), folder)}")
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / REPORT} lacks {error}: give the folder of a run of this version"
        ) from None
    except PermissionError as error:
        raise ValueError(f"{error}: copy the folder to where you may write") from None
