# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One node's devices as plain text: packages, matrix of links, adapters, and the order in which to bind ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from zero_topo.topology.devices import DeviceLink, DeviceTree
from zero_topo.units import format_rate

VISIBLE: Mapping[str, str] = MappingProxyType({"amd-smi": "ROCR_VISIBLE_DEVICES", "rocm-smi": "ROCR_VISIBLE_DEVICES"})
"""Tool -> the variable that makes devices visible; CUDA's for all others."""

SHORT: Mapping[str, str] = MappingProxyType({"NVLINK": "NV", "XGMI": "XGMI"})
"""Kinds that are written with their number of links, as nvidia-smi does."""


def render_devices(tree: DeviceTree) -> str:
    """Draw the node: packages with their devices, links by pair, how fast each kind is, adapters and sources."""
    lines = [f"node: {tree.count} devices in {len(tree.groups())} GPUs ({tree.tool})"]
    lines += _packages(tree)
    if tree.links:
        lines += ["", "links", *_matrix(tree), *_kinds(tree)]
    lines += ["", *recommended(tree)]
    lines += [f"  {key} <- {source}" for key, source in tree.sources.items()]
    lines += [f"warning: {warning}" for warning in tree.warnings()]
    return "\n".join(lines)


def recommended_order(tree: DeviceTree) -> tuple[int, ...]:
    """Device of each local rank such that consecutive ranks share a GPU, then a NUMA node."""
    numa = tree.numa or (None,) * tree.count

    def near(group: list[int]) -> tuple[int, int]:
        node = numa[group[0]]
        return (0 if node is None else node, group[0])

    return tuple(device for group in sorted(tree.groups(), key=near) for device in group)


def recommended(tree: DeviceTree) -> list[str]:
    """The order as options and variables of launchers."""
    order = ",".join(map(str, recommended_order(tree)))
    return [
        f"recommended order of ranks: devices {order}",
        f"  srun --gpu-bind=map_gpu:{order}",
        f"  export {VISIBLE.get(tree.tool, 'CUDA_VISIBLE_DEVICES')}={order}  (deepspeed, torchrun)",
    ]


def _packages(tree: DeviceTree) -> list[str]:
    lines = []
    for number, group in enumerate(tree.groups()):
        lines.append(f"`- gpu {number}")
        for device in group:
            facts = [f"device {device}"]
            facts += [tree.bus_ids[device]] if tree.bus_ids else []
            facts += [f"NUMA {tree.numa[device]}"] if tree.numa and tree.numa[device] is not None else []
            near = [nic.name for nic in tree.nics or () if device in nic.closest]
            facts += [f"near {', '.join(near)}"] if near else []
            lines.append(f"   `- {'  '.join(facts)}")
    far = [nic.name for nic in tree.nics or () if not nic.closest]
    return [*lines, *([f"adapters near no device: {', '.join(far)}"] if far else [])]


def _matrix(tree: DeviceTree) -> list[str]:
    rows = [["", *map(str, range(tree.count))]]
    for a in range(tree.count):
        rows.append([str(a), *("X" if a == b else _cell(tree.link(a, b)) for b in range(tree.count))])
    width = max(len(cell) for row in rows for cell in row)
    return ["  " + " ".join(f"{cell:<{width}}" for cell in row).rstrip() for row in rows]


def _cell(link: DeviceLink | None) -> str:
    if link is None:
        return "?"
    if link.kind == "NONE":
        return "-"
    return SHORT[link.kind] + (str(link.count) if link.count else "") if link.kind in SHORT else link.kind


def _kinds(tree: DeviceTree) -> list[str]:
    """Each kind of link once, with how many pairs have it and its bandwidth."""
    pairs = Counter((_cell(link), link.bandwidth) for link in tree.links.values())
    lines = []
    for (cell, rate), count in sorted(pairs.items(), key=lambda item: -(item[0][1] or 0.0)):
        speed = "no direct link" if cell == "-" else f"{format_rate(rate)} each way" if rate else "bandwidth unknown"
        lines.append(f"  {cell}: {count} pair{'' if count == 1 else 's'}, {speed}")
    return lines
