# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ranks that do not sit where the topology says are found before training, by the name of the odd host."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zero_topo.topology import Topology, check_hosts, emulated, load_preset, resolve_topology

TWO_BY_TWO = Topology("test", 2, 2, 1)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_placement_passes_exactly_if_nodes_and_hosts_match(nodes: int, per_node: int, data: st.DataObject) -> None:
    world = nodes * per_node
    order = tuple(data.draw(st.permutations(range(world))))
    topology = Topology("test", nodes, per_node, 1, order=order)
    right = [f"host{position // per_node}" for position in order]
    check_hosts(topology, right)
    wrong = data.draw(st.lists(st.sampled_from([*right, "stray"]), min_size=world, max_size=world))
    pairs = [(a, b) for a in range(world) for b in range(a)]
    assume(any((wrong[a] == wrong[b]) != (right[a] == right[b]) for a, b in pairs))
    with pytest.raises(ValueError):
        check_hosts(topology, wrong)


@pytest.mark.parametrize(
    ("hosts", "complaint"),
    [
        (["a", "a", "b", "c"], "puts ranks 2-3 on node 1, but of these host 'c' runs 3 and host 'b' others"),
        (["a", "b", "a", "b"], "puts ranks 0-1 on node 0, but of these host 'b' runs 1"),
        (["a", "a", "b"], "3 ranks report a host but topology 'test' has 4 ranks"),
    ],
)
def test_the_odd_host_is_named(hosts: list[str], complaint: str) -> None:
    with pytest.raises(ValueError) as error:
        check_hosts(TWO_BY_TWO, hosts)
    assert complaint in str(error.value)


def test_one_host_for_several_nodes_among_others_is_named() -> None:
    with pytest.raises(
        ValueError, match="host 'a' runs the ranks 0 and 1, which topology 'test' puts on nodes 0 and 1"
    ):
        check_hosts(Topology("test", 3, 1, 1), ["a", "a", "b"])


def test_many_nodes_on_one_machine_must_be_said_to_be_emulated() -> None:
    topology = load_preset("frontier", 16)
    with pytest.raises(
        ValueError, match="all 16 ranks run on host 'laptop' but topology 'frontier' has 2 nodes"
    ) as error:
        check_hosts(topology, ["laptop"] * 16)
    advice = json.loads(str(error.value).split('"topology": ')[1])
    check_hosts(resolve_topology(advice, {}, 16), ["laptop"] * 16)


def test_emulated_hosts_are_not_checked() -> None:
    check_hosts(emulated(2, 2, 1), ["a", "b", "c", "a"])


def test_one_node_passes_on_one_host_only() -> None:
    check_hosts(Topology("test", 1, 2, 1), ["a", "a"])
    with pytest.raises(ValueError, match="host 'b' runs 1"):
        check_hosts(Topology("test", 1, 2, 1), ["a", "b"])
