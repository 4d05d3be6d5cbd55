# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What device tools print becomes packages, links and NUMA nodes.

The samples in tests/data/devices: Frontier's matrix is the one of ROCm's release notes, of which
the other Frontier files are the same node in each tool's format; tables of nvidia-smi follow
captures in NVIDIA/nccl issues 78 and 1505 (DGX A100) and sgl-project/sglang issue 19687 (H100),
with NUMA columns, escapes and a cell changed as named; vllm-project/vllm issues 5001 (H20, no blank
before the header) and 31594 (B200, labels run together) and NVIDIA/k8s-test-infra issue 371
(GB200), with rows that are cut there filled in. pcie_rocm_smi.txt is ROCm/rocm_smi_lib issue 108.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import combinations, pairwise, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_topo.topology import load_preset
from zero_topo.topology.captures import read_captures, recognise
from zero_topo.topology.devices import DeviceLink, DeviceTree, merge, normal_bus_id
from zero_topo.topology.ring import ring_bandwidth
from zero_topo.topology.tools import nvml, sysfs, xgmi
from zero_topo.units import GB

SAMPLES = Path(__file__).parents[1] / "data" / "devices"
FRONTIER = (
    "frontier_matrix.txt",
    "frontier_rocm_smi.txt",
    "frontier_amd_smi.json",
    "frontier_amd_smi_old.json",
)
BOX = "pcie_box_nvidia_smi.txt"
XGMI = {
    4: {(0, 1), (2, 3), (4, 5), (6, 7)},
    2: {(0, 6), (2, 4)},
    1: {(0, 2), (1, 3), (1, 5), (3, 7), (4, 6), (5, 7)},
}


def text(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


def sample(*names: str) -> DeviceTree:
    return read_captures([(name, text(name)) for name in names])


@pytest.mark.parametrize("name", FRONTIER)
def test_frontier_has_the_user_guides_packages_and_links_and_its_presets_topology(
    name: str,
) -> None:
    tree = sample(name)
    assert tree.groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert {n: {pair for pair, link in tree.links.items() if link.count == n} for n in XGMI} == XGMI
    assert sum(link.kind == "NONE" for link in tree.links.values()) == 16
    assert {link.bandwidth for link in tree.links.values()} == {200 * GB, 100 * GB, 50 * GB, None}
    topology, preset = tree.topology(nodes=2), load_preset("frontier", 16)
    assert [topology.degree(domain) for domain in ("gpu", "node", "world")] == [2, 8, 16]
    for domain in ("gpu", "node"):
        assert topology.links[domain].bandwidth == preset.links[domain].bandwidth
    assert topology.sources["ranks_per_gpu"].endswith("pairs with 4 XGMI links")


def test_groups_and_weights_do_not_group() -> None:
    """rocm-smi's JSON has types, groups and weights, alike for every pair of GCDs, and no
    bandwidths.
    """
    tree = sample("frontier_rocm_smi.json")
    assert tree.packages is None and tree.shape() == (8, 1)
    assert "GCDs of a GPU cannot be recognized" in tree.warnings()[0]
    assert sample("frontier_rocm_smi.json", "frontier_matrix.txt").shape() == (4, 2)


def test_weights_that_differ_by_package_change_nothing() -> None:
    data = json.loads(text("frontier_amd_smi.json"))
    for entry in data:
        for link in entry["links"]:
            link["weight"], link["num_hops"] = (
                (1, 1) if (link["gpu"] + entry["gpu"]) % 8 == 7 else (99, 3)
            )
    tree = read_captures([("changed", json.dumps(data))])
    assert tree.groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_rocm_smi_tells_numa_nodes_and_bus_ids() -> None:
    for name in ("frontier_rocm_smi.txt", "frontier_rocm_smi.json"):
        tree = sample(name)
        assert tree.numa == (3, 3, 1, 1, 0, 0, 2, 2)
        assert tree.bus_ids is not None and tree.bus_ids[0] == "0000:c1:00.0"


def test_dies_of_an_mi300x_are_one_device_each() -> None:
    tree = sample("mi300x_amd_smi.json")
    assert tree.shape() == (8, 1) and len(tree.links) == 28
    assert set(tree.links.values()) == {DeviceLink("XGMI", 1, 50.0 * GB)}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mi300x_dpx_na_amd_smi.json", (8, 2)),
        ("mi300a_tpx_amd_smi.json", (4, 3)),
        ("mi300a_tpx_rocm_smi.txt", (4, 3)),
        ("mi300x_cpx_amd_smi.txt", (2, 8)),
    ],
)
def test_partitions_of_a_gpu_are_one_domain(name: str, shape: tuple[int, int]) -> None:
    """In DPX, TPX and CPX mode the devices of a GPU differ in the function of their PCI address
    alone.

    We wrote the tables for TPX and CPX in the documented form, because we found no published
    capture of one (searched in November 2026). They agree with what is published: in CPX,
    `amd-smi list` numbers GPU 1 of 64 as 0000:0c:00.1 (CHANGELOG.md of ROCm/amdsmi); rocm-smi
    without options lists 3 devices of an MI300A in TPX, 64 in CPX (ROCm/ROCm#4750).
    """
    tree = sample(name)
    assert tree.shape() == shape and not tree.warnings()
    assert tree.places() == tuple(range(tree.count))
    # Partitions share the links of their GPU, so that no rate of a ring of ranks follows from the
    # table.
    assert tree.node_links() == {}
    assert "function alone" in tree.topology().sources["ranks_per_gpu"]


