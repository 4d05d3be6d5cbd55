# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``amd-smi topology --json``: one object per GPU, with a list of links (ROCm 6.3 on) or with
tables by peer (before).

Without ``--json`` it prints a table per property, whose rows and columns are named by PCI
addresses.

Formats: CHANGELOG of ROCm/amdsmi, "Updated `amd-smi topology --json` to align with host/guest".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from zero_topo.strict import parse_json
from zero_topo.topology.devices import DeviceTree, normal_bus_id
from zero_topo.topology.tools import Tool, asking
from zero_topo.topology.tools.xgmi import Pair, amd_tree

NAME = "amd-smi"
COMMAND = (NAME, "topology", "--json")
_TITLE = re.compile(r"^(LINK TYPE|NUMA BW) TABLE:[ \t]*$", re.MULTILINE)
_NUMBERED = re.compile(r'"gpu":\s*\d')
Cells = dict[tuple[int, int], Mapping[str, Any]]


def matches(text: str) -> bool:
    """Whether a text is output of ``amd-smi topology``, JSON or tables."""
    if _TITLE.search(text):
        return True
    # A topology's own JSON has a "gpu" among its links, but never a number there.
    return text.lstrip()[:1] in ("[", "{") and _NUMBERED.search(text) is not None and "link" in text


def parse(text: str) -> DeviceTree:
    """The devices in the output of ``amd-smi topology``, tables or JSON of the new or old form.

    Raises:
        ValueError: if it is broken or names no device.
    """
    if _TITLE.search(text):
        return _parse_tables(text)
    try:
        data = parse_json(text, "output")
        entries = (
            next(value for value in data.values() if isinstance(value, list))
            if isinstance(data, dict)
            else data
        )
        numbers = [int(entry["gpu"]) for entry in entries]
        cells: Cells = {}
        for entry in entries:
            read = _new_links if "links" in entry else _old_links
            cells |= {(int(entry["gpu"]), peer): cell for peer, cell in read(entry).items()}
        bus_ids = tuple(normal_bus_id(entry["bdf"]) for entry in entries if "bdf" in entry)
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{NAME}: its topology is not as expected ({what}); capture `{' '.join(COMMAND)}`"
        ) from None
    if not numbers:
        raise ValueError(
            f"{NAME}: its topology names no GPU; capture it where the GPUs are visible"
        )
    place = {number: index for index, number in enumerate(numbers)}
    bandwidths, types = (_column(cells, place, key) for key in ("bandwidth", "link_type"))
    known = bus_ids if len(bus_ids) == len(numbers) else None
    return amd_tree(NAME, len(numbers), bandwidths, types, bus_ids=known)


TOOL = Tool(NAME, asking(COMMAND, parse), matches, parse)


def _parse_tables(text: str) -> DeviceTree:
    tables: dict[str, dict[Pair, str]] = {}
    addresses: list[str] = []
    for title in _TITLE.finditer(text):
        columns, *rows = text[title.end() :].strip().splitlines()
        addresses = columns.split()
        cells = [row.split()[1:] for row in rows[: len(addresses)]]
        if not addresses or [len(row) for row in cells] != [len(addresses)] * len(addresses):
            raise ValueError(
                f"{NAME}: its {title[1]} table is not one row for each column; capture it again"
            )
        pairs = combinations(range(len(addresses)), 2)
        tables[title[1]] = {(a, b): cells[a][b] for a, b in pairs}
    bus_ids = tuple(map(normal_bus_id, addresses))
    return amd_tree(
        NAME, len(bus_ids), tables.get("NUMA BW", {}), tables.get("LINK TYPE", {}), bus_ids=bus_ids
    )


def _new_links(entry: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    return {int(link["gpu"]): link for link in entry["links"]}


def _old_links(entry: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Peers of the old form, whose tables are keyed ``gpu_N``, in the words of the new one."""
    types = entry["link_type"]
    rates = entry.get("numa_bandwidth", {})
    return {
        int(key.removeprefix("gpu_")): {"link_type": kind, "bandwidth": rates.get(key, "N/A")}
        for key, kind in types.items()
    }


def _column(cells: Cells, place: Mapping[int, int], key: str) -> dict[Pair, str]:
    """One property of every pair above the diagonal."""
    return {
        (place[a], place[b]): str(cell.get(key, "N/A"))
        for (a, b), cell in cells.items()
        if a in place and b in place and place[a] < place[b]
    }
