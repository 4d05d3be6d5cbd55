# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""From the host, device name and PCI address of each rank to one tree, on every machine that is
known, in any order of ranks; and what cannot be a tree, in one line.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.steps import shape
from zero_topo.topology import Topology, emulated, load_preset, resolve_topology
from zero_topo.topology.devices import (
    devices_of_package,
    nvlink_domain,
    package_of,
    same_model,
)
from zero_topo.topology.placements import Placement, found_tree, placed

MI250X = "AMD Instinct MI250X"
TILES = "Intel(R) Data Center GPU Max 1550"
FRONTIER = ["c1", "c6", "c9", "ce", "d1", "d6", "d9", "de"]
EIGHT = ["05", "15", "65", "75", "85", "95", "e5", "f5"]


def node(
    host: str, name: str, buses: Sequence[str], used: Sequence[str] = (), domain: str = ""
) -> list[Placement]:
    """The placements of ranks on a host's devices; all are used unless ``used`` names some."""
    size = devices_of_package(name, {})
    addresses = [f"0000:{bus}:00" for bus in buses]
    wanted = [f"0000:{bus}:00" for bus in used] or addresses
    return [
        Placement(host, host, package_of(address, size, addresses), size, domain)
        for address in wanted
    ]


def nodes(count: int, name: str, buses: Sequence[str]) -> list[Placement]:
    return [placement for host in range(count) for placement in node(f"n{host}", name, buses)]


