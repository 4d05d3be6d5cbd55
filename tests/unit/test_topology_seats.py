# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ranks that do not sit on the hosts and GPUs of the topology are found, by name, before training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_topo.topology import Topology, emulated
from zero_topo.topology.devices import DeviceLink, DeviceTree
from zero_topo.topology.seats import Seat, check_seats, take_seat

NODE = DeviceTree(
    "test",
    4,
    (0, 0, 1, 1),
    {(0, 1): DeviceLink("XGMI", 4), (2, 3): DeviceLink("XGMI", 4)},
    bus_ids=tuple(f"0000:c{device}:00.0" for device in range(4)),
)


def seat(node: int, device: int) -> Seat:
    return Seat(f"n{node}", f"boot{node}", f"0000:c{device}:00.0", device // 2)


def seats(nodes: int = 2) -> list[Seat]:
    return [seat(node, device) for node in range(nodes) for device in range(4)]


def test_hosts_of_one_name_are_told_apart_by_their_boot() -> None:
    placed = [replace(one, host="localhost") for one in seats()]
    check_seats(Topology("test", 2, 2, 2), placed)


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


def test_a_seat_is_taken_by_bus_id() -> None:
    taken = take_seat("n0", "00000000:C2:00.0", NODE)
    assert (taken.bus_id, taken.package) == ("0000:c2:00.0", 1)
    assert take_seat("n0", "0000:ff:00.0", NODE).package is None
    assert take_seat("n0", None, None).package is None
