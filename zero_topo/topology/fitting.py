# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Fits a machine to measured times: a link to the times of messages, a tree to the links of pairs.

Note [Levels from pairs]
    1. Sort the pairs' bandwidths. A level of the machine begins wherever neighbours differ by more
       than ``GAP``.
    2. Ranks joined by links faster than the gap, directly or through others, are one unit (single
       linkage). Units are nested by construction; a gap that joins no further ranks is ignored.
    3. Units of a level must be equally large; else the tree is not regular, and the error names the
       odd ranks.
    4. A tree has two levels between rank and world. Where ranks are on several hosts, a host is a
       node, and of the levels inside the hosts the one with the widest gap is the GPU. On one host
       the two widest gaps give both.
    5. If bandwidths give fewer levels than the tree has, latencies may give more. They must differ
       by more than ``LATENCY_GAP``, give regular units, and be shorter for all pairs inside units
       than for all others, because a busy machine delays small messages at random.

Levels that change neither the bandwidth nor the latency of a single pair are not found.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import linear_regression, median

from zero_topo.topology.model import LINKED_DOMAINS, Link, Topology
from zero_topo.topology.render import compress

GAP = 1.4
LATENCY_GAP = 3.0
SHORTEST_S = 1e-7  # fitted values below this are noise
LONG = (
    32  # messages shorter than the longest by more than this factor do not count for the bandwidth
)
WAY_OUT = (
    "measure again if the machine was busy, start equally many ranks on every unit, or describe "
    "the machine: "
    '{"nodes": N, "gpus_per_node": G, "ranks_per_gpu": R}'
)

Pair = tuple[int, int]
Units = tuple[tuple[int, ...], ...]


def fit(samples: Iterable[tuple[float, float]]) -> Link:
    """Fit a link, ``latency + bytes / bandwidth``, to measured times.

    The shortest time of each size counts, because disturbances only make messages slower. The
    bandwidth is the least squares slope over the long messages, the latency the least squares of
    relative errors with that bandwidth.

    Args:
        samples: ``(bytes, seconds)`` of messages of at least two sizes.

    Raises:
        ValueError: for fewer sizes, a time that is not positive, or times that do not grow with the
            size.
    """
    best: dict[float, float] = {}
    for nbytes, seconds in samples:
        if not 0 < seconds < math.inf:
            raise ValueError(
                f"a message of {nbytes:.0f} bytes took {seconds!r} s; times must be positive: fix "
                "the clock"
            )
        best[nbytes] = min(seconds, best.get(nbytes, math.inf))
    if len(best) < 2:
        raise ValueError(
            f"messages of {len(best)} size cannot separate latency from bandwidth; time at least 2 "
            "sizes"
        )
    long = [size for size in best if size * LONG >= max(best)]
    sizes = long if len(long) > 1 else list(best)
    slope = linear_regression(sizes, [best[size] for size in sizes]).slope
    if slope <= 0:
        raise ValueError(
            f"messages of {min(best):.0f} and {max(best):.0f} bytes took {best[min(best)]:.2g} and "
            f"{best[max(best)]:.2g} s: no bandwidth follows from that; time longer messages"
        )
    weights = sum(seconds**-2 for seconds in best.values())
    latency = sum((seconds - size * slope) / seconds**2 for size, seconds in best.items()) / weights
    return Link(1 / slope, max(0.0, latency))


def cluster(pairs: Mapping[Pair, Link], hosts: Sequence[str]) -> Topology:
    """Return the tree that explains the links of pairs, itself without links; see Note [Levels from
    pairs].

    Args:
        pairs: link of each measured pair of ranks. Either all pairs, or all inside each host and
            enough between hosts.
        hosts: host name of each rank, ``[world_size]``.

    Raises:
        ValueError: if units of a level are not equally large, naming the odd ranks and hosts.
    """
    home = _units(len(hosts), [(rank, hosts.index(host)) for rank, host in enumerate(hosts)])
    _check_regular(home, hosts, "hosts")
    hosts_are_nodes = 1 < len(home) < len(hosts)
    found = _levels(len(hosts), {pair: link.bandwidth for pair, link in pairs.items()}, GAP)
    if hosts_are_nodes:
        found = [(units, gap) for units, gap in found if units != home and _finer(units, home)]
    for units, _ in found:
        _check_regular(units, hosts, "bandwidths")
    room = 1 if hosts_are_nodes else 2
    chosen = [units for units, _ in sorted(found, key=lambda level: -level[1])[:room]]
    promptness = {pair: 1 / max(link.latency, SHORTEST_S) for pair, link in pairs.items()}
    for units, _ in sorted(
        _levels(len(hosts), promptness, LATENCY_GAP), key=lambda level: -level[1]
    ):
        bounds = [*chosen, *([home] if hosts_are_nodes else [])]
        inside = not hosts_are_nodes or _finer(units, home)
        if len(chosen) < room and inside and _fits(units, bounds) and _apart(units, promptness):
            chosen.append(units)
    return _tree(_shape(sorted(chosen, key=len, reverse=True), home), home, hosts, len(pairs))


def _shape(inner: list[Units], home: Units) -> tuple[Units, Units]:
    """Return the GPUs and the nodes from the levels found, innermost first."""
    world_size = sum(map(len, home))
    ranks = _units(world_size, [])
    if len(inner) == 2:
        return inner[0], inner[1]
    one = inner[0] if inner else ranks
    return (ranks, one) if home == ranks and world_size > 1 else (one, home)


