# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""PCI devices with their NUMA nodes: from ``lstopo --of xml`` (hwloc 2), or from a ``/sys`` tree without any tool.

Neither knows GPU packages or links between GPUs; both tell which adapter hangs near which GPU, by how much of the way
from the root they share.
"""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zero_topo.topology.devices import DeviceTree, Nic, normal_bus_id
from zero_topo.topology.tools import Runner, Tool, asking

GPU_CLASSES = ("0300", "0302", "0380", "1200")
"""PCI classes of VGA and 3D controllers, other displays, and processing accelerators (AMD Instinct)."""

GPU_VENDORS = ("1002", "10de")
VGA_CLASS = "0300"
BMC_GRAPHICS = ("1002:515e", "1002:5969")
"""ATI ES1000, the graphics of many servers' management controllers; ASPEED's and Matrox' are no GPU vendor's."""

NIC_CLASSES = ("0200", "0207", "0280")
"""PCI classes of Ethernet, InfiniBand and other network controllers."""


@dataclass(frozen=True)
class PciDevice:
    """A PCI device: address, class and vendor:device in hex, NUMA node, name if it is an adapter, the way to it."""

    bus_id: str
    kind: str
    model: str
    numa: int | None
    name: str
    way: tuple[str, ...]


def matches(text: str) -> bool:
    """Whether a text is the XML of hwloc."""
    return text.lstrip().startswith("<?xml") and "<topology" in text


def parse(text: str) -> DeviceTree:
    """The GPUs and adapters in the output of ``lstopo --of xml``.

    Raises:
        ValueError: if it is broken or has no GPU.
    """
    try:
        root = ElementTree.fromstring(text)  # as text, whatever encoding it once had
    except ElementTree.ParseError as error:
        raise ValueError(f"hwloc: broken XML ({error}); capture `lstopo --of xml` again") from None
    found = _tree("hwloc", list(_walk(root, (), None)))
    if found is None:
        raise ValueError("hwloc: no GPU among its PCI devices; capture `lstopo --of xml` on a node that has them")
    return found


def read_sys(root: Path) -> DeviceTree | None:
    """The GPUs and adapters in a ``/sys`` tree, or None if it has no GPU; unreadable devices are left out.

    Args:
        root: the tree, usually ``Path("/sys")``.
    """
    folder = root / "bus" / "pci" / "devices"
    places = sorted(folder.iterdir()) if folder.is_dir() else []
    return _tree("sysfs", [device for place in places if (device := _read_device(place)) is not None])


def ask_sys(_run: Runner) -> DeviceTree | None:
    """Read this node's ``/sys``; runs no program."""
    return read_sys(Path("/sys"))


TOOL = Tool("hwloc", asking(("lstopo", "--of", "xml"), parse), matches, parse)
SYSFS = Tool("sysfs", ask_sys)


def _read_device(place: Path) -> PciDevice | None:
    try:
        kind = (place / "class").read_text().strip().removeprefix("0x")[:4]
        vendor = (place / "vendor").read_text().strip().removeprefix("0x")
        device = (place / "device").read_text().strip().removeprefix("0x") if (place / "device").is_file() else ""
        numa = int((place / "numa_node").read_text())
        bus_id = normal_bus_id(place.name)
    except (OSError, ValueError):
        return None
    names = [entry.name for sub in ("infiniband", "net") if (place / sub).is_dir() for entry in (place / sub).iterdir()]
    # The kernel lists devices as links into its tree of bridges; a copied tree may hold plain folders.
    way = tuple(part for part in Path(os.path.realpath(place)).parts if ":" in part)
    return PciDevice(bus_id, kind, f"{vendor}:{device}", numa if numa >= 0 else None, min(names, default=bus_id), way)


def _walk(element: ElementTree.Element, way: tuple[str, ...], numa: int | None) -> Iterable[PciDevice]:
    """All PCI devices below an object of hwloc; what lies around them tells their NUMA node and way."""
    for number, child in enumerate(element.findall("object")):
        here, kind = (*way, str(number)), child.get("type", "")
        near = _single_node(child.get("nodeset")) if kind not in ("Bridge", "PCIDev", "OSDev") else numa
        near = numa if near is None else near
        if kind == "PCIDev" and "pci_busid" in child.attrib:
            words = child.get("pci_type", "").replace("[", " ").replace("]", " ").split()
            names = [part.get("name", "") for part in child.findall("object") if part.get("type") == "OSDev"]
            bus_id = normal_bus_id(child.attrib["pci_busid"])
            model = words[1] if len(words) > 1 else ""
            yield PciDevice(bus_id, words[0] if words else "", model, near, min(names, default=bus_id), here)
        yield from _walk(child, here, near)


def _single_node(nodeset: str | None) -> int | None:
    """The NUMA node of a set of one, written ``0x00000008`` or, beyond 32, ``0x00000001,0x0``; else None."""
    words = (nodeset or "").split(",")
    if not all(word.startswith("0x") for word in words):
        return None
    bits = int("".join(f"{int(word, 16):08x}" for word in words), 16)
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None


def _tree(tool: str, devices: list[PciDevice]) -> DeviceTree | None:
    gpus = sorted((device for device in devices if _is_gpu(device)), key=lambda d: d.bus_id)
    if any(gpu.kind != VGA_CLASS for gpu in gpus):  # beside processors without a screen, what has one computes nothing
        gpus = [gpu for gpu in gpus if gpu.kind != VGA_CLASS]
    nics = [device for device in devices if device.kind in NIC_CLASSES]
    if not gpus:
        return None
    return DeviceTree(
        tool,
        len(gpus),
        numa=tuple(gpu.numa for gpu in gpus) if any(gpu.numa is not None for gpu in gpus) else None,
        bus_ids=tuple(gpu.bus_id for gpu in gpus),
        nics=tuple(Nic(nic.name, _closest(nic, gpus)) for nic in nics) or None,
    )


def _is_gpu(device: PciDevice) -> bool:
    vendor = device.model.partition(":")[0]
    return device.kind in GPU_CLASSES and vendor in GPU_VENDORS and device.model not in BMC_GRAPHICS


def _closest(nic: PciDevice, gpus: list[PciDevice]) -> tuple[int, ...]:
    """GPUs that share the longest way with the adapter; failing any, those of its NUMA node."""
    shared = [_shared(nic.way, gpu.way) for gpu in gpus]
    if max(shared) > min(shared) or max(shared) > 1:
        return tuple(index for index, length in enumerate(shared) if length == max(shared))
    return tuple(index for index, gpu in enumerate(gpus) if gpu.numa is not None and gpu.numa == nic.numa)


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Steps that two ways from the root have in common."""
    return next(
        (step for step, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
