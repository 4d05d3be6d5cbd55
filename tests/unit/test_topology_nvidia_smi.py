# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tables of ``nvidia-smi topo -m`` as people capture them: wrapped, with lost blanks, run together; sources of the
samples are in ``test_topology_devices.py``."""

from __future__ import annotations

import textwrap

import pytest

from tests.unit.test_topology_devices import BOX, SAMPLES, sample, text
from zero_topo.topology import load_preset
from zero_topo.topology.captures import read_captures
from zero_topo.topology.devices import DeviceLink
from zero_topo.units import GB


@pytest.mark.parametrize(
    ("name", "count", "rate", "numa", "nics"),
    [
        ("dgx_a100_nvidia_smi.txt", 12, 300, (3, 3, 1, 1, 7, 7, 5, 5), 12),
        ("dgx_h100_nvidia_smi.txt", 18, 450, (0, 0, 0, 0, 1, 1, 1, 1), 8),
        ("ansi_nvidia_smi.txt", 18, 450, (0, 0, 0, 0, 1, 1, 1, 1), 8),
        ("h20_no_blank_nvidia_smi.txt", 18, 450, (0, 0, 0, 0, 1, 1, 1, 1), 5),
        ("b200_glued_header_nvidia_smi.txt", 18, 450, (0, 0, 0, 0, 1, 1, 1, 1), 13),
    ],
)
def test_a_dgx_is_eight_gpus_behind_switches(
    name: str, count: int, rate: int, numa: tuple[int, ...], nics: int
) -> None:
    tree = sample(name)
    assert set(tree.links.values()) == {DeviceLink("NVLINK", count, float(rate * GB))} and len(tree.links) == 28
    assert tree.shape() == (8, 1) and tree.numa == numa
    assert tree.nics is not None and len(tree.nics) == nics
    assert tree.node_links()["node"].bandwidth == rate * GB


def test_adapters_are_named_by_the_legend_and_near_the_closest_gpus() -> None:
    tree = sample("dgx_h100_nvidia_smi.txt")
    assert tree.nics is not None
    assert [(nic.name, nic.closest) for nic in tree.nics][:3] == [("mlx5_0", (0,)), ("mlx5_3", (1,)), ("mlx5_4", (2,))]
    a100 = {nic.name: nic.closest for nic in sample("dgx_a100_nvidia_smi.txt").nics or ()}
    assert a100["mlx5_0"] == (0, 1) and a100["mlx5_4"] == ()


def test_a_pcie_box_keeps_its_ways_and_has_no_bandwidths() -> None:
    tree = sample(BOX)
    assert tree.link(0, 1) == DeviceLink("PIX") and tree.link(3, 2) == DeviceLink("PHB")
    assert tree.link(0, 3) == DeviceLink("SYS") and tree.node_links() == {}
    assert tree.nics is not None and tree.nics[0].closest == (0, 1)


def test_an_old_table_without_numa_columns_or_legend_is_read() -> None:
    tree = sample("old_nvidia_smi.txt")
    assert tree.numa is None and tree.link(0, 2) == DeviceLink("NVLINK", 2, 50.0 * GB)
    assert tree.nics is not None and (tree.nics[0].name, tree.nics[0].closest) == ("mlx5_0", (0, 1))


def test_cells_of_adapters_and_affinities_are_read_leniently() -> None:
    changed = text(BOX).replace("NODE\t0-15\t0", "NIX\t0-15\t0,1")
    tree = read_captures([("box", changed)])
    assert tree.shape() == (4, 1) and tree.numa == (None, None, 1, 1)


def test_cells_and_labels_that_run_together_are_told_apart() -> None:
    """What vLLM's report of a B200 node shows, and the same between two GPUs; nothing is shifted."""
    tree = sample("b200_glued_header_nvidia_smi.txt")
    near = {nic.name: nic.closest for nic in tree.nics or ()}
    assert near["NIC11"] == (0,) and near["NIC4"] == (7,) and near["NIC12"] == (0, 1, 2, 3)
    assert read_captures([("box", text(BOX).replace("SYS\tSYS", "SYSSYS"))]) == sample(BOX)
    dgx = text("dgx_h100_nvidia_smi.txt")
    assert read_captures([("dgx", dgx.replace("NV18\tNV18", "NV18NV18"))]) == sample("dgx_h100_nvidia_smi.txt")


@pytest.mark.parametrize("width", [20, 60, 100])
def test_a_wrapped_table_is_the_table(width: int) -> None:
    """Header and rows that a narrow window broke into lines; all eight GPUs are found."""
    name = "dgx_h100_nvidia_smi.txt"
    lines = [
        wrapped for line in text(name).expandtabs(8).splitlines() for wrapped in textwrap.wrap(line, width) or [""]
    ]
    assert read_captures([(name, "\n".join(lines))]) == sample(name)


def test_a_tray_of_gb200_has_nvlink_of_the_fifth_generation() -> None:
    """Four GPUs with 18 links of 50 GB/s: 900 GB/s in each direction, and the rack of 72 is a level of its preset."""
    tree = sample("gb200_nvidia_smi.txt")
    assert tree.shape() == (4, 1) and tree.node_links()["node"].bandwidth == 900 * GB
    assert "50 GB/s a link" in tree.sources["links"]
    rack = load_preset("gb200-nvl72", 144)
    assert (rack.nodes, rack.degree("node")) == (2, 72)
    assert rack.links["node"].bandwidth == 900 * GB > rack.links["world"].bandwidth


@pytest.mark.parametrize(
    "name", [path.name for path in sorted(SAMPLES.glob("*nvidia*")) if "malformed" not in path.name]
)
def test_tabs_turned_into_blanks_by_a_terminal_change_nothing(name: str) -> None:
    assert read_captures([(name, text(name).expandtabs(8))]) == sample(name)
