# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo topology``: the tree of nodes, GPUs and ranks, as discovered or as described."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from zero_topo.cli.inputs import machine, read_count
from zero_topo.cli.job import Ranks
from zero_topo.cli.options import MACHINES
from zero_topo.cli.output import print_json
from zero_topo.strict import read_text
from zero_topo.topology import Topology, preset_names, resolve_topology
from zero_topo.topology.captures import CAPTURES, Ask, Asked, ask_tools, read_captures, recognise
from zero_topo.topology.launchers import launcher_view
from zero_topo.topology.model import MOST_RANKS
from zero_topo.topology.render import render_devices, render_tree

DOCUMENT = Topology
FROM_HELP = (
    "A .json file, a preset, a JSON object, or captured output of amd-smi topology --json, "
    "rocm-smi --showtopo "
    "--shownodesbw, or nvidia-smi topo -m. Of several captures the most reliable is used."
)


def topology(
    source: Annotated[
        list[str] | None,
        typer.Option("--from", autocompletion=MACHINES, metavar="FILE|PRESET", help=FROM_HELP),
    ] = None,
    ranks: Ranks = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, which --from can read.")
    ] = False,
) -> None:
    """Show a machine. By default it is that of this job, from its launcher and this node's device
    tools.
    """
    count = None if ranks is None else read_count(ranks, "--ranks", most=MOST_RANKS)
    found, (tree, warnings) = described(source, count) if source else this_machine(count)
    if as_json:
        return print_json(found.to_json())
    print(render_tree(found))
    if tree is not None:
        print(f"\n{render_devices(tree)}")
    for warning in warnings:
        print(f"warning: {warning}")


# -- as discovered or described --------------------------------------------------------------------


def this_machine(world_size: int | None, ask: Ask = ask_tools) -> tuple[Topology, Asked]:
    """Detect the machine of this job, or outside of a job this node, and its devices; each tool
    runs at most once.

    Args:
        world_size: ranks, or None to ask the launcher.
        ask: asks the device tools.

    Raises:
        ValueError: if launchers, tools and the number of ranks contradict each other.
    """
    tree, notes = ask()
    if tree is not None and world_size is None and launcher_view(os.environ) is None:
        return tree.topology(), (tree, notes)
    return resolve_topology("auto", os.environ, world_size, lambda: (tree, notes)), (tree, ())


def described(sources: Sequence[str], world_size: int | None) -> tuple[Topology, Asked]:
    """Return the machine that the sources describe, and one node's devices if they are captured; no
    tool is run.

    One source may state the whole machine: the JSON of a topology, a preset or an inline object.
    Otherwise the sources are outputs of tools on one node, and the machine has as many such nodes
    as ``world_size`` ranks fill.

    Args:
        sources: as given to ``--from``.
        world_size: ranks, or None.

    Raises:
        ValueError: if a source is not recognised or broken, one of several states a machine, or the
            ranks do not fill nodes.
    """
    texts = {source: text for source in sources if (text := _captured(source)) is not None}
    stated = next((source for source in sources if source not in texts), None)
    if stated is not None:
        if len(sources) > 1:
            raise ValueError(f"--from {stated} states a whole machine; leave the other --from out")
        return machine(stated, world_size), (None, ())
    tree = read_captures(list(texts.items()))
    if world_size is not None and world_size % tree.count:
        raise ValueError(
            f"{world_size} ranks do not fill nodes of {tree.count} devices ({tree.tool}); give a "
            "multiple of that"
        )
    return tree.topology((world_size or tree.count) // tree.count), (tree, ())


def _captured(source: str) -> str | None:
    """The text of a source that is a file of captured output; None if it states a machine, or is no
    file.

    Raises:
        ValueError: if the file is neither.
    """
    path = Path(source).expanduser()
    if source.lstrip().startswith("{") or source in preset_names() or not path.is_file():
        return None
    text = read_text(path, source, errors="replace")
    if recognise(text) is not None:
        return text
    if source.endswith(".json") or text.lstrip().startswith("{"):
        return None
    raise ValueError(
        f"{source} is not recognised: it is neither a topology's JSON nor output of {CAPTURES}"
    )
