# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Returns the :class:`Topology` that the config key ``topology`` selects.

In a job the ranks find it, or the order in which they run on a stated one, from their placements.
Before they can communicate, and outside of a job, only a stated machine is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_topo.strict import Count, did_you_mean, parse_json, read, read_text
from zero_topo.topology.model import Topology
from zero_topo.topology.placements import Placement, found_tree, placed
from zero_topo.topology.presets import emulated_from_json, load_preset, preset_names

AUTO = "auto"
ALONE = "one node"
"""Name of the machine of which only a number of ranks is known."""

INLINE_HINT = '{"nodes": N, "gpus_per_node": G, "ranks_per_gpu": R} or {"emulated": {...}}'


def resolve_topology(
    setting: str | Mapping[str, Any],
    world_size: int | None = None,
    placements: Sequence[Placement] = (),
) -> Topology:
    """Return the topology that the configuration selects, checked against the number of ranks.

    Args:
        setting: "auto"; a preset's name; a path (ends in ``.json`` or has a slash) to a JSON file;
            or an inline object. File and object hold the fields of :class:`Topology`, or
            ``{"emulated": {"nodes", "gpus_per_node", "gcds_per_gpu"}}``.
        world_size: ranks, if known; None is one node of a preset, and all ranks of a description.
        placements: the placement of each rank, if the ranks of a job have gathered them.

    Returns:
        The topology; for "auto" without placements, one node with a GPU for each rank.

    Raises:
        ValueError: if the setting is wrong, or the ranks do not run on such a machine.
    """
    if world_size is not None:
        read(Count, "world size", world_size)
    if setting == AUTO and placements:
        return found_tree(placements)
    if setting == AUTO:
        why = "assumed: the ranks of a job find it when they start"
        sources = dict.fromkeys(("nodes", "gpus_per_node", "ranks_per_gpu"), why)
        return Topology(ALONE, 1, world_size or 1, 1, sources=sources)
    topology, what = _stated(setting, world_size)
    if world_size not in (None, topology.world_size):
        raise ValueError(
            f"{what} has {topology.shape} = {topology.world_size} ranks but the job has "
            f"{world_size}; start {topology.world_size} ranks, or change the topology (in a job, "
            f'"{AUTO}" finds it)'
        )
    return placed(topology, placements) if placements else topology


def _stated(setting: object, world_size: int | None) -> tuple[Topology, str]:
    """Return the machine that a setting states, and what to call it in an error."""
    if isinstance(setting, Mapping):
        return _from_object(setting), "the inline topology"
    if not isinstance(setting, str):
        raise ValueError(
            f"topology is {setting!r}; it must be 'auto', a preset, a path to a JSON file or an "
            "object"
        )
    if setting.endswith(".json") or "/" in setting:
        return _from_file(setting), f"the topology in {setting}"
    names = [AUTO, *preset_names()]
    if setting not in names:
        raise ValueError(
            f"topology {setting!r} is unknown{did_you_mean(setting, names)} (known: "
            f"{', '.join(names)}; a path to a .json file, or an object {INLINE_HINT})"
        )
    return load_preset(setting, world_size), f"preset {setting!r}"


def _from_object(data: Mapping[str, Any]) -> Topology:
    """Build a topology from an inline object or a file's content."""
    if set(data) == {"emulated"} and not isinstance(data["emulated"], bool):
        if not isinstance(data["emulated"], Mapping):
            raise ValueError(
                f"topology: emulated is {data['emulated']!r}; it must be an object such as "
                f"{INLINE_HINT}"
            )
        return emulated_from_json(data["emulated"])
    return Topology.from_json(data)


def _from_file(setting: str) -> Topology:
    path = Path(setting).expanduser()
    what = f"topology file {setting!r}"
    try:
        data = parse_json(read_text(path, what), what)
    except OSError as error:
        raise ValueError(
            f"{what} cannot be read ({error.strerror}; looked in {path.absolute()}); give a path "
            "that every rank can read, or a preset's name without a slash"
        ) from error
    if not isinstance(data, dict):
        raise ValueError(
            f"{what}: holds a {type(data).__name__}; it must hold an object {INLINE_HINT}"
        )
    try:
        return _from_object(data)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
