# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tables of ``nvidia-smi topo -m`` as people capture them; where from:
``test_topology_devices.py``.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.unit.test_topology_devices import BOX, SAMPLES, sample, text
from zero_topo.topology.captures import read_captures, recognise
from zero_topo.topology.devices import DeviceLink
from zero_topo.units import GB

DATA = Path(__file__).parents[1] / "data"
PASTES = DATA / "pastes"
DGX = "dgx_h100_nvidia_smi.txt"


FOUR = (0, 0, 0, 0)
PLAIN, HALF = "25 GB/s a link", "25 GB/s a link, half of B200's"


@pytest.mark.parametrize(
    ("name", "shape", "numa", "rates", "said"),
    [
        ("devices/dgx_a100_nvidia_smi.txt", (8, 1), (3, 3, 1, 1, 7, 7, 5, 5), {"node": 300}, PLAIN),
        *(
            (
                f"devices/{name}_nvidia_smi.txt",
                (8, 1),
                (0, 0, 0, 0, 1, 1, 1, 1),
                {"node": 450},
                HALF,
            )
            for name in ("dgx_h100", "ansi", "h20_no_blank")
        ),
        ("devices/gb200_nvidia_smi.txt", (4, 1), (0, 0, 1, 1), {"node": 900}, "50 GB/s a link"),
        ("devices/old_nvidia_smi.txt", (4, 1), None, {"node": 25}, PLAIN),
        ("devices/pcie_box_nvidia_smi.txt", (4, 1), (0, 0, 1, 1), {}, "nvidia-smi"),
        ("pastes/h100_4_of_8.txt", (4, 1), FOUR, {"node": 450}, HALF),
        ("pastes/juwels_commented.txt", (4, 1), (3, 1, 7, 5), {}, "nvidia-smi"),
        ("pastes/pdsh_prefix.txt", (4, 1), FOUR, {"node": 100}, PLAIN),
        ("pastes/rtx3090_pair.txt", (2, 1), (0, 0), {"node": 100}, PLAIN),
        ("pastes/amd_smi_prompt.txt", (1, 2), None, {"gpu": 200}, "amd-smi"),
    ],
)
def test_tables_are_read_as_people_publish_them(
    name: str,
    shape: tuple[int, int],
    numa: tuple[int, ...] | None,
    rates: dict[str, int],
    said: str,
) -> None:
    """GPUs behind switches, on PCIe, in old tables without NUMA columns, in pastes of forums.

    The generation of NVLink is not guessed from the number of GPUs: half of a node in a container
    has the table of a tray of GB200, except for the CPU.
    """
    tree = read_captures([(name, (DATA / name).read_text())])
    assert (tree.shape(), tree.numa, len(tree.links)) == (
        shape,
        numa,
        tree.count * (tree.count - 1) // 2,
    )
    assert {domain: link.bandwidth / GB for domain, link in tree.node_links().items()} == rates
    assert tree.sources["links"].endswith(said)


def test_a_link_has_its_kind_and_number() -> None:
    """Of a switched node, of PCIe paths, and of NVLink from GPU to GPU."""
    assert set(sample(DGX).links.values()) == {DeviceLink("NVLINK", 18, 450.0 * GB)}
    box, old = sample(BOX), sample("old_nvidia_smi.txt")
    assert [box.link(0, 1), box.link(3, 2), box.link(0, 3)] == [
        DeviceLink(kind) for kind in ("PIX", "PHB", "SYS")
    ]
    assert old.link(0, 2) == DeviceLink("NVLINK", 2, 50.0 * GB)


def test_cells_of_adapters_and_affinities_are_read_leniently() -> None:
    changed = text(BOX).replace("NODE\t0-15\t0", "NIX\t0-15\t0,1")
    tree = read_captures([("box", changed)])
    assert tree.shape() == (4, 1) and tree.numa == (None, None, 1, 1)


@pytest.mark.parametrize("width", [20, 60])
def test_a_wrapped_table_is_refused(width: int) -> None:
    """A narrow window broke header and rows into lines: what belongs together is then a guess."""
    lines = [
        wrapped
        for line in text(DGX).expandtabs(8).splitlines()
        for wrapped in textwrap.wrap(line, width) or [""]
    ]
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
    with pytest.raises(
        ValueError, match=r"cells for the \d+ columns [^\n]*the table is damaged[^\n]*capture its"
    ):
        read_captures([("paste", damaged)])


TABLES = [
    path.name
    for path in sorted(SAMPLES.glob("*nvidia*"))
    if path.stem.split("_")[0] not in ("malformed", "b200")
]


@pytest.mark.parametrize(
    "name", [*TABLES, "frontier_rocm_smi.txt", "frontier_amd_smi.json", "frontier_rocm_smi.json"]
)
def test_what_terminals_and_shells_add_changes_nothing(name: str) -> None:
    """Blanks for tabs, carriage returns, escapes that lost their first character, prompts, a prefix
    on each line.
    """
    plain = text(name)
    lost = plain.replace("\x1b", "") if "\x1b" in plain else plain.replace("GPU1", "[4mGPU1[0m", 1)
    pasted = [
        plain.expandtabs(8),
        plain.replace("\n", "\r\n"),
        f"user@node:~$ tool\n{plain}user@node:~$",
    ]
    pasted += [
        "".join(f"{prefix} {line}\n" for line in plain.splitlines())
        for prefix in ("#", "nid000001:", "> $")[:2]
    ]
    for paste in (*pasted, lost):
        assert recognise(paste) is not None and read_captures([(name, paste)]) == sample(name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ((PASTES / "csv_paste.txt").read_text(), ""),
        ((PASTES / "dgx1_p100_SOC_tabs.txt").read_text(), "row GPU0, column GPU5 is 'SOC'"),
        (
            "\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n",
            "nearest to nvidia-smi, but lacks a header line|GPU0",
        ),
        (
            "Legend: NV# SYS PHB of nvidia-smi topo -p2p r",
            "nearest to nvidia-smi, but lacks a header line",
        ),
        (
            "GPU: 0\n    BDF: 0000:c1:00.0\n    HOPS: 1",
            "nearest to amd-smi, but lacks the tables LINK TYPE",
        ),
        (
            '{"card0": {"Temperature (Sensor edge) (C)": "35.0"}}',
            "nearest to rocm-smi, but lacks lines or keys",
        ),
        (
            '<?xml version="1.0"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology '
            'version="2.0">',
            "nearest to lstopo, but lacks packages",
        ),
        ("hello", "not recognised: [^;]*$"),
    ],
)
def test_pastes_that_are_no_such_table_are_one_line(text: str, words: str) -> None:
    """What they are nearest to is said."""
    with pytest.raises(ValueError, match=rf"^paste[^\n]*{words}[^\n]*$"):
        read_captures([("paste", text)])


def test_memory_with_a_numa_number_is_next_to_a_grace() -> None:
    """Also where a job sees some of its cores."""
    seen = text("gb200_nvidia_smi.txt").replace("0-71 ", "0-35 ").replace("N/A", "4")
    assert read_captures([("paste", seen)]).node_links()["node"].bandwidth == 900 * GB