def test_partitions_without_addresses_are_unknown_with_a_warning() -> None:
    """A table of bandwidths alone has the partitions of MI300s as devices like all others."""
    lines = text("mi300a_tpx_rocm_smi.txt").splitlines()
    tree = read_captures([("cut", "\n".join(line for line in lines if "PCI" not in line))])
    assert tree.packages is None and tree.shape() == (12, 1)
    assert "partitions of a GPU (CPX, TPX) cannot be recognized" in tree.warnings()[0]
    assert "--showbus" in tree.warnings()[0]


def test_a_partition_that_is_hidden_is_an_error() -> None:
    tree = sample("mi300a_tpx_amd_smi.json")
    with pytest.raises(ValueError, match=r"device 3 .* is in a package of 2 where others have 3"):
        tree.select([0, 1, 2, 3, 4, *range(6, 12)]).shape()


def test_numa_nodes_of_whole_gpus_serve_their_partitions() -> None:
    """Linux lists one PCI device for all partitions of a GPU, without the functions that the tools
    print.
    """
    tree = sample("mi300a_tpx_amd_smi.json")
    linux = DeviceTree(
        "sysfs", 4, numa=(0, 1, 2, 3), bus_ids=tuple(f"0000:{bus}5:00.0" for bus in range(4))
    )
    assert merge([tree, linux]).numa == tuple(node for node in range(4) for _ in range(3))


@pytest.mark.parametrize(("rates", "packages"), [("0-0", None), ("50000-200000", (0, 1, 2, 3))])
def test_equal_links_to_all_peers_are_no_package(
    rates: str, packages: tuple[int, ...] | None
) -> None:
    """Drivers without bandwidths print 0-0 for every pair, which is no proof of lone GCDs; four
    links to each are.
    """
    pairs = dict.fromkeys(combinations(range(4), 2), rates)
    tree = xgmi.amd_tree("amd-smi", 4, pairs, dict.fromkeys(pairs, "XGMI"))
    assert tree.packages == packages and {link.kind for link in tree.links.values()} == {"XGMI"}


def test_the_old_form_of_amd_smi_knows_pcie() -> None:
    tree = sample("pcie_amd_smi_old.json")
    assert tree.links == {(0, 1): DeviceLink("PCIE")} and tree.shape() == (2, 1)


def test_devices_on_pcie_alone_claim_no_packages_of_xgmi() -> None:
    """They are single GPUs, and the reason says that nothing joins them."""
    tree = sample("pcie_rocm_smi.txt")
    assert tree.shape() == (4, 1) and set(tree.links.values()) == {DeviceLink("PCIE")}
    assert tree.sources["packages"] == "rocm-smi: every device is a GPU, as no XGMI joins two"
    assert (
        sample("mi300x_amd_smi.json").sources["packages"].endswith("as no two share 4 XGMI links")
    )


