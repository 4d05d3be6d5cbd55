# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""All ranks' own view makes the tree, or one error that names the odd host."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_topo.plan import Plan
from zero_topo.topology import Topology, emulated
from zero_topo.topology.devices import DeviceLink, DeviceTree
from zero_topo.topology.seats import Seat, agree, check_seats, take_seat

NODE = DeviceTree(
    "test",
    4,
    (0, 0, 1, 1),
    {(0, 1): DeviceLink("XGMI", 4), (2, 3): DeviceLink("XGMI", 4)},
    numa=(1, 1, 0, 0),
    bus_ids=tuple(f"0000:c{device}:00.0" for device in range(4)),
)


def seat(node: int, device: int) -> Seat:
    return Seat(f"n{node}", f"boot{node}", device, f"0000:c{device}:00.0", device // 2, 1 - device // 2, (4, 2))


def seats(nodes: int = 2) -> list[Seat]:
    return [seat(node, device) for node in range(nodes) for device in range(4)]


@given(st.permutations(seats(3)))
def test_the_tree_groups_the_ranks_that_share_hosts_and_packages(placed: list[Seat]) -> None:
    found = agree(placed)
    assert (found.nodes, found.gpus_per_node, found.ranks_per_gpu) == (3, 2, 2)
    topology = Topology("test", 3, 2, 2, order=found.order, hosts=found.hosts)
    plan = Plan.build(topology, ("gpu", None, "node", "world"))
    for degree, unit in ((2, lambda s: (s.host, s.package)), (4, lambda s: s.host)):
        for group in plan.groups(1, degree):
            assert len({unit(placed[rank]) for rank in group}) == 1
    assert [placed[rank].host for rank in (topology.node_ranks(node)[0] for node in range(3))] == list(found.hosts)
    check_seats(topology, placed)


def test_ranks_in_tree_order_need_no_order() -> None:
    assert agree(seats()).order is None


def test_unknown_packages_make_every_rank_a_gpu() -> None:
    found = agree([replace(one, package=None, devices=None) for one in seats()])
    assert (found.nodes, found.gpus_per_node, found.ranks_per_gpu) == (2, 4, 1)


def test_hosts_of_one_name_are_told_apart_by_their_boot() -> None:
    placed = [replace(one, host="localhost") for one in seats()]
    assert agree(placed).nodes == 2
    check_seats(Topology("test", 2, 2, 2), placed)


def odd(rank: int, **changes: object) -> list[Seat]:
    placed = seats(3)
    placed[rank] = replace(placed[rank], **changes)  # type: ignore[arg-type]
    return placed


@pytest.mark.parametrize(
    ("placed", "complaint"),
    [
        (seats(3)[:-1], "host 'n2' runs 3 ranks but others 4 (ranks 8-10)"),
        (odd(4, devices=(3, 2)), "host 'n1' sees the devices and packages (3, 2) but others (4, 2)"),
        (odd(5, bus_id="0000:c0:00.0"), "host 'n1': ranks 4 and 5 both run on device 0000:c0:00.0"),
        (odd(11, package=9), "host 'n2' has 1 ranks on the GPU of rank 10"),
        (odd(6, package=None), "host 'n1': the GPU of rank 6 (0000:c2:00.0) is not among the devices"),
        ([], "no rank reports where it runs"),
    ],
)
def test_the_odd_host_is_named(placed: list[Seat], complaint: str) -> None:
    with pytest.raises(ValueError) as error:
        agree(placed)
    assert complaint in str(error.value)


def test_every_rank_of_a_permuted_world_gets_the_same_error() -> None:
    with pytest.raises(ValueError) as first:
        agree(odd(11, package=9))
    with pytest.raises(ValueError) as second:
        agree([Seat.from_json(json.loads(json.dumps(one.to_json()))) for one in odd(11, package=9)])
    assert str(first.value) == str(second.value)


def test_ranks_on_different_gpus_may_not_be_taken_for_dies_of_one() -> None:
    placed = [seat(0, device) for device in (0, 2, 1, 3)]
    with pytest.raises(ValueError, match=r"puts ranks 0 and 1 on one GPU, but on host 'n0' they run on 0000:c0:00\.0"):
        check_seats(Topology("test", 1, 2, 2), placed)
    check_seats(Topology("test", 1, 2, 2, order=(0, 2, 1, 3)), placed)
    check_seats(Topology("test", 1, 4, 1), placed)
    check_seats(emulated(1, 2, 2), placed)
    check_seats(Topology("test", 1, 2, 2), [replace(one, package=None) for one in placed])


def test_hosts_are_still_checked() -> None:
    with pytest.raises(ValueError, match="puts ranks 0-3 on node 0, but of these host 'n1' runs"):
        check_seats(Topology("test", 2, 2, 2), [seat(rank % 2, rank // 2) for rank in range(8)])


def test_a_seat_is_taken_by_bus_id_and_survives_json() -> None:
    taken = take_seat("n0", 3, "00000000:C2:00.0", NODE)
    assert (taken.bus_id, taken.package, taken.numa, taken.devices) == ("0000:c2:00.0", 1, 0, (4, 2))
    assert Seat.from_json(json.loads(json.dumps(taken.to_json()))) == taken
    assert take_seat("n0", 3, "0000:ff:00.0", NODE).package is None
    assert take_seat("n0", None, None, None).devices is None
    with pytest.raises(ValueError, match="unknown key 'bus'; did you mean 'bus_id'"):
        Seat.from_json({"host": "a", "bus": "x"})
