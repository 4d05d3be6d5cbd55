# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Parses ``nvidia-smi topo -m``: a table of GPUs and network adapters, with CPU and NUMA affinity
in later columns.

Versions differ: the NUMA columns are missing from old ones, blanks or tabs part the cells. A table
that a paste damaged (wrapped lines, cells or labels that run into each other) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from zero_topo.topology.devices import PCI_KINDS, DeviceLink, DeviceTree
from zero_topo.topology.tools import Tool, asking
from zero_topo.units import GB

NAME = "nvidia-smi"
COMMAND = (NAME, "topo", "-m")
NVLINK_RATE = 25 * GB
"""Bytes/s of one link in each direction for NVLink 2 to 4 (NVIDIA's V100, A100 and H100
whitepapers); the table does not say which generation it is. NVML does.
"""

NVLINK_5_RATE = 50 * GB
MOST_LINKS = 18
"""Links of an H100, of 25 GB/s, and of a B200, of 50 GB/s. Only with a Grace CPU the table says
which: its 72 cores are the affinity of each GPU, or the GPU's memory has a NUMA number. For a B200
in a DGX the lower rate is taken.
"""

GRACE_CORES = 72
AGAIN = f"capture its output again (`{' '.join(COMMAND)}`)"
_GPU = re.compile(r"GPU(\d+)")
_AFFINE = re.compile(r"\d[\d,-]*|N/A")
_CELL = re.compile(rf"{'|'.join(PCI_KINDS)}|NV\d+|X")
_NVLINK = re.compile(r"NV([1-9]\d*)")


def matches(text: str) -> bool:
    """Whether a text is the table of ``nvidia-smi topo``."""
    return _header(text.splitlines()) is not None and (
        "Affinity" in text or "Legend" in text or " X " in text
    )


def parse(text: str) -> DeviceTree:
    """The devices in the output of ``nvidia-smi topo -m``.

    Raises:
        ValueError: if a row has another number of cells than there are columns, or a cell between
            two GPUs is malformed or contradicts its mirror.
    """
    columns, rows = _table(text)
    gpus = [label for label in columns if _GPU.fullmatch(label)]
    cells = {(a, b): rows[a][columns.index(b)] for a in gpus for b in gpus if a != b}
    for (a, b), cell in cells.items():
        where = f"{NAME}: row {a}, column {b} is {cell!r}"
        if cell not in PCI_KINDS and not _NVLINK.fullmatch(cell):
            kinds = ", ".join(PCI_KINDS)
            raise ValueError(
                f"{where}; it must be NV followed by a number, or one of {kinds}; {AGAIN}"
            )
        if cell != cells[b, a]:
            raise ValueError(f"{where} but row {b}, column {a} is {cells[b, a]!r}; {AGAIN}")
    behind = [rows[gpu][len(columns) :] for gpu in gpus]
    blackwell = f"NV{MOST_LINKS}" in cells.values() and all(map(_on_grace, behind))
    rate = NVLINK_5_RATE if blackwell else NVLINK_RATE
    links = {
        (i, j): _link(cells[a, gpus[j]], rate)
        for i, a in enumerate(gpus)
        for j in range(i + 1, len(gpus))
    }
    sources = {"packages": f"{NAME}: every device is a GPU"}
    if most := max((link.count for link in links.values()), default=0):
        doubt = ", half of B200's" if most == MOST_LINKS and not blackwell else ""
        sources["links"] = f"{NAME}, NVLink taken for {rate // GB} GB/s a link{doubt}"
    # Columns: CPU affinity, NUMA affinity (not in old versions), the GPU's own node.
    numa = tuple(
        int(words[1]) if len(words) > 1 and words[1].isdecimal() else None for words in behind
    )
    return DeviceTree(NAME, len(gpus), tuple(range(len(gpus))), links, numa=numa, sources=sources)


TOOL = Tool(NAME, asking(COMMAND, parse), matches, parse)


def _header(lines: Sequence[str]) -> int | None:
    """Index of the header line: the first that begins with the name of a GPU and goes on with
    another label.
    """
    for index, line in enumerate(lines):
        words = line.split()
        if words and _GPU.match(words[0]) and not _CELL.fullmatch(" ".join(words[1:2])):
            return index
    return None


def _table(text: str) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return labels of the columns with cells, and the words behind each row's label: cells, then
    affinities.

    Raises:
        ValueError: if the table is damaged.
    """
    lines = text.splitlines()
    start = _header(lines)
    if start is None:
        raise ValueError(f"{NAME}: no header with GPU0 in its output; {AGAIN}")
    columns = tuple(lines[start].partition("CPU Affinity")[0].split())
    behind = (line.split() for line in lines[start + 1 :])
    rows = {
        words[0]: tuple(words[1:])
        for words in behind
        if words and (words[0] in columns or _GPU.match(words[0]))
    }
    for label in (label for label in dict.fromkeys([*columns, *rows]) if _GPU.match(label)):
        row = rows.get(label, ())
        cells = next((at for at, word in enumerate(row) if _AFFINE.fullmatch(word)), len(row))
        if label not in columns or cells != len(columns):
            raise ValueError(
                f"{NAME}: row {label} has {cells} cells for the {len(columns)} columns "
                f"{', '.join(columns)}: the table is damaged, perhaps by a narrow window; {AGAIN}"
            )
    return columns, rows


def _link(cell: str, rate: int) -> DeviceLink:
    match = _NVLINK.fullmatch(cell)
    return (
        DeviceLink("NVLINK", int(match[1]), float(int(match[1]) * rate))
        if match
        else DeviceLink(cell)
    )


def _on_grace(behind: Sequence[str]) -> bool:
    """Whether a GPU's CPU is a Grace: its affinity is all of one's cores, or the GPU's memory is a
    NUMA node.
    """
    affinity, *numbers = (*behind, "")
    first, _, last = affinity.partition("-")
    own_node = len(numbers) > 1 and numbers[1].isdecimal()
    return own_node or (
        first.isdecimal() and last.isdecimal() and int(last) - int(first) == GRACE_CORES - 1
    )
