# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks the actual placement of each rank, as the rank reports it, against the topology (pure).

The caller gathers one :class:`Placement` per rank, for example with ``all_gather_object``. Every
rank then checks the same list, so all pass or all raise the same error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_topo.topology.devices import DeviceTree, normal_bus_id
from zero_topo.topology.model import Topology
from zero_topo.topology.render import compress

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Placement:
    """Holds the actual placement of one rank.

    Attributes:
        host: host name, for messages.
        boot_id: distinguishes machines with equal names ("localhost"); "" if unknown.
        bus_id: PCI address of its device as :func:`normal_bus_id` writes it, or None (no device, or
            not known).
        package: number of its device's GPU package on the node, or None.
    """

    host: str
    boot_id: str = ""
    bus_id: str | None = None
    package: int | None = None

    @property
    def machine(self) -> str:
        """Return an identifier of the rank's machine."""
        return self.boot_id or self.host


def take_placement(host: str, bus_id: str | None, tree: DeviceTree | None) -> Placement:
    """Return the placement of this rank.

    Args:
        host: host name.
        bus_id: PCI address of the rank's device in any form, or None.
        tree: this node's devices, or None.

    Raises:
        ValueError: if the bus id is not a PCI address.
    """
    address = None if bus_id is None else normal_bus_id(bus_id)
    packages = dict(zip(tree.bus_ids or (), tree.packages or (), strict=False)) if tree else {}
    boot_id = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return Placement(host, boot_id, address, packages.get(address or ""))


def check_placements(topology: Topology, placements: Sequence[Placement]) -> None:
    """Check that ranks share a host, and a GPU if it is known, exactly if they do in the topology.

    Args:
        topology: topology from the configuration, the tools or the launcher. An emulated one is not
            checked.
        placements: placement of every rank, in rank order.

    Raises:
        ValueError: raised by :func:`check_hosts`, or naming two ranks and their host.
    """
    names = Counter(
        host for host, _ in {(placement.host, placement.machine) for placement in placements}
    )
    labels = [
        placement.host
        if names[placement.host] == 1
        else f"{placement.host} ({placement.machine[:8]})"
        for placement in placements
    ]
    check_hosts(topology, labels)
    if (
        topology.emulated
        or topology.ranks_per_gpu == 1
        or any(placement.package is None for placement in placements)
    ):
        return
    for node in range(topology.nodes):
        ranks = topology.node_ranks(node)
        for first in range(0, len(ranks), topology.ranks_per_gpu):
            one, *others = ranks[first : first + topology.ranks_per_gpu]
            odd = next(
                (rank for rank in others if placements[rank].package != placements[one].package),
                None,
            )
            if odd is not None:
                raise ValueError(
                    f"topology {topology.name!r} puts ranks {one} and {odd} on one GPU, but on "
                    f"host {placements[one].host!r} they run on {placements[one].bus_id} and "
                    f"{placements[odd].bus_id}, which are different GPUs; bind ranks in the order "
                    "that `zero-topo topology` prints on a node, or state the order in the "
                    "topology's JSON"
                )


def check_hosts(topology: Topology, hosts_by_rank: Sequence[str]) -> None:
    """Check that two ranks share a host exactly if the topology puts them on one node.

    The names only have to distinguish hosts (a host name or a boot id); they are not compared with
    ``topology.hosts``, because schedulers and hosts do not always agree on names. An emulated
    topology is not checked.

    Args:
        topology: topology from the configuration or the launcher.
        hosts_by_rank: the host name that each rank reports, ``[world_size]``, in rank order.

    Raises:
        ValueError: naming the odd host, and what to do.
    """
    if len(hosts_by_rank) != topology.world_size:
        raise ValueError(
            f"{len(hosts_by_rank)} ranks report a host but topology {topology.name!r} has "
            f"{topology.world_size} ranks; start as many ranks as the topology has"
        )
    if topology.emulated:
        return
    if topology.nodes > 1 and len(set(hosts_by_rank)) == 1:
        raise ValueError(
            f"all {topology.world_size} ranks run on host {hosts_by_rank[0]!r} but topology "
            f"{topology.name!r} has "
            f"{topology.nodes} nodes; start the ranks on {topology.nodes} hosts, or pretend them "
            "with "
            f'"topology": {{"emulated": {{"nodes": {topology.nodes}, "gpus_per_node": '
            f"{topology.gpus_per_node}, "
            f'"gcds_per_gpu": {topology.ranks_per_gpu}}}}}'
        )
    home: dict[str, int] = {}
    for node in range(topology.nodes):
        ranks = topology.node_ranks(node)
        host = _check_one_host(topology, node, [(rank, hosts_by_rank[rank]) for rank in ranks])
        if host in home:
            raise ValueError(
                f"host {host!r} runs the ranks {compress(topology.node_ranks(home[host]))} and "
                f"{compress(ranks)}, which topology {topology.name!r} puts on nodes {home[host]} "
                f"and {node}; {_way_out(topology)}"
            )
        home[host] = node


def _check_one_host(topology: Topology, node: int, placed: Sequence[tuple[int, str]]) -> str:
    """Return the host of a node from the ``(rank, host)`` pairs of its ranks.

    Raises:
        ValueError: if its ranks are on several hosts.
    """
    (host, _), *others = Counter(name for _, name in placed).most_common()
    if others:
        odd = others[-1][0]
        strays = [rank for rank, name in placed if name == odd]
        raise ValueError(
            f"topology {topology.name!r} puts ranks {compress([rank for rank, _ in placed])} on "
            f"node {node}, but of these host {odd!r} runs {compress(strays)} and host {host!r} "
            f"others; {_way_out(topology)}"
        )
    return host


def _way_out(topology: Topology) -> str:
    return (
        f"start {topology.ranks_per_node} ranks on each host in the placement the topology states "
        "(block unless it has "
        'an "order"), or describe the real placement with an "order" in the topology\'s JSON'
    )