@pytest.mark.parametrize(
    ("name", "old", "new", "complaint"),
    [
        (
            "frontier_matrix.txt",
            "GPU3   0-0          ",
            "GPU3   ",
            "row GPU3 of a table has 7 cells for 8 devices",
        ),
        ("malformed_nvidia_smi.txt", "", "", "row GPU1, column GPU2 is 'PIXNODE'"),
        (BOX, "GPU2\tGPU3", "", "row GPU0 has 5 cells for the 3 columns"),
        (
            BOX,
            "GPU1\tPIX",
            "GPU1\tPHB",
            "row GPU0, column GPU1 is 'PIX' but row GPU1, column GPU0 is 'PHB'",
        ),
        (BOX, "GPU3\tSYS\tSYS\tPHB", "GPU3\tSYS\tSYS\tNV0", "row GPU3, column GPU2 is 'NV0'"),
        (BOX, "\nGPU2\t", "\nGPU9\t", "row GPU2 has 0 cells"),
        (
            "old_nvidia_smi.txt",
            "NV2",
            "NV",
            "row GPU0, column GPU2 is 'NV'; it must be NV followed by a number",
        ),
        ("frontier_matrix.txt", "GPU7   0-0 ", "bla    0-0 ", "7 rows for 8 columns"),
        ("frontier_amd_smi.json", "]\n", "", "amd-smi: its topology is not as expected"),
        (
            "frontier_amd_smi.json",
            '"bdf": "0000:c1:00.0"',
            '"bdf": "here"',
            "'here' is no PCI address",
        ),
        ("frontier_rocm_smi.json", "}}", "}", "rocm-smi: not valid JSON"),
        (
            "mi300x_cpx_amd_smi.txt",
            "0000:22:00.7 XGMI",
            "0000:22:00.7",
            "its LINK TYPE table is not one row for each",
        ),
    ],
)
def test_broken_captures_are_one_clear_line(name: str, old: str, new: str, complaint: str) -> None:
    broken = text(name).replace(old, new)
    with pytest.raises(ValueError, match=f"^{name}: .*{re.escape(complaint)}"):
        read_captures([(name, broken)])


@given(st.text(max_size=60))
def test_no_text_makes_a_parser_fail_otherwise_than_by_value_error(noise: str) -> None:
    for start in (
        "",
        '{"(Topology)": ',
        '[{"gpu": 0, "links": ',
        "\tGPU0\tGPU1\tCPU Affinity\n",
        "GPU0 GPU1\n",
    ):
        with suppress(ValueError):
            read_captures([("noise", start + noise)])


def test_each_sample_is_recognised_by_its_content() -> None:
    tools = {
        path.name: getattr(recognise(text(path.name)), "name", None) for path in SAMPLES.iterdir()
    }
    assert {
        name: tool for name, tool in tools.items() if tool and tool.replace("-", "_") not in name
    } == {"frontier_matrix.txt": "rocm-smi"}
    assert recognise(json.dumps(load_preset("frontier", 8).to_json())) is None
    assert recognise("hello") is None


def test_sysfs_is_read_from_any_root(tmp_path: Path) -> None:
    """GPUs with their NUMA nodes; the addresses of a tool leave out what is none of its devices."""

    def add(bus_id: str, kind: str, model: str, numa: int) -> None:
        place = tmp_path / "bus/pci/devices" / bus_id
        place.mkdir(parents=True)
        vendor, device = model.split(":")
        for name, value in (
            ("class", kind),
            ("vendor", vendor),
            ("device", device),
            ("numa_node", str(numa)),
        ):
            (place / name).write_text(f"{value}\n")

    assert sysfs.read_sys(tmp_path) is None
    add("0000:03:00.0", "0x030000", "0x1a03:0x2000", 0)
    add("0000:04:00.0", "0x020700", "0x15b3:0x1017", 0)
    assert sysfs.read_sys(tmp_path) is None
    add("0000:02:00.0", "0x030000", "0x1002:0x515e", 0)
    add("0000:01:00.0", "0x030200", "0x10de:0x2330", 0)
    add("0000:81:00.0", "0x030200", "0x10de:0x2330", -1)
    tree = sysfs.read_sys(tmp_path)
    assert tree is not None and tree.packages is None and tree.numa == (0, 0, None)
    tool = DeviceTree("tool", 2, bus_ids=("0000:81:00.0", "0000:01:00.0"))
    assert merge([tool, tree]).numa == (None, 0)


def fake_nvml(version: int = 4) -> Any:
    """As much of pynvml as a node of four GPUs answers: 0-1 joined by two links, 2-3 behind a
    switch by 18.
    """

    class NVMLError(Exception):
        """NVML's only kind of error."""

    def address(device: int) -> Any:
        return SimpleNamespace(busId=f"0000000{device % 2}:{device}A:00.0".encode())

    def other_end(device: int, link: int) -> int:
        if device < 2:
            raise NVMLError("Not Supported")
        return 2

    return SimpleNamespace(
        NVML_NVLINK_MAX_LINKS=18,
        NVMLError=NVMLError,
        nvmlInit=Mock(),
        nvmlShutdown=Mock(),
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPciInfo=address,
        nvmlDeviceGetNvLinkState=lambda device, link: int(link < 2 or device >= 2),
        nvmlDeviceGetNvLinkRemotePciInfo=lambda device, link: address(
            1 - device if device < 2 else 5
        ),
        nvmlDeviceGetNvLinkRemoteDeviceType=other_end,
        nvmlDeviceGetNvLinkVersion=lambda device, link: version,
        nvmlDeviceGetTopologyCommonAncestor=lambda one, other: 50,
    )