def _tree(shape: tuple[Units, Units], home: Units, hosts: Sequence[str], pairs: int) -> Topology:
    gpus, nodes = shape
    node_of = {rank: index for index, unit in enumerate(nodes) for rank in unit}
    ranks = [
        rank for unit in sorted(gpus, key=lambda unit: (node_of[unit[0]], unit[0])) for rank in unit
    ]
    order = tuple(ranks.index(rank) for rank in range(len(ranks)))
    measured = f"measured: bandwidth and latency of {pairs} pairs of ranks"
    at_home = nodes == home
    sources = {
        "nodes": "measured: host names"
        if at_home
        else f"{measured}; the outer units are taken for nodes",
        "gpus_per_node": measured,
        "ranks_per_gpu": measured,
        **({} if order == tuple(range(len(order))) else {"order": measured}),
    }
    return Topology(
        name="measured",
        nodes=len(nodes),
        gpus_per_node=len(gpus) // len(nodes),
        ranks_per_gpu=len(gpus[0]),
        order=None if order == tuple(range(len(order))) else order,
        hosts=tuple(hosts[unit[0]] for unit in nodes) if at_home else None,
        emulated=not at_home,  # host names do not identify such nodes
        sources=sources,
    )


def with_links(
    topology: Topology, pairs: Mapping[Pair, Link], shared: Mapping[str, float]
) -> Topology:
    """Return a measured tree with its links.

    Args:
        topology: the result of :func:`cluster`.
        pairs: link of each measured pair; a domain's latency is the median over the pairs of which
            it is the smallest common domain.
        shared: domain -> bytes/s of each rank while all ranks of the domain send.
    """
    met = meeting(topology, pairs)
    links = {
        domain: Link(rate, median(link.latency for link in met[domain]))
        for domain, rate in shared.items()
    }
    known = {
        "links": "measured: bandwidth of each rank with all ranks of the domain talking, latency "
        "of pairs"
    }
    return replace(topology, links=links, sources={**topology.sources, **(known if links else {})})


def meeting(topology: Topology, pairs: Mapping[Pair, Link]) -> dict[str, list[Link]]:
    """Return by domain the links of all pairs whose smallest common domain it is."""
    met: dict[str, list[Link]] = {domain: [] for domain in LINKED_DOMAINS}
    for (left, right), link in pairs.items():
        a = topology.position(left)
        b = topology.position(right)
        met[
            next(
                name
                for name in LINKED_DOMAINS
                if a // topology.degree(name) == b // topology.degree(name)
            )
        ].append(link)
    return met


def _levels(
    world_size: int, values: Mapping[Pair, float], least: float
) -> list[tuple[Units, float]]:
    """Return units, and the factor of the gap around them, of each level between rank and world,
    innermost first.

    ``values`` are larger for closer ranks.
    """
    found: list[tuple[Units, float]] = []
    for better, worse in pairwise(sorted(values.values(), reverse=True)):
        if better <= least * worse:
            continue
        units = _units(world_size, [pair for pair, value in values.items() if value >= better])
        known = found[-1][0] if found else _units(world_size, [])
        if units != known and len(units) > 1:
            found.append((units, better / worse))
    return found


def _units(world_size: int, joined: Iterable[Pair]) -> Units:
    """Return the connected components, sorted."""
    root = list(range(world_size))

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = rank = root[root[rank]]
        return rank

    for left, right in joined:
        low, high = sorted((find(left), find(right)))
        root[high] = low
    members: dict[int, list[int]] = defaultdict(list)
    for rank in range(world_size):
        members[find(rank)].append(rank)
    return tuple(tuple(unit) for unit in sorted(members.values()))


def _finer(units: Units, outer: Units) -> bool:
    """Return whether each unit lies in one of ``outer``."""
    where: Callable[[int], int] = {
        rank: index for index, unit in enumerate(outer) for rank in unit
    }.__getitem__
    return all(len(set(map(where, unit))) == 1 for unit in units)


def _fits(units: Units, others: Sequence[Units]) -> bool:
    """Return whether units are equally large, and nested with others without being equal to
    them.
    """
    nested = all(
        units != other and (_finer(units, other) or _finer(other, units)) for other in others
    )
    return nested and len(set(map(len, units))) == 1


def _apart(units: Units, values: Mapping[Pair, float]) -> bool:
    """Return whether the values of all pairs inside units are larger than all others."""
    where = {rank: index for index, unit in enumerate(units) for rank in unit}
    inside = [value for (left, right), value in values.items() if where[left] == where[right]]
    across = [value for (left, right), value in values.items() if where[left] != where[right]]
    return min(inside) > max(across)


def _check_regular(units: Units, hosts: Sequence[str], what: str) -> None:
    sizes = Counter(map(len, units))
    if len(sizes) == 1:
        return
    usual = max(sizes, key=lambda size: (sizes[size], size))
    odd = [unit for unit in units if len(unit) != usual]
    words = []
    for unit in odd[:4]:
        on_hosts = sorted({hosts[rank] for rank in unit})
        words.append(f"{compress(unit)} on {', '.join(on_hosts)}")
    named = "; ".join(words)
    raise ValueError(
        f"the {what} put most ranks into units of {usual}, but not ranks "
        f"{named}{' ...' if len(odd) > 4 else ''}: that is no regular tree; {WAY_OUT}"
    )
