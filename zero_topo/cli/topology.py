# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo topology``: the tree of nodes, GPUs and ranks, as discovered or as described."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from zero_topo.cli.inputs import machine


def topology(
    source: Annotated[
        str, typer.Option("--from", metavar="FILE|PRESET", help="A .json file, a preset or a JSON object.")
    ] = "auto",
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks; default: what the launcher says.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON that --from reads back.")] = False,
) -> None:
    """Show what the machine is: by default what the launcher of this job says."""
    found = machine(source, world_size)
    print(json.dumps(found.to_json(), indent=2) if as_json else found.render())
