# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Schedules which ranks exchange messages while a machine is measured: pairs first, then whole
domains.

Note [Sampling]
    Each host has one active pair at a time, so that pairs do not share links. Up to ``ALL_PAIRS``
    ranks, or on one host, every pair is measured. In larger worlds all hosts measure their own
    pairs in parallel. Then the first ranks of hosts at distance 1, 2, 4, ... exchange messages,
    disjoint pairs at once, in a logarithmic number of rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from zero_topo.topology.fitting import Pair
from zero_topo.topology.model import DOMAINS, LINKED_DOMAINS, Topology

ALL_PAIRS = 16


def tournament(members: Sequence[int]) -> list[list[Pair]]:
    """Return rounds of disjoint pairs in which each two members meet once (the circle method)."""
    placements: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    half = len(placements) // 2
    rounds = []
    for _ in range(len(placements) - 1):
        facing = zip(placements[:half], reversed(placements[half:]), strict=True)
        rounds.append(
            [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        )
        placements = [placements[0], placements[-1], *placements[1:-1]]
    return rounds


def pair_rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """Return rounds of disjoint pairs of ranks to measure, see Note [Sampling].

    Args:
        hosts: host name of each rank, ``[world_size]``.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    if len(hosts) <= ALL_PAIRS or len(ranks) == 1:
        return [[pair] for pairs in tournament(range(len(hosts))) for pair in pairs]
    local = [
        [pair for pairs in tournament(members) for pair in pairs] for members in ranks.values()
    ]
    inside = [[pair for pair in pairs if pair is not None] for pairs in zip_longest(*local)]
    return [*inside, *_between([members[0] for members in ranks.values()])]


def _between(firsts: Sequence[int]) -> list[list[Pair]]:
    rounds = []
    distance = 1
    while distance < len(firsts):
        starts = [i for i in range(len(firsts) - distance) if i // distance % 2 == 0]
        rounds.append([(firsts[i], firsts[i + distance]) for i in starts])
        distance *= 2
    return rounds


def shared_domains(topology: Topology) -> list[str]:
    """The domains over which smaller ones reach each other, smallest first."""
    return [
        domain
        for domain in LINKED_DOMAINS
        if topology.degree(domain) > inner_degree(topology, domain)
    ]


def inner_degree(topology: Topology, domain: str) -> int:
    """Return the ranks of the next smaller domain."""
    return topology.degree(DOMAINS[DOMAINS.index(domain) - 1])


def neighbours(topology: Topology, domain: str, rank: int) -> tuple[int, int]:
    """Return the ranks to which a rank sends, and from which it receives, while all ranks of its
    domain send.

    They are its counterparts in the neighbouring units in the ring of the domain's units, so that
    all messages cross the links of the domain.
    """
    degree = topology.degree(domain)
    step = inner_degree(topology, domain)
    unit, place = divmod(topology.position(rank), degree)
    ahead, behind = (unit * degree + (place + way) % degree for way in (step, -step))
    return topology.rank_at(ahead), topology.rank_at(behind)


def turns(topology: Topology, domain: str, hosts: Sequence[str]) -> list[list[int]]:
    """Return in turns the units of a domain, in tree order, that exchange at the same time: one per
    host and turn.
    """
    degree = topology.degree(domain)
    on_host: dict[str, list[int]] = {}
    for unit in range(topology.world_size // degree):
        on_host.setdefault(hosts[topology.rank_at(unit * degree)], []).append(unit)
    return [
        [unit for unit in units if unit is not None] for units in zip_longest(*on_host.values())
    ]