MACHINES: dict[str, tuple[list[Placement], tuple[int, int, int]]] = {
    "frontier": (nodes(2, MI250X, FRONTIER), (2, 4, 2)),
    "half of Frontier's GCDs, one of each": (
        node("n0", MI250X, FRONTIER, used=FRONTIER[::2]),
        (1, 4, 1),
    ),
    "one package": (node("n0", MI250X, FRONTIER, used=["d9", "de"]), (1, 1, 2)),
    "MI300X": (nodes(2, "AMD Instinct MI300X", EIGHT), (2, 8, 1)),
    "MI300X in CPX": (
        nodes(1, "AMD Instinct MI300X", [bus for bus in EIGHT for _ in range(8)]),
        (1, 8, 8),
    ),
    # Addresses of amd-smi, whose function numbers the partitions, without the function
    "MI300X in DPX": (
        nodes(1, "AMD Instinct MI300X", [f"{bus}5" for bus in range(8) for _ in range(2)]),
        (1, 8, 2),
    ),
    "MI300A in TPX": (
        nodes(2, "AMD Instinct MI300A", [f"{bus}5" for bus in range(4) for _ in range(3)]),
        (2, 4, 3),
    ),
    "DGX H100": (nodes(2, "NVIDIA H100 80GB HBM3", EIGHT), (2, 8, 1)),
    "MIG": (nodes(1, "NVIDIA A100-SXM4-40GB MIG 3g.20gb", ["07", "07", "0f", "0f"]), (1, 2, 2)),
    "Aurora": (
        [Placement(f"n{rank // 12}", f"{rank // 12}", "", 2) for rank in range(24)],
        (2, 6, 2),
    ),
    "CPUs": ([Placement(f"n{rank // 4}", f"{rank // 4}") for rank in range(8)], (2, 4, 1)),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_found_from_its_hosts_and_devices(name: str) -> None:
    placements, expected = MACHINES[name]
    found = found_tree(placements)
    assert shape(found) == expected and found.order is None and found.hosts_per_node == 1
    assert found.hosts == tuple(dict.fromkeys(placement.host for placement in placements))


@given(st.data(), st.sampled_from(sorted(MACHINES)))
def test_any_order_of_ranks_gives_the_same_tree(data: st.DataObject, name: str) -> None:
    """Ranks share a host and a GPU in the tree exactly if they do on the machine; a stated machine
    gets the same order.
    """
    straight, expected = MACHINES[name]
    placements = [placement for placement in straight if placement.package or placement.size == 1]
    assume(placements)  # without an address, the order of the ranks is all there is
    placements = data.draw(st.permutations(placements))
    found = found_tree(placements)
    assert shape(found) == expected
    for a, one in enumerate(placements):
        for b in range(a):
            other = placements[b]
            (node_a, gpu_a, _), (node_b, gpu_b, _) = found.coordinates(a), found.coordinates(b)
            assert (node_a == node_b) == (one.machine == other.machine)
            if one.package and node_a == node_b:
                assert (gpu_a == gpu_b) == (one.package == other.package)
    stated = Topology("stated", *expected)
    assert placed(stated, placements).order == found.order


# -- NVLink over several hosts ---------------------------------------------------------------------

RACK = [f"{bus}" for bus in ("08", "09", "18", "19")]


def racks(domains: Sequence[str]) -> list[Placement]:
    """Hosts of four GPUs, in the given NVLink domains."""
    return [
        placement
        for host, domain in enumerate(domains)
        for placement in node(f"n{host}", "NVIDIA GB200", RACK, domain=domain)
    ]


@pytest.mark.parametrize(
    ("domains", "expected", "hosts"),
    [
        (["a"] * 18, (1, 72, 1), 18),
        (["a", "b"] * 18, (2, 72, 1), 18),
        (["a", "a", "b"], (3, 4, 1), 1),  # unequal parts of two racks: nodes are hosts
        ([""] * 18, (18, 4, 1), 1),
        (["a", ""], (2, 4, 1), 1),
    ],
)
def test_an_nvlink_domain_is_a_node(
    domains: list[str], expected: tuple[int, int, int], hosts: int
) -> None:
    found = found_tree(racks(domains))
    assert shape(found) == expected and found.hosts_per_node == hosts
    for node_number in range(found.nodes):
        joined = {domains[rank // 4] for rank in found.node_ranks(node_number)}
        assert len(joined) == 1


def test_a_preset_gets_the_racks_of_the_fabric() -> None:
    """Hosts of two racks in turn: each rack is a node."""
    found = resolve_topology("gb200-nvl72", 144, racks(["a", "b"] * 18))
    assert found == replace(load_preset("gb200-nvl72", 144), order=found.order, hosts=("n0", "n1"))
    assert {rank // 4 % 2 for rank in found.node_ranks(1)} == {1}


def test_without_the_fabric_the_preset_has_the_domain() -> None:
    found = resolve_topology("gb200-nvl72", 144, racks([""] * 36))
    assert shape(found) == (2, 72, 1) and found.order is None
    with pytest.raises(ValueError, match="host 'n0' runs ranks 0-2, host 'n1' runs ranks 3-7"):
        wrong = racks([""] * 36)
        wrong[3] = wrong[4]
        resolve_topology("gb200-nvl72", 144, wrong)


class Nvml:
    """A ``pynvml`` with one GPU, whose fabric has a state and a cluster."""

    class NVMLError(Exception):
        """NVML's error."""

    NVML_GPU_FABRIC_STATE_COMPLETED = 3

    class c_nvmlGpuFabricInfo_t(ctypes.Structure):
        """The module's own fields."""

        _fields_ = (
            ("clusterUuid", ctypes.c_uint8 * 16),
            ("status", ctypes.c_uint),
            ("cliqueId", ctypes.c_uint32),
            ("state", ctypes.c_uint8),
        )

    def __init__(self, state: int, cluster: int, old: bool = False) -> None:
        self.state, self.cluster, self.old = state, cluster, old
        self.asked: list[bytes] = []

    def nvmlInit(self) -> None:
        """Start."""

    def nvmlShutdown(self) -> None:
        """Stop."""

    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> int:
        """Remember the address."""
        self.asked.append(address)
        return 7

    def nvmlDeviceGetGpuFabricInfo(self, handle: int, reference: Any) -> None:
        """Fill the structure, as the driver does."""
        if self.old or handle != 7:
            raise self.NVMLError("Function Not Found")
        info = ctypes.cast(reference, ctypes.POINTER(self.c_nvmlGpuFabricInfo_t)).contents
        info.clusterUuid[3] = self.cluster
        info.cliqueId = 5
        info.state = self.state


@pytest.mark.parametrize(
    ("nvml", "domain"),
    [
        (Nvml(3, 9), "00000009" + "0" * 24 + " 5"),
        (Nvml(3, 0), ""),  # an H100's: NVLink ends at the host
        (Nvml(1, 9), ""),  # the fabric is not up
        (Nvml(3, 9, old=True), ""),
        (None, ""),
    ],
)
def test_the_nvlink_domain_is_nvmls(
    monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None, domain: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert nvlink_domain("0000:18:00") == domain
    assert nvml is None or nvml.asked == [b"0000:18:00.0"]


# -- devices ---------------------------------------------------------------------------------------


def test_tiles_of_an_intel_gpu_are_devices_unless_it_is_one() -> None:
    assert devices_of_package(TILES, {}) == 2
    assert devices_of_package(TILES, {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}) == 1
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


@pytest.mark.parametrize(
    ("placements", "complaint"),
    [
        (
            [*nodes(2, MI250X, FRONTIER), *node("odd", MI250X, FRONTIER, used=FRONTIER[:4])],
            "host 'odd' has 4 of the ranks (16-19) where others have 8, so the machine has no "
            "regular tree; start equally many",
        ),
        (
            [*nodes(2, MI250X, FRONTIER), *node("odd", "NVIDIA H100 80GB HBM3", EIGHT)],
            "GPU 0000:05:00 of host 'odd' has 1 of the ranks (16) where others have 2",
        ),
        (
            node("n0", MI250X, FRONTIER, used=FRONTIER[:7]),
            "GPU 0000:d9:00 of host 'n0' has 1 of the ranks (6) where others have 2",
        ),
    ],
    ids=["unequal hosts", "mixed hosts", "a hidden GCD"],
)
def test_an_irregular_machine_is_refused_with_the_odd_part_and_the_way_out(
    placements: list[Placement], complaint: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        resolve_topology("auto", len(placements), placements)
    assert ("GPU" in complaint) == ('"topology" is a preset, a JSON file' in str(caught.value))
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize(
    ("shape", "hosts", "complaint"),
    [
        ((2, 2, 1), "aabc", "2 hosts of 2 neighbouring ranks each, but host 'a' runs ranks 0-1"),
        ((1, 2, 1), "ab", "host 'b' runs ranks 1"),
    ],
)
def test_the_hosts_of_the_ranks_are_named(
    shape: tuple[int, int, int], hosts: str, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        placed(Topology("test", *shape), on(hosts))


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
    placements = [replace(each, host="localhost") for each in MACHINES["frontier"][0]]
    found = found_tree(placements)
    assert shape(found) == (2, 4, 2) and found.hosts is None
    assert placed(Topology("test", 2, 4, 2), placements).hosts is None


def test_ranks_on_different_gpus_may_not_be_taken_for_dies_of_one() -> None:
    placements = node("n0", "AMD Instinct MI300X", EIGHT[:4])
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


@pytest.mark.parametrize("name", ["machine.json", "machine"])
def test_a_path_is_read(tmp_path: Path, name: str) -> None:
    topology = load_preset("lumi-g", 8)
    (tmp_path / name).write_text(json.dumps(topology.to_json()), encoding="utf-8")
    assert resolve_topology(str(tmp_path / name), 8) == topology
    (tmp_path / name).write_text(json.dumps(EMULATED), encoding="utf-8")
    assert resolve_topology(str(tmp_path / name), 8) == emulated(2, 2, 2)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read (No such file"),
        (b"{nodes: 2}", "Expecting property name"),
        (b"\xff\xfe", "is no UTF-8 text"),
        (b'{"nodez": 2}', "did you mean 'nodes'"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "machine.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(complaint)) as error:
        resolve_topology(str(path), 4)
    assert str(path) in str(error.value)