@pytest.mark.parametrize(("version", "rate"), [(1, 20), (4, 25), (5, 50)])
def test_nvml_tells_direct_links_from_switched_ones_and_their_generation(
    version: int, rate: int
) -> None:
    fake = fake_nvml(version)
    tree = nvml.read(fake)
    assert tree is not None and tree.bus_ids == (
        "0000:0a:00.0",
        "0001:1a:00.0",
        "0000:2a:00.0",
        "0001:3a:00.0",
    )
    assert tree.link(0, 1) == DeviceLink("NVLINK", 2, float(2 * rate * GB))
    assert tree.link(2, 3) == DeviceLink("NVLINK", 18, float(18 * rate * GB))
    assert tree.link(1, 2) == DeviceLink("SYS")
    assert fake.nvmlInit.call_count == fake.nvmlShutdown.call_count == 1


def test_a_failing_nvml_is_a_value_error_and_is_closed() -> None:
    fake = fake_nvml()
    fake.nvmlDeviceGetPciInfo = Mock(side_effect=fake.NVMLError("GPU is lost"))
    with pytest.raises(ValueError, match=r"NVML failed \(GPU is lost"):
        nvml.read(fake)
    assert fake.nvmlInit.call_count == fake.nvmlShutdown.call_count == 1


def test_a_package_that_lacks_a_die_is_an_error_that_names_the_device() -> None:
    whole = sample("frontier_rocm_smi.txt")
    with pytest.raises(
        ValueError, match=r"device 6 \(0000:d9:00.0\) is in a package of 1 where others have 2"
    ):
        whole.select(range(7)).shape()


@given(st.permutations(range(8)))
def test_places_put_dies_of_a_package_next_to_each_other(devices: list[int]) -> None:
    chosen = sample("frontier_amd_smi.json").select(devices)
    places = chosen.places()
    assert sorted(places) == list(range(8))
    for a in range(8):
        for b in range(8):
            assert (places[a] // 2 == places[b] // 2) == (devices[a] // 2 == devices[b] // 2)


@pytest.mark.parametrize(
    "written", ["00000000:C1:00.0", "0000:c1:00.0", "C1:00.0", " 0000:C1:00.0\n"]
)
def test_bus_ids_are_written_one_way(written: str) -> None:
    assert normal_bus_id(written) == "0000:c1:00.0"


@pytest.mark.parametrize("written", ["", "c1", "GPU-5f2", "0000:c1:00", "a:b:c:d.e"])
def test_what_is_no_bus_id_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="no PCI address"):
        normal_bus_id(written)


def test_trees_of_different_nodes_are_not_merged() -> None:
    with pytest.raises(ValueError, match="nvidia-smi sees 8 devices but nvidia-smi 4"):
        merge([sample("dgx_a100_nvidia_smi.txt"), sample("old_nvidia_smi.txt")])
    with pytest.raises(ValueError, match="does not list device 0000:c1"):
        merge([sample("frontier_amd_smi.json"), sample("mi300x_amd_smi.json")])


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"count": 0}, "number of devices: must be a whole number of at least 1, got 0"),
        ({"count": 2, "numa": (0,)}, "1 numa for 2 devices"),
        ({"count": 2, "links": {(0, 2): DeviceLink("PIX")}}, r"link of devices \(0, 2\)"),
        ({"count": 2, "links": {(1, 0): DeviceLink("PIX")}}, r"link of devices \(1, 0\)"),
    ],
)
def test_trees_that_do_not_add_up_are_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        DeviceTree("test", **fields)
    with pytest.raises(ValueError, match="link kind 'NVL'"):
        DeviceLink("NVL")


@given(st.integers(2, 6), st.data())
def test_the_best_ring_is_the_best_of_all_rings(n: int, data: st.DataObject) -> None:
    rates = [[0.0] * n for _ in range(n)]
    for a in range(n):
        for b in range(a):
            rates[a][b] = rates[b][a] = float(data.draw(st.integers(0, 3)))
    rings = ((0, *rest, 0) for rest in permutations(range(1, n)))
    best = max(min(rates[a][b] for a, b in pairwise(ring)) for ring in rings)
    assert ring_bandwidth(rates) == best
