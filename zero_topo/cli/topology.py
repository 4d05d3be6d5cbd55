# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo topology``: the tree of nodes, GPUs and ranks of a preset or a description."""

from __future__ import annotations

from typing import Annotated

import typer

from zero_topo.cli.inputs import machine, read_count
from zero_topo.cli.options import Ranks
from zero_topo.cli.output import print_json
from zero_topo.topology.model import MOST_RANKS
from zero_topo.topology.render import render_tree


def topology(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="FILE|PRESET",
            help="A .json file, a preset or a JSON object.",
        ),
    ],
    ranks: Ranks = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, which --from can read.")
    ] = False,
) -> None:
    """Show a machine. A job finds its own when it starts."""
    count = None if ranks is None else read_count(ranks, "--ranks", most=MOST_RANKS)
    found = machine(source, count)
    if as_json:
        return print_json(found.to_json())
    print(render_tree(found))
