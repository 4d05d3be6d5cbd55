# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Derives links and packages from the output of AMD's tools.

For each directly linked pair of devices, the driver reports ``min-max`` MB/s: of one link, and of
all of them (``rsmi_minmax_bandwidth_get``); ``0-0`` is no direct link. The two GCDs of an MI250X
share 4 links, and no devices of different packages do (OLCF Frontier User Guide). ``groups`` is 1
over XGMI whether direct or not, and ``weight`` counts these, not links, so neither is read.

An MI300 in a partition mode (DPX, TPX, QPX, CPX) is 2 to 8 devices of one package. The driver gives
them one PCI address and numbers them in its function: ``0000:05:00.0`` to ``.7``
(ROCm/rocm_smi_lib#208, ROCm/rocm-systems#5805).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence

from zero_topo.topology.devices import DeviceLink, DeviceTree, partitioned, physical
from zero_topo.units import MB

LINKS_INSIDE_A_PACKAGE = 4
MOST_PACKAGES = 8
"""AMD GPUs in a node at most; of more devices without a PCI address, some may be partitions of one
GPU.
"""

_RANGE = re.compile(r"(\d+)-(\d+)")
Pair = tuple[int, int]


def amd_tree(
    tool: str,
    count: int,
    bandwidths: Mapping[Pair, str],
    types: Mapping[Pair, str],
    numa: tuple[int, ...] | None = None,
    bus_ids: tuple[str, ...] | None = None,
) -> DeviceTree:
    """Build a node's devices, with links and packages from the cells of both tables.

    Args:
        tool: name of the tool that printed the tables.
        count: number of devices.
        bandwidths: ``(i, j)`` with ``i < j`` -> ``"min-max"`` in MB/s, or anything else where it is
            not known.
        types: ``(i, j)`` -> "XGMI", "PCIE" or anything else where it is not known.
        numa, bus_ids: as in :class:`DeviceTree`.
    """
    ranges = {
        pair: (int(match[1]), int(match[2]))
        for pair, cell in bandwidths.items()
        if (match := _match(cell))
    }
    # All zeros is what drivers without bandwidths report, not a node without links.
    measured = any(most for _, most in ranges.values())
    links = {}
    for pair in sorted({*ranges, *types}):
        least, most = ranges.get(pair, (0, 0)) if measured else (0, 0)
        kind = types.get(pair, "XGMI" if most else "").upper()
        if most and kind == "XGMI":
            links[pair] = DeviceLink("XGMI", most // least if least else 0, float(most * MB))
        elif kind == "XGMI":
            links[pair] = DeviceLink("NONE" if measured and pair in ranges else "XGMI")
        elif kind in ("PCIE", "PCI"):
            links[pair] = DeviceLink("PCIE", 0, float(most * MB) or None)
        elif measured and pair in ranges:
            links[pair] = DeviceLink("NONE")
    on_pcie = bool(types) and all(cell.upper() in ("PCIE", "PCI") for cell in types.values())
    known = measured or on_pcie or count == 1
    packages = _packages(count, links) if known else None
    alone = (
        "no two share 4 XGMI links"
        if any(link.kind == "XGMI" for link in links.values())
        else "no XGMI joins two"
    )
    paired = packages is not None and len(set(packages)) < count
    why = "pairs with 4 XGMI links" if paired else f"every device is a GPU, as {alone}"
    if partitioned(bus_ids):
        packages = _numbered([physical(address) for address in bus_ids or ()])
        why = "partitions of a GPU, whose PCI addresses differ in the function alone"
    elif bus_ids is None and count > MOST_PACKAGES and not paired:
        packages = None
    sources = {"packages": f"{tool}: {why}"} if packages else {}
    return DeviceTree(tool, count, packages, links, numa, bus_ids, sources)


def _packages(count: int, links: Mapping[Pair, DeviceLink]) -> tuple[int, ...]:
    """Return each device's package. Devices joined by 4 links share one, unless a device has two
    such partners.
    """
    pairs = [
        pair
        for pair, link in links.items()
        if link.kind == "XGMI" and link.count == LINKS_INSIDE_A_PACKAGE
    ]
    joined = [device for pair in pairs for device in pair]
    first = {b: a for a, b in pairs} if len(joined) == len(set(joined)) else {}
    return _numbered([first.get(device, device) for device in range(count)])


def _numbered(keys: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the number of each key, counted from 0 in the order in which they first appear."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return tuple(numbers[key] for key in keys)


def _match(cell: str) -> re.Match[str] | None:
    return _RANGE.fullmatch(cell.strip())
