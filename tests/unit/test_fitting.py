# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A machine is recovered from noisy times of its pairs: links, levels and placement; what is
irregular is named.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.steps import shape
from zero_topo.topology.fitting import Pair, cluster, fit, meeting, with_links
from zero_topo.topology.model import Link, Topology
from zero_topo.topology.schedule import (
    ALL_PAIRS,
    neighbours,
    pair_rounds,
    shared_domains,
    tournament,
    turns,
)
from zero_topo.units import GB, MB

NOISE = 0.1
MICROSECOND = 1e-6


@dataclass(frozen=True)
class Tree:
    """A machine as it truly is: units at each level, bytes/s of a pair that meets there, and the
    place of each rank.
    """

    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    latencies: tuple[float, ...]
    places: tuple[int, ...]

    def level(self, left: int, right: int) -> int:
        """The level, from the innermost, at which two ranks meet."""
        degree = 1
        for level, size in enumerate(self.sizes):
            degree *= size
            if self.places[left] // degree == self.places[right] // degree:
                return level
        raise AssertionError("the last level holds all")

    def pairs(self, noise: float, seed: int) -> dict[Pair, Link]:
        """What one measures of it."""
        source = random.Random(seed)
        links = {}
        for pair in combinations(range(len(self.places)), 2):
            level = self.level(*pair)
            true = self.rates[level], self.latencies[level]
            links[pair] = Link(*(value * source.uniform(1 - noise, 1 + noise) for value in true))
        return links


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Trees of one to three levels whose bandwidths differ by 1.8 or more, with ranks anywhere."""
    sizes = tuple(draw(st.lists(st.integers(2, 4), min_size=1, max_size=3)))
    world = 1
    for size in sizes:
        world *= size
    rate, rates = draw(st.floats(10 * MB, 900 * GB)), []
    for _ in sizes:
        rates.append(rate)
        rate /= draw(st.floats(1.8, 20))
    latencies = tuple(draw(st.floats(MICROSECOND, 100 * MICROSECOND)) for _ in sizes[:1]) * len(
        sizes
    )
    return Tree(sizes, tuple(rates), latencies, tuple(draw(st.permutations(range(world)))))


def same_units(topology: Topology, tree: Tree, domain: str, level: int) -> bool:
    """Whether the domain's units are those of the tree's level."""
    degree = topology.degree(domain)
    return all(
        (topology.position(a) // degree == topology.position(b) // degree)
        == (tree.level(a, b) <= level)
        for a, b in combinations(range(topology.world_size), 2)
    )


@given(trees(), st.integers(0, 1 << 30))
def test_random_trees_are_recovered_on_one_host(tree: Tree, seed: int) -> None:
    """One, two or three levels, whatever the placement, with every measurement off by up to 10%."""
    found = cluster(tree.pairs(NOISE, seed), ["here"] * len(tree.places))
    a, b, c = (*tree.sizes, 1, 1)[:3]
    expected = {1: (1, a, 1), 2: (1, b, a), 3: (c, b, a)}[len(tree.sizes)]
    assert shape(found) == expected
    if len(tree.sizes) > 1:
        assert same_units(found, tree, "gpu", 0)
    if len(tree.sizes) > 2:
        assert same_units(found, tree, "node", 1)
    assert found.emulated == (len(tree.sizes) > 2)
    assert Topology.from_json(found.to_json()) == found


@given(trees(), st.integers(0, 1 << 30))
def test_hosts_are_the_nodes_where_there_are_several(tree: Tree, seed: int) -> None:
    """The outermost units are hosts: they are the nodes, and the widest gap inside them gives the
    GPUs.
    """
    if len(tree.sizes) < 2:
        return
    degree = len(tree.places) // tree.sizes[-1]
    hosts = [f"host{place // degree}" for place in tree.places]
    sampled = {pair for pairs in pair_rounds(hosts) for pair in pairs}
    pairs = {pair: link for pair, link in tree.pairs(NOISE, seed).items() if pair in sampled}
    found = cluster(pairs, hosts)
    assert found.nodes == tree.sizes[-1] and same_units(found, tree, "node", len(tree.sizes) - 2)
    assert found.hosts is not None and not found.emulated
    assert [hosts[found.node_ranks(node)[0]] for node in range(found.nodes)] == list(found.hosts)
    if len(tree.sizes) == 3:
        assert found.ranks_per_gpu == tree.sizes[0] and same_units(found, tree, "gpu", 0)


def test_hosts_of_one_rank_are_nodes() -> None:
    """Without faster groups every rank is a node; a single one is a machine too."""
    found = cluster({pair: Link(1e9, 1e-5) for pair in combinations(range(4), 2)}, list("abcd"))
    assert shape(found) == (4, 1, 1)
    assert found.hosts == tuple("abcd") and shared_domains(found) == ["world"]
    assert cluster({}, ["here"]).world_size == 1


def test_latency_tells_levels_that_bandwidth_does_not() -> None:
    """Equal rates, but a quarter of the latency inside pairs; and not if one pair across is as
    prompt.
    """
    tree = Tree((2, 2), (1e9, 1e9), (5e-6, 20e-6), (0, 2, 1, 3))
    pairs = tree.pairs(NOISE, 0)
    found = cluster(pairs, ["here"] * 4)
    assert shape(found) == (1, 2, 2)
    assert found.order == (0, 2, 1, 3)
    flat = cluster({**pairs, (0, 1): Link(1e9, 5e-6)}, ["here"] * 4)
    assert shape(flat) == (1, 4, 1)


def test_four_levels_keep_the_widest_gaps() -> None:
    """Packages joined at 200, quads at 100, eights at 20, world at 10: gpu is what is below the gap
    of 5.
    """
    tree = Tree((2, 2, 2, 2), (200e9, 100e9, 20e9, 4e9), (1e-6,) * 4, tuple(range(16)))
    found = cluster(tree.pairs(0, 0), ["here"] * 16)
    assert shape(found) == (2, 2, 4)


@pytest.mark.parametrize(
    ("hosts", "slow", "complaint"),
    [
        ("aaab", (), "the hosts put most ranks into units of 3, but not ranks 3 on b"),
        (
            "aaaa",
            ((0, 3), (1, 3), (2, 3)),
            "the bandwidths put most ranks into units of 3, but not ranks 3 on a",
        ),
    ],
)
def test_irregular_machines_are_refused_by_name(
    hosts: str, slow: Sequence[Pair], complaint: str
) -> None:
    pairs = {pair: Link(1e9 if pair in slow else 9e9, 1e-5) for pair in combinations(range(4), 2)}
    with pytest.raises(ValueError, match=complaint):
        cluster(pairs, list(hosts))


@given(st.floats(MICROSECOND, 1e-3), st.floats(10 * MB, 500 * GB), st.integers(0, 1 << 30))
def test_links_are_fitted_through_noise(latency: float, bandwidth: float, seed: int) -> None:
    """Times up to 10% too long, three of each size: bandwidth and the shortest message's time come
    back within 15%.
    """
    source = random.Random(seed)
    sizes = [8, *(int(bandwidth * latency * factor) for factor in (16, 64, 256))]
    times = [
        (n, (latency + n / bandwidth) * source.uniform(1, 1 + NOISE))
        for n in sizes
        for _ in range(3)
    ]
    link = fit(times)
    assert link.bandwidth == pytest.approx(bandwidth, rel=0.15)
    assert link.latency == pytest.approx(latency, abs=0.15 * (latency + sizes[0] / bandwidth))


@pytest.mark.parametrize(
    ("samples", "complaint"),
    [
        ([(8, 1.0), (8, 2.0)], "messages of 1 size cannot separate"),
        ([(8, 1.0), (16, 0.0)], "16 bytes took 0.0 s"),
        ([(8, 1.0), (16, 0.5)], "no bandwidth follows"),
    ],
)
def test_times_without_sense_are_refused(
    samples: list[tuple[float, float]], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        fit(samples)


@given(st.integers(2, 17))
def test_a_tournament_lets_everyone_meet_once(size: int) -> None:
    """Every pair in one round, nobody twice in a round."""
    rounds = tournament(range(size))
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(size), 2))
    for pairs in rounds:
        busy = [rank for pair in pairs for rank in pair]
        assert len(set(busy)) == len(busy)


@given(st.integers(1, 9), st.integers(1, 5))
def test_pairs_of_large_worlds_are_sampled_without_sharing_links(hosts: int, per_host: int) -> None:
    """All pairs inside hosts, all hosts joined, at most one pair of each host at a time, few
    rounds.
    """
    names = [f"host{rank % hosts}" for rank in range(hosts * per_host)]
    rounds = pair_rounds(names)
    pairs = {pair for each in rounds for pair in each}
    if len(names) <= ALL_PAIRS or hosts == 1:
        assert pairs == set(combinations(range(len(names)), 2))
        assert all(len(each) == 1 for each in rounds)
        return
    assert {
        pair for pair in combinations(range(len(names)), 2) if names[pair[0]] == names[pair[1]]
    } <= pairs
    for each in rounds:
        used = [host for pair in each for host in {names[rank] for rank in pair}]
        assert len(set(used)) == len(used)
    assert len(rounds) <= per_host * (per_host - 1) // 2 + 4
    assert cluster({pair: Link(1e9, 1e-5) for pair in pairs}, names).nodes == hosts


def test_domains_talk_over_their_own_links() -> None:
    """Counterparts sit in the neighbouring units; what one sends to the other the other expects."""
    topology = Topology("test", 2, 3, 2, order=tuple(reversed(range(12))))
    assert shared_domains(topology) == ["gpu", "node", "world"]
    for domain, inner in (("gpu", 1), ("node", 2), ("world", 6)):
        degree = topology.degree(domain)
        for rank in range(12):
            to, source = neighbours(topology, domain, rank)
            assert (
                neighbours(topology, domain, to)[1] == rank
                and neighbours(topology, domain, source)[0] == rank
            )
            here, there = topology.position(rank), topology.position(to)
            assert here // degree == there // degree and here // inner != there // inner
    assert turns(topology, "node", ["a"] * 12) == [[0], [1]]
    assert turns(topology, "node", ["a"] * 6 + ["b"] * 6) == [[0, 1]]
    assert turns(topology, "gpu", ["a"] * 6 + ["b"] * 6) == [[0, 3], [1, 4], [2, 5]]


def test_links_carry_shared_rates_and_the_latency_of_pairs() -> None:
    tree = Tree((2, 2, 2), (4e9, 2e9, 1e9), (1e-6, 2e-6, 4e-6), tuple(range(8)))
    pairs = tree.pairs(0, 0)
    topology = cluster(pairs, ["here"] * 8)
    met = {domain: len(links) for domain, links in meeting(topology, pairs).items()}
    assert met == {"gpu": 4, "node": 8, "world": 16}
    linked = with_links(topology, pairs, {"gpu": 4e9, "node": 1e9, "world": 0.25e9})
    assert linked.links["world"] == Link(0.25e9, 4e-6) and linked.sources["links"].startswith(
        "measured"
    )
