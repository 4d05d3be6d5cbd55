# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo topology``: the tree of nodes, GPUs and ranks, as discovered or as described."""

from __future__ import annotations

from typing import Annotated

import typer

from zero_topo.cli.described import described, this_machine
from zero_topo.cli.inputs import read_count
from zero_topo.cli.job import Ranks
from zero_topo.cli.options import MACHINES
from zero_topo.cli.output import print_json
from zero_topo.topology import Topology
from zero_topo.topology.model import MOST_RANKS
from zero_topo.topology.render import render_tree
from zero_topo.topology.render_devices import render_devices

DOCUMENT = Topology
FROM_HELP = (
    "A .json file, a preset, a JSON object, or captured output of amd-smi topology --json, rocm-smi --showtopo "
    "--shownodesbw, or nvidia-smi topo -m; may be repeated; of several tools the most reliable is used."
)


def topology(
    source: Annotated[
        list[str] | None, typer.Option("--from", autocompletion=MACHINES, metavar="FILE|PRESET", help=FROM_HELP)
    ] = None,
    ranks: Ranks = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, which --from can read.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the links between the ranks of a job; run it on every rank.")
    ] = False,
) -> None:
    """Show the machine: by default that of this job, from its launcher and this node's device tools."""
    if measure:
        from zero_topo.cli.measure import measure_command

        return measure_command(source, as_json)
    count = None if ranks is None else read_count(ranks, "--ranks", most=MOST_RANKS)
    found = described(source, count) if source else this_machine(count)
    if as_json:
        return print_json(found.topology.to_json())
    print(render_tree(found.topology))
    if found.devices is not None:
        print(f"\n{render_devices(found.devices)}")
    for warning in found.warnings:
        print(f"warning: {warning}")
