# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo report``: a run's report again, from the files it left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zero_topo.cli.output import print_json


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as one under runs/.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print report.json instead of tables.")] = False,
) -> None:
    """Print what a run sent and held, beside the formulas and beside ZeRO-3."""
    from zero_topo.observe.runlog import read_report
    from zero_topo.observe.tables import render

    if as_json:
        print_json(read_report(folder))
    else:
        render(folder)
