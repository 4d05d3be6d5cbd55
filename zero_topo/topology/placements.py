# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Builds the machine's tree from the placement of each rank, and checks a stated machine against it
(pure).

Ranks gather one :class:`Placement` each (``engine/agreement.py``). Every rank then reads the same
list, so all build one tree or all raise one error. No launcher is asked, and ranks may be
distributed over hosts and GPUs in any order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from zero_topo.topology.model import Topology
from zero_topo.topology.render import NODES_SHOWN, compress

FOUND = "this job"
"""Name of a machine that the ranks found."""

SOURCE = "hosts and devices of the ranks"
LEAVE_OUT = 'or leave "topology" out: the ranks then find it'
STATE = (
    'or state the machine: "topology" is a preset, a JSON file, or {"nodes": N, "gpus_per_node": '
    'G, "ranks_per_gpu": R}'
)


@dataclass(frozen=True)
class Placement:
    """Holds the actual placement of one rank.

    Attributes:
        host: host name, for messages.
        machine: distinguishes hosts with equal names ("localhost"); "" if unknown.
        package: identifies the GPU package of its device on the host; "" if unknown.
        size: devices in such a package.
        domain: identifies the NVLink domain that joins its host to others; "" if there is none.
    """

    host: str
    machine: str = ""
    package: str = ""
    size: int = 1
    domain: str = ""


Ranks = list[int]


def found_tree(placements: Sequence[Placement]) -> Topology:
    """Return the tree of the hosts and GPUs on which the ranks run, numbered by their lowest rank.

    The hosts of an NVLink domain are one node, if the domains have equal numbers of ranks.

    Args:
        placements: placement of every rank, in rank order.

    Raises:
        ValueError: if hosts or GPUs have different numbers of ranks.
    """
    hosts = _hosts(placements)
    _check_equal(hosts, placements, "host", "start equally many ranks on each host")
    packages = [package for ranks in hosts for package in _packages(ranks, placements)]
    _check_equal(packages, placements, "GPU", f"use all devices of each GPU, {STATE}")
    nodes = _nodes(hosts, placements)
    ranks_per_gpu = len(packages[0])
    hosts_per_node = len(nodes[0])
    machine = Topology(
        FOUND,
        nodes=len(nodes),
        gpus_per_node=len(hosts[0]) * hosts_per_node // ranks_per_gpu,
        ranks_per_gpu=ranks_per_gpu,
        hosts_per_node=hosts_per_node,
        sources=dict.fromkeys(("nodes", "gpus_per_node", "ranks_per_gpu"), SOURCE),
    )
    return _ordered(machine, nodes, placements)


def placed(topology: Topology, placements: Sequence[Placement]) -> Topology:
    """Return a stated machine with the order in which the ranks run on it.

    Args:
        topology: the machine. An emulated one, and a stated order, are not changed.
        placements: placement of every rank, in rank order.

    Raises:
        ValueError: if the ranks do not run on such a machine, naming their hosts.
    """
    if topology.emulated:
        return topology
    if topology.order is None:
        topology = _ordered(topology, _nodes(_hosts(placements), placements), placements)
    _check(topology, placements)
    return topology


def _nodes(hosts: Sequence[Ranks], placements: Sequence[Placement]) -> list[list[Ranks]]:
    """Return the hosts of each node: those of one NVLink domain, or else one host."""
    domains = []
    for ranks in hosts:
        found = {placements[rank].domain for rank in ranks}
        domains.append(found.pop() if len(found) == 1 else "")
    nodes: dict[str, list[Ranks]] = {}
    for domain, ranks in zip(domains, hosts, strict=True):
        nodes.setdefault(domain, []).append(ranks)
    if "" in nodes or len({len(node) for node in nodes.values()}) > 1:
        return [[ranks] for ranks in hosts]
    return list(nodes.values())


