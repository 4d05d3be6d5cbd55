# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``nvidia-smi topo -m``: a table of GPUs and network adapters, with CPU and NUMA affinity in later columns.

Versions differ: the NUMA columns are missing from old ones, adapters are ``NIC0`` with a legend or ``mlx5_0`` without,
the header may be underlined by escapes, blanks or tabs part the cells. So do captures: the header's leading blank is
lost, lines are wrapped, cells and labels run into each other. What joins GPUs decides the tree, so their cells are read
strictly, and a row with another number of cells than there are columns is refused.
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

GRACE_GPUS, NVLINK_5_LINKS, NVLINK_5_RATE = 4, 18, 50 * GB
"""A node of four GPUs with 18 links each is a tray of GB200 or GB300, whose NVLink 5 has twice the rate; nodes of H100
with 18 links have eight GPUs, as have those of B200, which the table does not tell from them."""

_GPU = re.compile(r"GPU(\d+)")
_LABEL = re.compile(r"GPU\d+|NIC\d+|mlx\d+_\d+")
_AFFINE = re.compile(r"\d[\d,-]*|N/A")
_CELL = re.compile(rf"{'|'.join(PCI_KINDS)}|NV\d+|X")
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
            links[j, i] = _link(cells[a, b], len(gpus))
    numa = tuple(_numa(table, gpu) for gpu in gpus)
    nvlink = any(link.kind == "NVLINK" for link in links.values())
    sources = {"packages": f"{NAME}: every device is a GPU"}
    if nvlink:
        rate = _rate(len(gpus), max(link.count for link in links.values()))
        sources["links"] = f"{NAME}, NVLink taken for {rate // GB} GB/s a link"
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
        if words and _LABEL.match(words[0]) and _GPU.match(words[0]) and not _is_row(words):
            return index
    return None


def _is_row(words: Sequence[str]) -> bool:
    """Whether words are a label and cells."""
    return bool(_LABEL.fullmatch(words[0])) and len(words) > 1 and len(_apart(words[1], _CELL)) > 0


def _apart(word: str, kind: re.Pattern[str]) -> list[str]:
    """The cells or labels that make up a word, several if they run into each other; none if it is something else."""
    found = kind.findall(word)
    return found if "".join(found) == word else []


def _table(text: str) -> Table:
    lines = text.splitlines()
    start = _header(lines)
    if start is None:
        raise ValueError(f"{NAME}: no header with GPU0 in its output; capture `{' '.join(COMMAND)}`")
    end = next((at for at, line in enumerate(lines) if at > start and "Legend" in line), len(lines))
    first = next((at for at in range(start, end) if _is_row(lines[at].split() or [""])), end)
    header = _AFFINITY.split(" ".join(lines[start:first]))[0].split()
    columns = tuple(label for word in header for label in _apart(word, _LABEL) or [word])
    rows: dict[str, tuple[str, ...]] = {}
    label = ""
    for line in lines[first:end]:  # a line that begins with no label goes on with the row before
        words = line.split()
        new = bool(words) and (words[0] in columns or bool(_GPU.fullmatch(words[0])))
        label = words.pop(0) if new else label
        if label:
            cells = (part for word in words for part in _apart(word, _CELL) or [word])
            rows[label] = (*rows.get(label, ()), *cells)
    table = Table(columns, rows)
    _check(table)
    return table


def _check(table: Table) -> None:
    """Refuse rows of GPUs without a column, and rows of another number of cells than there are columns."""
    lost = [label for label in table.rows if _GPU.fullmatch(label) and label not in table.columns]
    if lost:
        raise ValueError(
            f"{NAME}: its header names {', '.join(table.gpus)} but there is a row {lost[0]}; capture its output again "
            f"in a wider window (`{' '.join(COMMAND)}`)"
        )
    for gpu in table.gpus:
        row = table.rows.get(gpu, ())
        cells = next((at for at, word in enumerate(row) if _AFFINE.fullmatch(word)), len(row))
        if cells != len(table.columns):
            raise ValueError(
                f"{NAME}: row {gpu} has {cells} cells for {len(table.columns)} columns; capture its output again "
                f"(`{' '.join(COMMAND)}`)"
            )


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
