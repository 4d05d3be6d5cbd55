# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""From the host, device name and PCI address of each rank to one tree, on every machine that is
known, in any order of ranks; and what cannot be a tree, in one line.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.data import table
from tests.steps import shape
from zero_topo.topology import Topology, emulated, load_preset, resolve_topology
from zero_topo.topology.devices import (
    devices_of_package,
    nvlink_domain,
    package_of,
    same_model,
)
from zero_topo.topology.placements import Placement, found_tree, placed

DATA = table("machines")
"""``devices`` with the PCI buses of a host, as amd-smi and nvidia-smi write them without the
function, which numbers partitions; and ``machines``: hosts and how many of each there are, with
all devices or those ``used``, and the tree or the complaint.
"""
MACHINES = DATA["machines"]


def placements_of(name: str) -> list[Placement]:
    """Of the ranks of a machine, one on each device."""
    machine, found = MACHINES[name], []
    for number, host in enumerate(machine["hosts"] * machine.get("times", 1)):
        device = DATA["devices"][host["device"]]
        size = devices_of_package(device["name"], {})
        addresses = {bus: bus and f"0000:{bus}:00" for bus in device["buses"]}
        for bus in host.get("used", device["buses"]):
            package = package_of(addresses[bus], size, [*addresses.values()])
            domain = host.get("domain", "")
            found.append(Placement(f"n{number}", f"n{number}", package, size, domain))
    return found


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_found_from_its_hosts_and_devices(name: str) -> None:
    """An NVLink domain is a node, unless racks are there in unequal parts. An irregular machine is
    refused with the odd part and the way out.
    """
    placements, machine = placements_of(name), MACHINES[name]
    if "complaint" in machine:
        with pytest.raises(ValueError, match=re.escape(machine["complaint"])) as caught:
            resolve_topology("auto", len(placements), placements)
        advised = '"topology" is a preset, a JSON file' in str(caught.value)
        assert ("GPU" in machine["complaint"]) == advised and "\n" not in str(caught.value)
        return
    found = found_tree(placements)
    assert shape(found) == tuple(machine["tree"])
    assert found.hosts_per_node == machine.get("hosts_per_node", 1)
    for node in range(found.nodes):
        assert len({placements[rank].domain for rank in found.node_ranks(node)}) == 1


WITH_ADDRESSES = ["frontier", "MI300X in CPX", "MI300A in TPX", "DGX H100", "MIG"]


@given(st.data(), st.sampled_from(WITH_ADDRESSES))
def test_any_order_of_ranks_gives_the_same_tree(data: st.DataObject, name: str) -> None:
    """Ranks share a host and a GPU in the tree exactly if they do on the machine; a stated machine
    gets the same order.
    """
    placements = data.draw(st.permutations(placements_of(name)))
    found = found_tree(placements)
    assert [*shape(found)] == MACHINES[name]["tree"]
    for a, one in enumerate(placements):
        for b in range(a):
            other = placements[b]
            (node_a, gpu_a, _), (node_b, gpu_b, _) = found.coordinates(a), found.coordinates(b)
            assert (node_a == node_b) == (one.machine == other.machine)
            if one.package and node_a == node_b:
                assert (gpu_a == gpu_b) == (one.package == other.package)
    stated = Topology("stated", *MACHINES[name]["tree"])
    assert placed(stated, placements).order == found.order


# -- NVLink over several hosts ---------------------------------------------------------------------


def test_a_preset_gets_the_racks_of_the_fabric() -> None:
    """Hosts of two racks in turn: each rack is a node."""
    found = resolve_topology("gb200-nvl72", 144, placements_of("two racks in turn"))
    assert found == replace(load_preset("gb200-nvl72", 144), order=found.order, hosts=("n0", "n1"))
    assert {rank // 4 % 2 for rank in found.node_ranks(1)} == {1}


def test_without_the_fabric_the_preset_has_the_domain() -> None:
    racks = placements_of("a rack without fabric")
    found = resolve_topology("gb200-nvl72", 72, racks)
    assert shape(found) == (1, 72, 1) and found.order is None
    racks[1:4] = racks[4:7]
    line = (
        "18 hosts of 4 neighbouring ranks each, but host 'n0' runs ranks 0, host 'n1' runs .* 1-7"
    )
    with pytest.raises(ValueError, match=line):
        resolve_topology("gb200-nvl72", 72, racks)


class Fabric(ctypes.Structure):
    """What the driver fills, with pynvml's own fields."""

    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    )


@pytest.mark.parametrize(
    ("state", "cluster", "domain"),
    [
        (3, 9, "00000009" + "0" * 24 + " 5"),
        (3, 0, ""),  # an H100's: NVLink ends at the host
        (1, 9, ""),  # the fabric is not up
        (0, 0, ""),  # the driver has no such function
    ],
)
def test_the_nvlink_domain_is_nvmls(
    monkeypatch: pytest.MonkeyPatch, state: int, cluster: int, domain: str
) -> None:
    nvml = Mock(NVML_GPU_FABRIC_STATE_COMPLETED=3, c_nvmlGpuFabricInfo_t=Fabric)
    nvml.NVMLError = LookupError

    def fill(handle: object, reference: Any) -> None:
        if not state:
            raise LookupError("Function Not Found")
        info = ctypes.cast(reference, ctypes.POINTER(Fabric)).contents
        info.clusterUuid[3] = cluster
        info.cliqueId = 5
        info.state = state

    nvml.nvmlDeviceGetGpuFabricInfo = fill
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert nvlink_domain("0000:18:00") == domain
    nvml.nvmlDeviceGetHandleByPciBusId.assert_called_with(b"0000:18:00.0")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvlink_domain("0000:18:00") == ""


