# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``nvidia-smi topo -m``: a table of GPUs and network adapters, with CPU and NUMA affinity in later columns.

Versions differ: the NUMA columns are missing from old ones, adapters are ``NIC0`` with a legend or ``mlx5_0`` without,
the header may be underlined by escapes, blanks or tabs part the cells. What joins GPUs decides the tree, so their cells
are read strictly; all else is left out where it is not understood.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zero_topo.topology.devices import PCI_KINDS, DeviceLink, DeviceTree, Nic
from zero_topo.topology.tools import Tool, asking, plain
from zero_topo.units import GB

NAME = "nvidia-smi"
COMMAND = (NAME, "topo", "-m")
NVLINK_RATE = 25 * GB
"""Bytes/s of one link in each direction for NVLink 2 to 4 (NVIDIA's V100, A100 and H100 whitepapers); the table does
not say which generation it is. NVML does."""

_GPU = re.compile(r"GPU(\d+)")
_NVLINK = re.compile(r"NV([1-9]\d*)")
_LEGEND = re.compile(r"^\s*(NIC\d+):\s*(\S+)\s*$", re.MULTILINE)
_AFFINITY = re.compile(r"\b(CPU|NUMA) Affinity\b")


@dataclass(frozen=True)
class Table:
    """Labels of the columns with cells, and the words behind each row's label: cells, then affinities."""

    columns: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]

    @property
    def gpus(self) -> list[str]:
        """Labels of the GPU columns."""
        return [label for label in self.columns if _GPU.fullmatch(label)]


def matches(text: str) -> bool:
    """Whether a text is the table of ``nvidia-smi topo``."""
    return _header(plain(text).splitlines()) is not None and ("Affinity" in text or "Legend" in text or " X " in text)


def parse(text: str) -> DeviceTree:
    """The devices in the output of ``nvidia-smi topo -m``.

    Raises:
        ValueError: if a cell between two GPUs is missing, malformed or contradicts its mirror, naming it.
    """
    text = plain(text)
    table = _table(text)
    gpus = table.gpus
    cells = {(a, b): _gpu_cell(table, a, b) for a in gpus for b in gpus if a != b}
    links = {}
    for i, a in enumerate(gpus):
        for j, b in enumerate(gpus[:i]):
            if cells[a, b] != cells[b, a]:
                raise ValueError(
                    f"{NAME}: row {a}, column {b} is {cells[a, b]!r} but row {b}, column {a} is {cells[b, a]!r}; "
                    "capture its output again"
                )
            links[j, i] = _link(cells[a, b])
    numa = tuple(_numa(table, gpu) for gpu in gpus)
    nvlink = any(link.kind == "NVLINK" for link in links.values())
    sources = {"packages": f"{NAME}: every device is a GPU"}
    if nvlink:
        sources["links"] = f"{NAME}, NVLink taken for 25 GB/s a link"
    return DeviceTree(
        NAME,
        len(gpus),
        tuple(range(len(gpus))),
        links,
        numa=numa if any(node is not None for node in numa) else None,
        nics=_nics(table, dict(_LEGEND.findall(text))) or None,
        sources=sources,
    )


TOOL = Tool(NAME, asking(COMMAND, parse), matches, parse)


def _header(lines: Sequence[str]) -> int | None:
    """Index of the header line: the first whose first word is a GPU and that does not go on with cells."""
    for index, line in enumerate(lines):
        words = line.split()
        if words and _GPU.fullmatch(words[0]) and (len(words) == 1 or words[1] != "X") and line[:1].isspace():
            return index
    return None


def _table(text: str) -> Table:
    lines = text.splitlines()
    start = _header(lines)
    if start is None:
        raise ValueError(f"{NAME}: no header with GPU0 in its output; capture `{' '.join(COMMAND)}`")
    header = _AFFINITY.split(lines[start])[0].split()
    columns = tuple(header)
    split = [line.split() for line in lines[start + 1 :]]
    rows = {words[0]: tuple(words[1:]) for words in split if words and words[0] in columns}
    return Table(columns, rows)


def _gpu_cell(table: Table, row: str, column: str) -> str:
    """The cell of two GPUs.

    Raises:
        ValueError: if it is missing or malformed.
    """
    place = table.columns.index(column)
    cells = table.rows.get(row, ())
    cell = cells[place] if place < len(cells) else ""
    if cell not in PCI_KINDS and not _NVLINK.fullmatch(cell):
        raise ValueError(
            f"{NAME}: row {row}, column {column} is {cell!r}; it must be NV followed by a number, or one of "
            f"{', '.join(PCI_KINDS)}; capture its output again (`{' '.join(COMMAND)}`)"
        )
    return cell


def _link(cell: str) -> DeviceLink:
    match = _NVLINK.fullmatch(cell)
    return DeviceLink("NVLINK", int(match[1]), float(int(match[1]) * NVLINK_RATE)) if match else DeviceLink(cell)


def _numa(table: Table, gpu: str) -> int | None:
    """NUMA node from the columns behind the cells: CPU affinity, NUMA affinity (not in old versions), the GPU's own."""
    behind = table.rows[gpu][len(table.columns) :]
    return int(behind[1]) if len(behind) > 1 and behind[1].isdecimal() else None


def _nics(table: Table, legend: dict[str, str]) -> tuple[Nic, ...]:
    """Adapters with the GPUs they are closest to; none for those across the system from all."""
    found = []
    for place, label in enumerate(table.columns):
        if _GPU.fullmatch(label):
            continue
        cells = [row[place] if place < len(row) else "" for row in (table.rows[gpu] for gpu in table.gpus)]
        known = [PCI_KINDS.index(cell) for cell in cells if cell in PCI_KINDS]
        best = PCI_KINDS[min(known)] if known else "SYS"
        closest = tuple(gpu for gpu, cell in enumerate(cells) if cell == best != "SYS")
        found.append(Nic(legend.get(label, label), closest))
    return tuple(found)
