# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tables of ``nvidia-smi topo -m`` as people capture them; where from: ``test_topology_devices.py``."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.unit.test_topology_devices import BOX, SAMPLES, sample, text
from zero_topo.topology import load_preset
from zero_topo.topology.captures import read_captures, recognise
from zero_topo.topology.devices import DeviceLink
from zero_topo.units import GB

PASTES = Path(__file__).parents[1] / "data" / "pastes"
DGX = "dgx_h100_nvidia_smi.txt"


@pytest.mark.parametrize(
    ("name", "count", "rate", "numa"),
    [
        ("dgx_a100_nvidia_smi.txt", 12, 300, (3, 3, 1, 1, 7, 7, 5, 5)),
        (DGX, 18, 450, (0, 0, 0, 0, 1, 1, 1, 1)),
        ("ansi_nvidia_smi.txt", 18, 450, (0, 0, 0, 0, 1, 1, 1, 1)),
        ("h20_no_blank_nvidia_smi.txt", 18, 450, (0, 0, 0, 0, 1, 1, 1, 1)),
    ],
)
def test_a_dgx_is_eight_gpus_behind_switches(name: str, count: int, rate: int, numa: tuple[int, ...]) -> None:
    tree = sample(name)
    assert set(tree.links.values()) == {DeviceLink("NVLINK", count, float(rate * GB))} and len(tree.links) == 28
    assert tree.shape() == (8, 1) and tree.numa == numa
    assert tree.node_links()["node"].bandwidth == rate * GB


def test_a_pcie_box_keeps_its_ways_and_has_no_bandwidths() -> None:
    tree = sample(BOX)
    assert tree.link(0, 1) == DeviceLink("PIX") and tree.link(3, 2) == DeviceLink("PHB")
    assert tree.link(0, 3) == DeviceLink("SYS") and tree.node_links() == {}


def test_an_old_table_without_numa_columns_or_legend_is_read() -> None:
    tree = sample("old_nvidia_smi.txt")
    assert tree.numa is None and tree.link(0, 2) == DeviceLink("NVLINK", 2, 50.0 * GB)


def test_cells_of_adapters_and_affinities_are_read_leniently() -> None:
    changed = text(BOX).replace("NODE\t0-15\t0", "NIX\t0-15\t0,1")
    tree = read_captures([("box", changed)])
    assert tree.shape() == (4, 1) and tree.numa == (None, None, 1, 1)


@pytest.mark.parametrize("width", [20, 60])
def test_a_wrapped_table_is_refused(width: int) -> None:
    """A narrow window broke header and rows into lines: what belongs together is then a guess."""
    lines = [wrapped for line in text(DGX).expandtabs(8).splitlines() for wrapped in textwrap.wrap(line, width) or [""]]
    with pytest.raises(ValueError, match=r"^dgx: [^\n]*capture[^\n]*$"):
        read_captures([("dgx", "\n".join(lines))])


@pytest.mark.parametrize(
    "damaged",
    [
        text("b200_glued_header_nvidia_smi.txt"),
        text(BOX).replace("SYS\tSYS", "SYSSYS"),
        text(DGX).replace("NV18\tNV18", "NV18NV18"),
    ],
    ids=["header", "cells", "links"],
)
def test_cells_and_labels_that_run_together_are_refused(damaged: str) -> None:
    with pytest.raises(ValueError, match=r"cells for the \d+ columns [^\n]*the table is damaged[^\n]*capture its"):
        read_captures([("paste", damaged)])


def test_a_tray_of_gb200_has_nvlink_of_the_fifth_generation() -> None:
    """Four GPUs with 18 links of 50 GB/s: 900 GB/s in each direction, and the rack of 72 is a level of its preset."""
    tree = sample("gb200_nvidia_smi.txt")
    assert tree.shape() == (4, 1) and tree.node_links()["node"].bandwidth == 900 * GB
    assert "50 GB/s a link" in tree.sources["links"]
    rack = load_preset("gb200-nvl72", 144)
    assert (rack.nodes, rack.degree("node")) == (2, 72)
    assert rack.links["node"].bandwidth == 900 * GB > rack.links["world"].bandwidth


