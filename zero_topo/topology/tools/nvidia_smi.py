# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Parses ``nvidia-smi topo -m``: a table of GPUs and network adapters, with CPU and NUMA affinity in later columns.

Versions differ: the NUMA columns are missing from old ones, blanks or tabs part the cells. A table that a paste damaged
(wrapped lines, cells or labels that run into each other) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zero_topo.topology.devices import PCI_KINDS, DeviceLink, DeviceTree
from zero_topo.topology.tools import Tool, asking
from zero_topo.units import GB

NAME = "nvidia-smi"
COMMAND = (NAME, "topo", "-m")
NVLINK_RATE = 25 * GB
"""Bytes/s of one link in each direction for NVLink 2 to 4 (NVIDIA's V100, A100 and H100 whitepapers); the table does
not say which generation it is. NVML does."""

GRACE_GPUS, NVLINK_5_LINKS, NVLINK_5_RATE = 4, 18, 50 * GB
"""A node of four GPUs with 18 links each is a tray of GB200 or GB300, whose NVLink 5 has twice the rate; nodes of H100
with 18 links have eight GPUs, as have those of B200, which the table does not distinguish from them."""

_GPU = re.compile(r"GPU(\d+)")
_AFFINE = re.compile(r"\d[\d,-]*|N/A")
_CELL = re.compile(rf"{'|'.join(PCI_KINDS)}|NV\d+|X")
_NVLINK = re.compile(r"NV([1-9]\d*)")


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
    return _header(text.splitlines()) is not None and ("Affinity" in text or "Legend" in text or " X " in text)


def parse(text: str) -> DeviceTree:
    """The devices in the output of ``nvidia-smi topo -m``.

    Raises:
        ValueError: if a row has another number of cells than there are columns, or a cell between two GPUs is malformed
            or contradicts its mirror.
    """
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
            links[j, i] = _link(cells[a, b], len(gpus))
    numa = tuple(_numa(table, gpu) for gpu in gpus)
    nvlink = any(link.kind == "NVLINK" for link in links.values())
    sources = {"packages": f"{NAME}: every device is a GPU"}
    if nvlink:
        rate = _rate(len(gpus), max(link.count for link in links.values()))
        sources["links"] = f"{NAME}, NVLink taken for {rate // GB} GB/s a link"
    known = numa if any(node is not None for node in numa) else None
    return DeviceTree(NAME, len(gpus), tuple(range(len(gpus))), links, numa=known, sources=sources)


TOOL = Tool(NAME, asking(COMMAND, parse), matches, parse)


def _header(lines: Sequence[str]) -> int | None:
    """Index of the header line: the first that begins with the name of a GPU and goes on with another label."""
    for index, line in enumerate(lines):
        words = line.split()
        if words and _GPU.match(words[0]) and not _CELL.fullmatch(" ".join(words[1:2])):
            return index
    return None


def _table(text: str) -> Table:
    lines = text.splitlines()
    start = _header(lines)
    if start is None:
        raise ValueError(f"{NAME}: no header with GPU0 in its output; capture `{' '.join(COMMAND)}`")
    columns = tuple(lines[start].partition("CPU Affinity")[0].split())
    behind = (line.split() for line in lines[start + 1 :])
    rows = {words[0]: tuple(words[1:]) for words in behind if words and (words[0] in columns or _GPU.match(words[0]))}
    table = Table(columns, rows)
    for label in dict.fromkeys([*table.gpus, *(row for row in rows if _GPU.match(row))]):
        row = rows.get(label, ())
        cells = next((at for at, word in enumerate(row) if _AFFINE.fullmatch(word)), len(row))
        if label not in columns or cells != len(columns):
            raise ValueError(
                f"{NAME}: row {label} has {cells} cells for the {len(columns)} columns {', '.join(columns)}: the table "
                f"is damaged; capture its output again in a wide window (`{' '.join(COMMAND)}`)"
            )
    return table


def _gpu_cell(table: Table, row: str, column: str) -> str:
    """The cell of two GPUs.

    Raises:
        ValueError: if it is malformed.
    """
    cell = table.rows[row][table.columns.index(column)]
    if cell not in PCI_KINDS and not _NVLINK.fullmatch(cell):
        raise ValueError(
            f"{NAME}: row {row}, column {column} is {cell!r}; it must be NV followed by a number, or one of "
            f"{', '.join(PCI_KINDS)}; capture its output again (`{' '.join(COMMAND)}`)"
        )
    return cell


def _link(cell: str, gpus: int) -> DeviceLink:
    match = _NVLINK.fullmatch(cell)
    if match is None:
        return DeviceLink(cell)
    count = int(match[1])
    return DeviceLink("NVLINK", count, float(count * _rate(gpus, count)))


def _rate(gpus: int, links: int) -> int:
    """Bytes/s of one link in each direction in a node of so many GPUs."""
    return NVLINK_5_RATE if (gpus, links) == (GRACE_GPUS, NVLINK_5_LINKS) else NVLINK_RATE


def _numa(table: Table, gpu: str) -> int | None:
    """NUMA node from the columns behind the cells: CPU affinity, NUMA affinity (not in old versions), the GPU's own."""
    behind = table.rows[gpu][len(table.columns) :]
    return int(behind[1]) if len(behind) > 1 and behind[1].isdecimal() else None