# -- devices ---------------------------------------------------------------------------------------


def test_tiles_of_an_intel_gpu_are_devices_unless_it_is_one() -> None:
    tiles = "Intel(R) Data Center GPU Max 1550"
    assert devices_of_package(tiles, {}) == 2
    assert devices_of_package(tiles, {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}) == 1
    assert devices_of_package("Intel(R) Data Center GPU Max 1100", {}) == 1


def test_hidden_devices_leave_the_package_unknown() -> None:
    """Three GCDs, of which two share a package: it is not known which."""
    assert package_of("0000:c6:00", 2, ["0000:c1:00", "0000:c6:00", "0000:c9:00"]) == ""
    assert package_of("0000:c6:00", 2, ["0000:c6:00"]) == ""
    assert package_of("", 2, []) == ""


def test_linux_lists_the_devices_of_one_model(tmp_path: Path) -> None:
    for address, vendor, device in [
        ("0000:c1:00.0", "0x1002", "0x7408"),
        ("0000:c6:00.0", "0x1002", "0x7408"),
        ("0000:01:00.0", "0x1002", "0x1638"),  # the node's own display
        ("0000:02:00.0", "0x17db", "0x0501"),
    ]:
        (tmp_path / address).mkdir()
        (tmp_path / address / "vendor").write_text(vendor + "\n")
        (tmp_path / address / "device").write_text(device + "\n")
    assert sorted(same_model("0000:c6:00", tmp_path)) == ["0000:c1:00", "0000:c6:00"]
    assert same_model("0000:ff:00", tmp_path) == []
    assert same_model("0000:c6:00", tmp_path / "nothing") == []


# -- what is no tree, and no such machine ----------------------------------------------------------


def on(hosts: str) -> list[Placement]:
    return [Placement(host, host) for host in hosts]


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_stated_order_passes_exactly_if_nodes_and_hosts_match(
    nodes: int, per_node: int, data: st.DataObject
) -> None:
    world = nodes * per_node
    order = tuple(data.draw(st.permutations(range(world))))
    topology = Topology("test", nodes, per_node, 1, order=order)
    right = "".join(chr(ord("a") + position // per_node) for position in order)
    assert placed(topology, on(right)) == topology
    wrong = data.draw(st.text(sorted({*right, "z"}), min_size=world, max_size=world))
    pairs = [(a, b) for a in range(world) for b in range(a)]
    assume(any((wrong[a] == wrong[b]) != (right[a] == right[b]) for a, b in pairs))
    with pytest.raises(ValueError):
        placed(topology, on(wrong))


def test_many_nodes_on_one_machine_must_be_said_to_be_emulated_and_are_then_not_checked() -> None:
    laptop = [Placement("laptop")] * 16
    with pytest.raises(
        ValueError,
        match="ranks each, but host 'laptop' runs ranks 0-15; start 8 ranks",
    ) as error:
        resolve_topology("frontier", 16, laptop)
    advice = json.loads(str(error.value).split('"topology": ')[1])
    assert resolve_topology(advice, 16, laptop) == emulated(2, 4, 2)


def test_hosts_of_one_name_are_distinguished_by_their_boot() -> None:
    placements = [replace(each, host="localhost") for each in placements_of("frontier")]
    found = found_tree(placements)
    assert shape(found) == (2, 4, 2) and found.hosts is None
    assert placed(Topology("test", 2, 4, 2), placements).hosts is None


def test_ranks_on_different_gpus_may_not_be_taken_for_dies_of_one() -> None:
    placements = placements_of("MI300X")[:4]
    with pytest.raises(
        ValueError, match="puts ranks 0-1 on one GPU, but on host 'n0' they run on 0000:05:00 and"
    ):
        placed(Topology("test", 1, 2, 2), placements)
    assert placed(emulated(1, 2, 2), placements) == emulated(1, 2, 2)


# -- settings --------------------------------------------------------------------------------------

EMULATED = {"emulated": {"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 2}}


def test_before_ranks_can_communicate_a_preset_is_as_many_nodes_as_ranks_fill() -> None:
    assert resolve_topology("frontier", 16) == load_preset("frontier", 16)
    assert shape(resolve_topology("frontier")) == (1, 4, 2)
    assert shape(resolve_topology("auto", 4)) == (1, 4, 1)
    assert shape(resolve_topology("auto")) == (1, 1, 1)


def test_a_path_is_read(tmp_path: Path) -> None:
    topology = load_preset("lumi-g", 8)
    named = (
        ("machine.json", topology.to_json(), topology),
        ("machine", EMULATED, emulated(2, 2, 2)),
    )
    for name, content, expected in named:
        (tmp_path / name).write_text(json.dumps(content))
        assert resolve_topology(str(tmp_path / name), 8) == expected
