# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A topology is a regular tree with a placement: its arithmetic, its checks, its JSON and its
picture.
"""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tests.steps import shape
from zero_topo.topology.model import DOMAINS, Link, Topology
from zero_topo.topology.render import render_tree
from zero_topo.units import GB

SIZES = st.integers(1, 4)
LINKS = st.builds(Link, st.floats(1, 1e15), st.floats(0, 1e3))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any small topology, with any permutation as its order."""
    nodes, gpus, dies = draw(st.tuples(SIZES, SIZES, SIZES))
    hosts = st.lists(st.text("abc019-", min_size=1), min_size=nodes, max_size=nodes, unique=True)
    return Topology(
        name=draw(st.text(min_size=1)),
        nodes=nodes,
        gpus_per_node=gpus,
        ranks_per_gpu=dies,
        order=draw(st.none() | st.permutations(range(nodes * gpus * dies)).map(tuple)),
        links=draw(st.dictionaries(st.sampled_from(DOMAINS[1:]), LINKS)),
        memory_per_rank=draw(st.none() | st.integers(1, 2**48)),
        hosts=draw(st.none() | hosts.map(tuple)),
        emulated=draw(st.booleans()),
        sources=draw(st.dictionaries(st.text(), st.text(), max_size=3)),
    )


@given(topologies(), st.data())
def test_a_degree_belongs_to_the_smallest_domain_that_its_blocks_never_leave(
    topology: Topology, data: st.DataObject
) -> None:
    degree = data.draw(
        st.sampled_from(
            [d for d in range(1, topology.world_size + 1) if topology.world_size % d == 0]
        )
    )

    def holds(domain: str) -> bool:
        size = topology.degree(domain)
        blocks = range(0, topology.world_size, degree)
        return all(first // size == (first + degree - 1) // size for first in blocks)

    assert topology.domain(degree) == next(domain for domain in DOMAINS if holds(domain))


@given(topologies())
def test_json_round_trip(topology: Topology) -> None:
    assert Topology.from_json(json.loads(json.dumps(topology.to_json()))) == topology


def test_the_picture_draws_equal_branches_once() -> None:
    topology = Topology(
        "test",
        2,
        4,
        2,
        links={"gpu": Link(200 * GB, 0), "world": Link(12.5 * GB, 14e-6)},
        memory_per_rank=64 * GB,
        sources={"nodes": "here"},
    )
    assert render_tree(topology).splitlines() == [
        "test: 16 ranks",
        "world              16 ranks  12.50 GB/s per rank, 14.0 us",
        "`- 2 x node        8 ranks",
        "   `- 4 x gpu      2 ranks  200.00 GB/s per rank, 0 s",
        "      `- 2 x rank  64.00 GB",
        "  nodes <- here",
    ]


def test_a_group_may_leave_out_gpus_between_its_own() -> None:
    cut = Topology("test", 3, 4, 2).among(range(0, 24, 4))
    assert shape(cut) == (3, 2, 1) and cut.order is None


@given(topologies(), st.data())
def test_ranks_of_a_group_keep_their_order_in_the_tree_and_their_units(
    topology: Topology, data: st.DataObject
) -> None:
    """Whatever the placement, two ranks share a GPU or node in the cut tree exactly if they do in
    the machine.
    """
    counts, firsts = [], []
    for size in (topology.nodes, topology.gpus_per_node, topology.ranks_per_gpu):
        firsts.append(data.draw(st.integers(0, size - 1)))
        counts.append(data.draw(st.integers(1, size - firsts[-1])))
    ranks = []
    for rank in range(topology.world_size):
        places = zip(topology.coordinates(rank), firsts, counts, strict=True)
        if all(0 <= place - first < count for place, first, count in places):
            ranks.append(rank)
    ranks = data.draw(st.permutations(ranks))
    cut = topology.among(ranks)
    assert [*shape(cut)] == counts
    for index, rank in enumerate(ranks):
        moved = zip(topology.coordinates(rank), firsts, strict=True)
        assert cut.coordinates(index) == tuple(place - first for place, first in moved)
    if topology.hosts is not None:
        assert cut.hosts == topology.hosts[firsts[0] : firsts[0] + counts[0]]
    assert (cut.links, cut.emulated) == (topology.links, topology.emulated)