TABLES = [
    path.name for path in sorted(SAMPLES.glob("*nvidia*")) if path.stem.split("_")[0] not in ("malformed", "b200")
]


@pytest.mark.parametrize("name", [*TABLES, "frontier_rocm_smi.txt", "frontier_amd_smi.json", "frontier_rocm_smi.json"])
def test_what_terminals_and_shells_add_changes_nothing(name: str) -> None:
    """Blanks for tabs, carriage returns, escapes that lost their first character, prompts, a prefix on each line."""
    plain = text(name)
    lost = plain.replace("\x1b", "") if "\x1b" in plain else plain.replace("GPU1", "[4mGPU1[0m", 1)
    pasted = [plain.expandtabs(8), plain.replace("\n", "\r\n"), f"user@node:~$ tool\n{plain}user@node:~$"]
    pasted += [
        "".join(f"{prefix} {line}\n" for line in plain.splitlines()) for prefix in ("#", "nid000001:", "> $")[:2]
    ]
    for paste in (*pasted, lost):
        assert recognise(paste) is not None and read_captures([(name, paste)]) == sample(name)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("amd_smi_prompt.txt", None),
        ("juwels_commented.txt", (4, 1)),
        ("pdsh_prefix.txt", (4, 1)),
        ("rtx3090_pair.txt", (2, 1)),
    ],
)
def test_pastes_of_forums_are_read(name: str, shape: tuple[int, int] | None) -> None:
    """In the shape in which people publish them."""
    tree = read_captures([(name, (PASTES / name).read_text())])
    assert tree.count >= 2 and (shape is None or tree.shape() == shape)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ((PASTES / "csv_paste.txt").read_text(), ""),
        ((PASTES / "dgx1_p100_SOC_tabs.txt").read_text(), "row GPU0, column GPU5 is 'SOC'"),
        ("\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n", "nearest to nvidia-smi, but lacks a header line|GPU0"),
        ("Legend: NV# SYS PHB of nvidia-smi topo -p2p r", "nearest to nvidia-smi, but lacks a header line"),
        ("GPU: 0\n    BDF: 0000:c1:00.0\n    HOPS: 1", "nearest to amd-smi, but lacks the JSON of all GPUs"),
        ('{"card0": {"Temperature (Sensor edge) (C)": "35.0"}}', "nearest to rocm-smi, but lacks lines or keys"),
        (
            '<?xml version="1.0"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology version="2.0">',
            "nearest to lstopo, but lacks packages",
        ),
        ("hello", "not recognised: [^;]*$"),
    ],
)
def test_pastes_that_are_no_such_table_are_one_line(text: str, words: str) -> None:
    """What they are nearest to is said."""
    with pytest.raises(ValueError, match=rf"^paste[^\n]*{words}[^\n]*$"):
        read_captures([("paste", text)])


@pytest.mark.parametrize(
    ("name", "rate", "said"),
    [
        ("pastes/h100_4_of_8.txt", 450, "25 GB/s a link, half of B200's"),
        ("devices/gb200_nvidia_smi.txt", 900, "50 GB/s a link"),
        ("devices/dgx_h100_nvidia_smi.txt", 450, "25 GB/s a link, half of B200's"),
        ("devices/dgx_a100_nvidia_smi.txt", 300, "25 GB/s a link"),
    ],
)
def test_a_generation_is_not_guessed_from_the_number_of_gpus(name: str, rate: int, said: str) -> None:
    """Half of a node in a container has the table of a tray of GB200, except for the CPU."""
    tree = read_captures([(name, (PASTES.parent / name).read_text())])
    assert tree.node_links()["node"].bandwidth == rate * GB and tree.sources["links"].endswith(said)


def test_memory_with_a_numa_number_is_beside_a_grace() -> None:
    """Also where a job sees some of its cores."""
    seen = text("gb200_nvidia_smi.txt").replace("0-71 ", "0-35 ").replace("N/A", "4")
    assert read_captures([("paste", seen)]).node_links()["node"].bandwidth == 900 * GB