def _ordered(
    machine: Topology, nodes: Sequence[Sequence[Ranks]], placements: Sequence[Placement]
) -> Topology:
    """Return the machine with the ranks of its nodes' hosts in order, GPU by GPU."""
    hosts = [host for node in nodes for host in node]
    order = [0] * len(placements)
    position = 0
    for ranks in hosts:
        for package in _packages(ranks, placements):
            for rank in package:
                order[rank] = position
                position += 1
    first_hosts = hosts[:: machine.hosts_per_node]
    names = tuple(placements[ranks[0]].host for ranks in first_hosts)
    named = len({*names}) == len(names) == machine.nodes
    return replace(
        machine,
        order=None if order == sorted(order) else tuple(order),
        hosts=names if named else None,
    )


def _grouped(ranks: Iterable[int], keys: Sequence[Hashable]) -> list[Ranks]:
    """Return groups of the ranks with equal keys, in the order of their first rank."""
    groups: dict[Hashable, Ranks] = {}
    for rank, key in zip(ranks, keys, strict=True):
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _hosts(placements: Sequence[Placement]) -> list[Ranks]:
    """Return the ranks of each host."""
    return _grouped(range(len(placements)), [placement.machine for placement in placements])


def _packages(ranks: Sequence[int], placements: Sequence[Placement]) -> list[Ranks]:
    """Return the ranks of each GPU package of a host.

    Ranks whose package is unknown are taken to use the devices in the order of the ranks.
    """
    keys = [
        placements[rank].package or index // placements[rank].size
        for index, rank in enumerate(ranks)
    ]
    return _grouped(ranks, keys)


def _check_equal(
    groups: Sequence[Ranks], placements: Sequence[Placement], unit: str, way_out: str
) -> None:
    """Check that groups have equal numbers of ranks; the error names the first odd group."""
    usual = Counter(map(len, groups)).most_common(1)[0][0]
    for ranks in groups:
        if len(ranks) == usual:
            continue
        first = placements[ranks[0]]
        where = repr(first.host) if unit == "host" else f"{first.package} of host {first.host!r}"
        raise ValueError(
            f"{unit} {where} has {len(ranks)} of the ranks ({compress(ranks)}) where others have "
            f"{usual}, so the machine has no regular tree; {way_out}"
        )


def _check(topology: Topology, placements: Sequence[Placement]) -> None:
    """Check that ranks share a host, and a GPU if it is known, exactly if they do in the topology.

    Host names are not compared with ``topology.hosts``, because schedulers and hosts do not always
    agree on names.
    """
    world = topology.world_size
    name = topology.name
    ranks = [topology.rank_at(position) for position in range(world)]
    per_host = topology.ranks_per_node // topology.hosts_per_node
    stated = []
    for first in range(0, world, per_host):
        stated.append({placements[rank].machine for rank in ranks[first : first + per_host]})
    hosts = _hosts(placements)
    if len(hosts) != len(stated) or any(len(machines) > 1 for machines in stated):
        found = []
        for own in hosts[:NODES_SHOWN]:
            found.append(f"host {placements[own[0]].host!r} runs ranks {compress(own)}")
        way_out = LEAVE_OUT
        if len(hosts) == 1:
            nodes = {
                "nodes": topology.nodes,
                "gpus_per_node": topology.gpus_per_node,
                "gcds_per_gpu": topology.ranks_per_gpu,
            }
            way_out = f'or pretend the nodes with "topology": {json.dumps({"emulated": nodes})}'
        raise ValueError(
            f"topology {name!r} has {len(stated)} hosts of {per_host} neighbouring ranks each, but "
            f"{', '.join(found)}; start {per_host} ranks on each host, {way_out}"
        )
    if not all(placement.package for placement in placements):
        return
    for first in range(0, world, topology.ranks_per_gpu):
        own = ranks[first : first + topology.ranks_per_gpu]
        packages = sorted({placements[rank].package for rank in own})
        if len(packages) > 1:
            raise ValueError(
                f"topology {name!r} puts ranks {compress(own)} on one GPU, but on host "
                f"{placements[own[0]].host!r} they run on {' and '.join(packages)}; correct its "
                f"ranks_per_gpu or its order, {LEAVE_OUT}"
            )
