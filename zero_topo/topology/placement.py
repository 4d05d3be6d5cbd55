# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Puts the devices of a node into the tree that a launcher describes: which local rank uses which
device.

Devices and launchers
    A launcher reports ranks, hosts and placement; a device tool reports packages and links. The
    local rank joins them: ``devices[local rank]`` is read from ``--gpu-bind``, from a list of
    visible devices with one entry per local rank, or is the local rank itself if there are as many
    devices. Only variables that are equal on all ranks of a node may be read, because all ranks
    must find the same topology. A rank's own single visible device is therefore ignored here (the
    ranks compare those at start-up, see ``placements.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zero_topo.strict import words_of
from zero_topo.topology.captures import Asked
from zero_topo.topology.devices import DeviceTree, normal_bus_id
from zero_topo.topology.model import Topology
from zero_topo.topology.probes import slurm

VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def with_devices(flat: Topology, asked: Asked, env: Mapping[str, str]) -> Topology:
    """Group the ranks of a topology without packages by the GPU packages that the device tools
    found.

    Args:
        flat: the launcher's topology, with one rank per GPU.
        asked: the answers of this node's tools.
        env: environment variables.

    Returns:
        The topology with packages, links and order; or ``flat`` with a note in its sources if the
        tools report nothing or contradict the launcher, which then has priority.

    Raises:
        ValueError: if the ranks fill the node and a device is missing from a package.
    """
    tree, notes = asked
    if tree is None:
        return _noted(flat, notes)
    devices, how = local_devices(env, tree, flat.ranks_per_node)
    if devices is None:
        return _noted(flat, [*notes, f"{tree.tool} not used: {how}"])
    used = tree.select(devices)
    try:
        gpus, dies = used.shape()
    except ValueError as error:
        if len(devices) == tree.count:
            raise
        return _noted(
            flat,
            [*notes, f"{tree.tool} not used: the ranks use only some of its devices, and {error}"],
        )
    links = used.node_links()
    placed = replace(
        flat,
        gpus_per_node=gpus,
        ranks_per_gpu=dies,
        order=reorder(flat.order, flat.world_size, used.places()),
        links=links,
        sources={**flat.sources, **used.origins(links), "devices": how},
    )
    return _noted(placed, [*notes, *used.warnings()])


def local_devices(
    env: Mapping[str, str], tree: DeviceTree, per_node: int
) -> tuple[tuple[int, ...] | None, str]:
    """Return the device of each local rank and where it was read; or None and why they are unknown.

    Args:
        env: environment variables that are equal on all ranks of the node.
        tree: the node's devices.
        per_node: ranks on the node.
    """
    bound, how = slurm.bound_devices(env, per_node, tree.numa or (None,) * tree.count)
    if bound is None:
        bound, how = _visible(env, tree, per_node)
    if bound is None and tree.count == per_node:
        return tuple(range(per_node)), f"{tree.tool}: local rank i on device i"
    if bound is None:
        return (
            None,
            f"it sees {tree.count} devices but the launcher has {per_node} ranks on each node",
        )
    if len(set(bound)) < len(bound) or not all(0 <= device < tree.count for device in bound):
        return None, f"{how} names the devices {list(bound)}, but it sees {tree.count}"
    return bound, how


def reorder(
    order: Sequence[int] | None, world_size: int, places: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the tree positions after the local ranks of every node have moved to other places of
    the node.

    Args:
        order: tree position of each rank with places equal to local ranks; None means the identity.
        world_size: ranks in all.
        places: place inside the node of each local rank, a permutation.

    Returns:
        Tree position of each rank, or None for the identity.
    """
    per_node = len(places)
    positions = range(world_size) if order is None else order
    moved = tuple(
        position // per_node * per_node + places[position % per_node] for position in positions
    )
    return None if moved == tuple(range(world_size)) else moved


def _visible(
    env: Mapping[str, str], tree: DeviceTree, per_node: int
) -> tuple[tuple[int, ...] | None, str]:
    """Read devices from a list of numbers or bus ids with one entry per local rank."""
    for name in VISIBLE:
        words = words_of(env.get(name, ""))
        if len(words) != per_node:
            continue
        devices = [_device(word, tree) for word in words]
        if all(device is not None for device in devices):
            # Without its value: nodes may use different devices, and still all ranks must find
            # equal topologies.
            return tuple(
                device for device in devices if device is not None
            ), f"{name}, one entry per local rank"
    return None, ""


def _device(word: str, tree: DeviceTree) -> int | None:
    if word.isdecimal():
        return int(word)
    try:
        return (tree.bus_ids or ()).index(normal_bus_id(word))
    except ValueError:  # neither an address nor one of the tree's; a UUID, for example
        return None


def _noted(topology: Topology, notes: Sequence[str]) -> Topology:
    """Return the topology with notes about the device tools among its sources."""
    if not notes:
        return topology
    return replace(topology, sources={**topology.sources, "device tools": "; ".join(notes)})
