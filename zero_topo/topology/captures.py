# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Lists all sources of device trees, the most trusted first: tools run on this node, or captured
output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zero_topo.topology.devices import PCI_KINDS, DeviceTree, merge
from zero_topo.topology.tools import (
    Runner,
    Tool,
    amd_smi,
    clean,
    nvidia_smi,
    nvml,
    rocm_smi,
    run_tool,
    sysfs,
)

TOOLS: tuple[Tool, ...] = (amd_smi.TOOL, rocm_smi.TOOL, nvml.TOOL, nvidia_smi.TOOL)
"""Queried in this order, until one reports the packages."""

COMPLETING: tuple[Tool, ...] = (sysfs.TOOL,)
"""Queried for fields that are still unknown; they report no packages, so they only complete a
tool's tree.
"""

FORMATS: tuple[Tool, ...] = tuple(tool for tool in TOOLS if tool.parse is not None)
"""Tools whose output can be captured, the most trusted first."""

SIGNS: Mapping[str, tuple[str, str]] = {
    "nvidia-smi": (
        f"nvidia GPU0 NV {' '.join(PCI_KINDS)}",
        "a header line that begins with GPU0, and its rows",
    ),
    "amd-smi": (
        "amd-smi bdf link_type num_hops HOPS",
        'the tables LINK TYPE and NUMA BW, or the JSON of all GPUs, each with "gpu" and "links"',
    ),
    "rocm-smi": (
        "ROCm rocm-smi DRM GPU[ XGMI card0",
        "lines or keys with (Topology), or the table of bandwidths",
    ),
    "lstopo": ("<topology hwloc", "packages and rates, which its XML has not; capture another"),
}
"""Format -> words by which a text resembles it, and what a text must have to be read."""

CAPTURES = "amd-smi topology --json, rocm-smi --showtopo --shownodesbw, nvidia-smi topo -m"


Asked = tuple[DeviceTree | None, tuple[str, ...]]
"""The answers of this node's tools: the devices or None, and which tools failed and why."""

Ask = Callable[[], Asked]


def ask_tools(run: Runner = run_tool, completing: Sequence[Tool] = COMPLETING) -> Asked:
    """Query the device tools of this node, each once for at most 10 s; missing or failing ones are
    skipped.
    """
    trees: list[DeviceTree] = []
    notes: list[str] = []
    for tool in (*TOOLS, *completing):
        done = (
            trees[0].packages is not None
            if trees and tool not in completing
            else not trees and tool in completing
        )
        if done:
            continue
        try:
            tree = tool.ask(run)
            merged = merge([*trees, tree]) if tree is not None else None
        except ValueError as error:
            notes.append(f"{tool.name} skipped: {error}")
            continue
        trees = [merged] if merged is not None else trees
    return trees[0] if trees else None, tuple(notes)


def recognise(text: str) -> Tool | None:
    """Return the tool that printed a captured text, or None."""
    text = clean(text)
    return next((tool for tool in FORMATS if tool.matches and tool.matches(text)), None)


def read_captures(texts: Sequence[tuple[str, str]]) -> DeviceTree:
    """Return the devices in captured outputs, from the most trusted tool, completed by the others.

    Args:
        texts: ``(name, text)``; the name is for errors.

    Raises:
        ValueError: if a text is no known output, is broken, or they describe different devices.
    """
    found: list[tuple[int, DeviceTree]] = []
    for name, text in texts:
        tool = recognise(text)
        if tool is None or tool.parse is None:
            raise ValueError(
                f"{name} is not recognised: it is neither a topology's JSON nor output of "
                f"{CAPTURES}{_nearest(text)}"
            )
        try:
            found.append((FORMATS.index(tool), tool.parse(clean(text))))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return merge([tree for _, tree in sorted(found, key=lambda item: item[0])])


def _nearest(text: str) -> str:
    """Return what a text resembles most, and what that must have; empty if it resembles nothing."""
    counts = {}
    for name, (signs, _) in SIGNS.items():
        counts[name] = sum(sign in text for sign in signs.split())
    count, nearest = max((count, name) for name, count in counts.items())
    return f"; it is nearest to {nearest}, but lacks {SIGNS[nearest][1]}" if count else ""
