# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""GPUs with their NUMA nodes from a ``/sys`` tree, without any tool. It has neither packages nor
links.

A display card may be among them: they only complete the devices of a tool, which are found by their
addresses.
"""

from __future__ import annotations

from pathlib import Path

from zero_topo.topology.devices import DeviceTree, normal_bus_id
from zero_topo.topology.tools import Runner, Tool

GPU_CLASSES = ("0300", "0302", "0380", "1200")
"""PCI classes of VGA and 3D controllers, other displays, and processing accelerators (AMD
Instinct).
"""

GPU_VENDORS = ("1002", "10de")


def read_sys(root: Path) -> DeviceTree | None:
    """The GPUs in a ``/sys`` tree, or None if it has no GPU; unreadable devices are left out.

    Args:
        root: the tree, usually ``Path("/sys")``.
    """
    folder = root / "bus" / "pci" / "devices"
    places = sorted(folder.iterdir()) if folder.is_dir() else []
    gpus = sorted(device for place in places if (device := _read_gpu(place)) is not None)
    if not gpus:
        return None
    numa = tuple(None if node < 0 else node for _, node in gpus)
    return DeviceTree("sysfs", len(gpus), numa=numa, bus_ids=tuple(bus_id for bus_id, _ in gpus))


def ask_sys(_run: Runner) -> DeviceTree | None:
    """Read this node's ``/sys``; runs no program."""
    return read_sys(Path("/sys"))


TOOL = Tool("sysfs", ask_sys)


def _read_gpu(place: Path) -> tuple[str, int] | None:
    """PCI address and NUMA node (-1: unknown) of a device that is a GPU."""
    try:
        kind, vendor = (
            (place / name).read_text().strip().removeprefix("0x") for name in ("class", "vendor")
        )
        found = normal_bus_id(place.name), int((place / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return found if kind[:4] in GPU_CLASSES and vendor in GPU_VENDORS else None
