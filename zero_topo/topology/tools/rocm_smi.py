# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``rocm-smi``: link types, NUMA nodes and bus ids as text or JSON, and the bandwidth matrix, which
only text has.

The formats are those of ``python_smi_tools/rocm_smi.py`` in ROCm/rocm_smi_lib
(``--shownodesbw --json`` prints no bandwidth there); samples in ROCm's release notes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from zero_topo.strict import parse_json
from zero_topo.topology.devices import DeviceTree, normal_bus_id
from zero_topo.topology.tools import Tool, asking
from zero_topo.topology.tools.xgmi import Pair, amd_tree

NAME = "rocm-smi"
COMMAND = (NAME, "--showbus", "--showtopo", "--shownodesbw")
"""One call for everything: each takes half a second or more."""

_LABEL = re.compile(r"GPU\d+")
_FACT = re.compile(r"GPU\s*\[?(\d+)\]?\s*:\s*(.+?):\s*(\S+)\s*")
_PAIR = re.compile(r"\(Topology\) (.+?) between DRM devices (\d+) and (\d+)", re.IGNORECASE)
_CARD = re.compile(r"card(\d+)")
_BANDWIDTH_CELL = re.compile(r"\d+-\d+")
_TYPE_CELL = re.compile(r"XGMI|PCIE", re.IGNORECASE)


def matches(text: str) -> bool:
    """Whether a text is output of rocm-smi with anything about its topology."""
    if text.lstrip().startswith("{"):
        return "(Topology)" in text
    return "(Topology)" in text or "Units: mps" in text or "between two GPUs" in text


def parse(text: str) -> DeviceTree:
    """The devices in the output of rocm-smi with any of ``--showtopo``, ``--shownodesbw``,
    ``--showbus``.

    Raises:
        ValueError: if it is broken or names no device.
    """
    return _parse_json(text) if text.lstrip().startswith("{") else _parse_text(text)


TOOL = Tool(NAME, asking(COMMAND, parse), matches, parse)


def _parse_text(text: str) -> DeviceTree:
    matrices = _matrices(text)
    facts: dict[str, dict[int, str]] = {}
    for match in _FACT.finditer(text):
        facts.setdefault(match[2].strip(), {})[int(match[1])] = match[3]
    labelled = [int(row[0][3:]) for row in matrices[0]] if matrices else []
    numbers = labelled or sorted({number for table in facts.values() for number in table})
    bandwidths = _cells(matrices, _BANDWIDTH_CELL)
    types = _cells(matrices, _TYPE_CELL)
    return _tree(numbers, bandwidths, types, facts)


Matrix = tuple[tuple[str, ...], ...]


def _matrices(text: str) -> list[Matrix]:
    """The rows of each table of the text, label first; the labels of the columns are those of the
    rows.

    Raises:
        ValueError: if a row has another number of cells than there are columns, naming it.
    """
    columns: tuple[str, ...] = ()
    found: list[list[tuple[str, ...]]] = []
    for words in (tuple(line.split()) for line in text.splitlines()):
        if words and all(map(_LABEL.fullmatch, words)) and not (columns and len(words) == 1):
            columns = words
            found.append([])
        elif columns and words and words[0] in columns:
            if len(words) != len(columns) + 1:
                raise ValueError(
                    f"{NAME}: row {words[0]} of a table has {len(words) - 1} cells for "
                    f"{len(columns)} devices; capture its output again"
                )
            found[-1].append(words)
            columns = () if len(found[-1]) == len(columns) else columns
    if columns:
        raise ValueError(
            f"{NAME}: {len(found[-1])} rows for {len(columns)} columns in a table; capture it again"
        )
    return [tuple(rows) for rows in found]


def _cells(matrices: list[Matrix], kind: re.Pattern[str]) -> dict[Pair, str]:
    """Cells above the diagonal of the first table with such cells."""
    for rows in matrices:
        if any(kind.fullmatch(cell) for row in rows for cell in row):
            return {
                (a, b): rows[a][b + 1] for a in range(len(rows)) for b in range(a + 1, len(rows))
            }
    return {}


def _parse_json(text: str) -> DeviceTree:
    data: dict[str, Any] = parse_json(text, NAME)
    facts: dict[str, dict[int, str]] = {}
    for card, values in data.items():
        match = _CARD.fullmatch(card)
        for key, value in values.items() if match and isinstance(values, Mapping) else ():
            facts.setdefault(key, {})[int(match[1])] = str(value)  # type: ignore[index]
    tables: dict[str, dict[Pair, str]] = {}
    system = data.get("system", {})
    for key, value in system.items() if isinstance(system, Mapping) else ():
        match = _PAIR.fullmatch(key)
        if match:
            a, b = sorted((int(match[2]), int(match[3])))
            tables.setdefault(match[1].lower(), {})[a, b] = str(value)
    types = tables.get("link type", {})
    paired = {number for table in tables.values() for pair in table for number in pair}
    numbers = sorted(paired.union(*facts.values()))
    place = {number: index for index, number in enumerate(numbers)}
    return _tree(
        numbers, {}, {(place[a], place[b]): value for (a, b), value in types.items()}, facts
    )


def _tree(
    numbers: list[int],
    bandwidths: dict[Pair, str],
    types: dict[Pair, str],
    facts: Mapping[str, Mapping[int, str]],
) -> DeviceTree:
    if not numbers:
        raise ValueError(f"{NAME}: its output names no GPU; capture `{' '.join(COMMAND)}`")
    numa = _column(facts.get("(Topology) Numa Node", {}), numbers, int)
    bus_ids = _column(facts.get("PCI Bus", {}), numbers, normal_bus_id)
    return amd_tree(NAME, len(numbers), bandwidths, types, numa, bus_ids)


def _column(
    values: Mapping[int, str], numbers: list[int], read: Callable[[str], Any]
) -> tuple[Any, ...] | None:
    return (
        tuple(read(values[number]) for number in numbers)
        if all(number in values for number in numbers)
        else None
    )
