# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ranks that do not sit on the hosts and GPUs of the topology are found before training, by the
name of the odd one.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zero_topo.topology import Topology, emulated, load_preset, resolve_topology
from zero_topo.topology.devices import DeviceLink, DeviceTree
from zero_topo.topology.placements import Placement, check_hosts, check_placements, take_placement

NODE = DeviceTree(
    "test",
    4,
    (0, 0, 1, 1),
    {(0, 1): DeviceLink("XGMI", 4), (2, 3): DeviceLink("XGMI", 4)},
    bus_ids=tuple(f"0000:c{device}:00.0" for device in range(4)),
)


def placement(node: int, device: int) -> Placement:
    return Placement(f"n{node}", f"boot{node}", f"0000:c{device}:00.0", device // 2)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_placement_passes_exactly_if_nodes_and_hosts_match(
    nodes: int, per_node: int, data: st.DataObject
) -> None:
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
    ("shape", "hosts", "complaint"),
    [
        (
            (2, 2, 1),
            "aabc",
            "puts ranks 2-3 on node 1, but of these host 'c' runs 3 and host 'b' others",
        ),
        ((2, 2, 1), "abab", "puts ranks 0-1 on node 0, but of these host 'b' runs 1"),
        ((2, 2, 1), "aab", "3 ranks report a host but topology 'test' has 4 ranks"),
        (
            (3, 1, 1),
            "aab",
            "host 'a' runs the ranks 0 and 1, which topology 'test' puts on nodes 0 and 1",
        ),
        ((1, 2, 1), "ab", "host 'b' runs 1"),
    ],
)
def test_the_odd_host_is_named(shape: tuple[int, int, int], hosts: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_hosts(Topology("test", *shape), list(hosts))


def test_many_nodes_on_one_machine_must_be_said_to_be_emulated_and_are_then_not_checked() -> None:
    hosts = ["laptop"] * 16
    with pytest.raises(
        ValueError, match="all 16 ranks run on host 'laptop' but topology 'frontier' has 2 nodes"
    ) as error:
        check_hosts(load_preset("frontier", 16), hosts)
    advice = json.loads(str(error.value).split('"topology": ')[1])
    check_hosts(resolve_topology(advice, {}, 16), hosts)
    check_hosts(emulated(2, 2, 1), list("abca"))


def test_hosts_of_one_name_are_distinguished_by_their_boot() -> None:
    placed = [
        replace(placement(node, device), host="localhost")
        for node in range(2)
        for device in range(4)
    ]
    check_placements(Topology("test", 2, 2, 2), placed)


def test_ranks_on_different_gpus_may_not_be_taken_for_dies_of_one() -> None:
    placed = [placement(0, device) for device in (0, 2, 1, 3)]
    with pytest.raises(
        ValueError,
        match=r"puts ranks 0 and 1 on one GPU, but on host 'n0' they run on 0000:c0:00\.0",
    ):
        check_placements(Topology("test", 1, 2, 2), placed)
    check_placements(Topology("test", 1, 2, 2, order=(0, 2, 1, 3)), placed)
    check_placements(Topology("test", 1, 4, 1), placed)
    check_placements(emulated(1, 2, 2), placed)
    check_placements(Topology("test", 1, 2, 2), [replace(one, package=None) for one in placed])


def test_hosts_are_still_checked() -> None:
    with pytest.raises(ValueError, match="puts ranks 0-3 on node 0, but of these host 'n1' runs"):
        check_placements(
            Topology("test", 2, 2, 2), [placement(rank % 2, rank // 2) for rank in range(8)]
        )


def test_a_placement_is_taken_by_bus_id() -> None:
    taken = take_placement("n0", "00000000:C2:00.0", NODE)
    assert (taken.bus_id, taken.package) == ("0000:c2:00.0", 1)
    assert take_placement("n0", "0000:ff:00.0", NODE).package is None
    assert take_placement("n0", None, None).package is None
