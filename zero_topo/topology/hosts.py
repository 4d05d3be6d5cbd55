# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The check at start-up that the ranks really sit where the topology says (pure: the caller gathers the names)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zero_topo.topology.model import Topology
from zero_topo.topology.render import compress


def check_hosts(topology: Topology, hosts_by_rank: Sequence[str]) -> None:
    """Check that two ranks share a host exactly if the topology puts them on one node.

    The names only have to tell hosts apart (a host name or a boot id); they are not compared with ``topology.hosts``,
    because schedulers and hosts do not always agree on names. An emulated topology is not checked.

    Args:
        topology: what the configuration or the launcher said.
        hosts_by_rank: the host name each rank sees, ``[world_size]``, in rank order.

    Raises:
        ValueError: naming the odd host, and the way out.
    """
    if len(hosts_by_rank) != topology.world_size:
        raise ValueError(
            f"{len(hosts_by_rank)} ranks report a host but topology {topology.name!r} has {topology.world_size} ranks; "
            "start as many ranks as the topology has"
        )
    if topology.emulated:
        return
    if topology.nodes > 1 and len(set(hosts_by_rank)) == 1:
        raise ValueError(
            f"all {topology.world_size} ranks run on host {hosts_by_rank[0]!r} but topology {topology.name!r} has "
            f"{topology.nodes} nodes; start the ranks on {topology.nodes} hosts, or pretend them with "
            f'"topology": {_emulation(topology)}'
        )
    home: dict[str, int] = {}
    for node in range(topology.nodes):
        ranks = topology.node_ranks(node)
        host = _check_one_host(topology, node, [(rank, hosts_by_rank[rank]) for rank in ranks])
        if host in home:
            raise ValueError(
                f"host {host!r} runs the ranks {compress(topology.node_ranks(home[host]))} and {compress(ranks)}, "
                f"which topology {topology.name!r} puts on nodes {home[host]} and {node}; {_way_out(topology)}"
            )
        home[host] = node


def _check_one_host(topology: Topology, node: int, placed: Sequence[tuple[int, str]]) -> str:
    """The host of a node, from the ``(rank, host)`` pairs of its ranks.

    Raises:
        ValueError: if its ranks are on several hosts.
    """
    (host, _), *others = Counter(name for _, name in placed).most_common()
    if others:
        odd = others[-1][0]
        strays = [rank for rank, name in placed if name == odd]
        raise ValueError(
            f"topology {topology.name!r} puts ranks {compress([rank for rank, _ in placed])} on node {node}, but of "
            f"these host {odd!r} runs {compress(strays)} and host {host!r} others; {_way_out(topology)}"
        )
    return host


def _way_out(topology: Topology) -> str:
    return (
        f"start {topology.ranks_per_node} ranks on each host in the placement the topology states (block unless it has "
        'an "order"), or describe the real placement with an "order" in the topology\'s JSON'
    )


def _emulation(topology: Topology) -> str:
    return (
        f'{{"emulated": {{"nodes": {topology.nodes}, "gpus_per_node": {topology.gpus_per_node}, '
        f'"gcds_per_gpu": {topology.ranks_per_gpu}}}}}'
    )
