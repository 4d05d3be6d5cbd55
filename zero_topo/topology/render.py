# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Renders a topology as plain text, one line per level of the tree."""

from __future__ import annotations

from collections.abc import Sequence

from zero_topo.topology.model import Topology
from zero_topo.units import format_bytes, format_seconds

NODES_SHOWN = 4
"""Nodes listed by name and ranks; one line summarizes the others."""


def render_tree(topology: Topology) -> str:
    """Render the tree with its links, the nodes with named hosts or unusual ranks, and the sources
    of all fields.

    A regular tree has equal branches on every level, so each level is one line with their number::

        frontier: 16 ranks
        world         16 ranks  12.50 GB/s per rank, 14.0 us
        `- 2 x node    8 ranks  50.00 GB/s per rank, 3.4 us
           `- 4 x gpu  2 ranks  200.00 GB/s per rank, 3.4 us
              `- 2 x rank  64.00 GB
    """
    lines = [
        f"{topology.name}: "
        f"{_count(topology.world_size, 'rank')}{' (emulated)' if topology.emulated else ''}"
    ]
    lines += _levels(topology)
    lines += _nodes(topology)
    lines += [f"  {key} <- {source}" for key, source in topology.sources.items()]
    return "\n".join(lines)


def _levels(topology: Topology) -> list[str]:
    counts = {
        "world": 1,
        "node": topology.nodes,
        "gpu": topology.gpus_per_node,
        "rank": topology.ranks_per_gpu,
    }
    heads = []
    for depth, (domain, count) in enumerate(counts.items()):
        heads.append(domain if depth == 0 else f"{'   ' * (depth - 1)}`- {count} x {domain}")
    width = max(len(head) for head in heads)
    lines = []
    for head, domain in zip(heads, counts, strict=True):
        degree = _count(topology.degree(domain), "rank") if domain != "rank" else ""
        facts = [fact for fact in (degree, _link(topology, domain)) if fact]
        if domain == "rank" and topology.memory_per_rank is not None:
            facts.append(format_bytes(topology.memory_per_rank))
        lines.append(f"{head:<{width}}  {'  '.join(facts)}".rstrip())
    return lines


def _link(topology: Topology, domain: str) -> str:
    link = topology.links.get(domain)
    if link is None:
        return ""
    return f"{format_bytes(link.bandwidth)}/s per rank, {format_seconds(link.latency)}"


def _nodes(topology: Topology) -> list[str]:
    """Return hosts and ranks of the first nodes; nothing for unnamed nodes in block order."""
    if topology.hosts is None and topology.order is None:
        return []
    lines = []
    for node in range(min(topology.nodes, NODES_SHOWN)):
        host = f" ({topology.hosts[node]})" if topology.hosts else ""
        lines.append(f"  node {node}{host}: ranks {compress(topology.node_ranks(node))}")
    if topology.nodes > NODES_SHOWN:
        last = f", the last is {topology.hosts[-1]}" if topology.hosts else ""
        lines.append(f"  ... and {_count(topology.nodes - NODES_SHOWN, 'node')} more{last}")
    return lines


def compress(numbers: Sequence[int]) -> str:
    """Write distinct numbers with their equal steps folded: ``[0, 1, 2, 3, 8, 10, 12]`` ->
    ``"0-3,8-12:2"``.

    The order is kept: a run goes up or down in steps of one size and has three numbers at least, or
    two if the step is one.
    """
    parts = []
    start = 0
    while start < len(numbers):
        stop = start + 1
        step = numbers[stop] - numbers[start] if stop < len(numbers) else 0
        while stop < len(numbers) and numbers[stop] - numbers[stop - 1] == step:
            stop += 1
        if stop - start < 3 and step != 1:
            stop = start + 1
        first = numbers[start]
        last = numbers[stop - 1]
        suffix = "" if step == 1 else f":{step}"
        parts.append(str(first) if stop - start == 1 else f"{first}-{last}{suffix}")
        start = stop
    return ",".join(parts)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
