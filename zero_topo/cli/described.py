# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reads a machine from the command line: a preset or JSON, completed by captured output of device tools."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zero_topo.cli.inputs import machine
from zero_topo.strict import parse_json, read_text
from zero_topo.topology import Topology, preset_names, resolve_topology
from zero_topo.topology.captures import CAPTURES, Ask, Asked, ask_tools, read_captures, recognise
from zero_topo.topology.devices import DeviceTree
from zero_topo.topology.launchers import launcher_view


@dataclass(frozen=True)
class Described:
    """A machine, one node's devices if a tool listed them, and warnings about them."""

    topology: Topology
    devices: DeviceTree | None = None
    warnings: tuple[str, ...] = ()


def this_machine(world_size: int | None, ask: Ask = ask_tools) -> Described:
    """Detect the machine of this job, or outside of a job this node; the device tools run at most once.

    Args:
        world_size: ranks, or None to ask the launcher.
        ask: asks the device tools.

    Raises:
        ValueError: if launchers, tools and the number of ranks contradict each other.
    """
    asked = ask()
    if asked.tree is not None and world_size is None and launcher_view(os.environ) is None:
        return Described(asked.tree.topology(), asked.tree, asked.notes)
    return Described(resolve_topology("auto", os.environ, world_size, lambda: asked), asked.tree)


def described(sources: Sequence[str], world_size: int | None) -> Described:
    """The machine that the sources describe together; no tool is run.

    A stated machine (a topology's JSON, a preset, an inline object, "auto") is trusted most; captured output fills what
    it leaves open, and alone describes one node, or as many as ``world_size`` ranks fill.

    Args:
        sources: as given to ``--from``.
        world_size: ranks, or None.

    Raises:
        ValueError: if a source is not recognised or broken, two machines are stated, or the ranks do not fill nodes.
    """
    texts = {source: text for source in sources if (text := _captured(source)) is not None}
    stated = [source for source in sources if source not in texts]
    if len(stated) > 1:
        raise ValueError(f"--from states two machines, {stated[0]!r} and {stated[1]!r}; give one, and captured output")
    tree = read_captures(list(texts.items())) if texts else None
    if stated:
        return _stated(stated[0], tree, world_size)
    assert tree is not None  # there is at least one source
    if world_size is not None and world_size % tree.count:
        raise ValueError(
            f"{world_size} ranks do not fill nodes of {tree.count} devices ({tree.tool}); give a multiple of that"
        )
    return Described(tree.topology((world_size or tree.count) // tree.count), tree)


def _captured(source: str) -> str | None:
    """The text of a source that is a file of captured output; None if it states a machine, or is no file.

    Raises:
        ValueError: if the file is neither.
    """
    if source == "auto" or source.lstrip().startswith("{") or source in preset_names():
        return None
    path = Path(source).expanduser()
    if not path.is_file():
        return None
    text = read_text(path, source, errors="replace")
    if recognise(text) is not None:
        return text
    if source.endswith(".json") or _is_json(text):
        return None
    raise ValueError(f"{source} is not recognised: it is neither a topology's JSON nor output of {CAPTURES}")


def _is_json(text: str) -> bool:
    try:
        return isinstance(parse_json(text, ""), dict)
    except ValueError:
        return False


def _stated(source: str, tree: DeviceTree | None, world_size: int | None) -> Described:
    """A stated machine, completed by captured devices."""
    if source == "auto":
        return Described(resolve_topology("auto", os.environ, world_size, lambda: Asked(tree)), tree)
    is_name = source in preset_names() or "/" in source or source.lstrip().startswith("{")
    found = machine(source if is_name or not Path(source).is_file() else f"./{source}", world_size)
    if tree is None:
        return Described(found)
    links = {domain: link for domain, link in tree.node_links().items() if domain not in found.links}
    if links:
        sources = {**found.sources, **{f"links.{domain}": tree.sources["links"] for domain in links}}
        found = replace(found, links={**found.links, **links}, sources=sources)
    return Described(found, tree, tuple(_contradictions(found, tree)))


def _contradictions(stated: Topology, tree: DeviceTree) -> list[str]:
    """Return warnings where the devices differ from the stated machine, which takes precedence."""
    facts = {
        "ranks per node": (stated.ranks_per_node, tree.count),
        "ranks per GPU": (stated.ranks_per_gpu, tree.shape()[1] if tree.packages else stated.ranks_per_gpu),
    }
    return [
        f"{stated.name} has {said} {what} but {tree.tool} shows {seen}; the stated number is used"
        for what, (said, seen) in facts.items()
        if said != seen
    ]
