# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Describes one node's devices as a device tool reports them, and derives the part of a topology
they determine.

Packages
    A *package* is what the tree calls a GPU: the devices that share one, such as the two GCDs of an
    AMD MI250X, are the ranks of one gpu domain. Tools do not report packages. On an MI250X every
    pair of GCDs reports the type XGMI, one ``group`` and often the same weight, so neither groups
    them; the number of links does (see ``tools/xgmi.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zero_topo.strict import Count, read
from zero_topo.topology.model import Link, Topology
from zero_topo.topology.ring import ring_bandwidth

PCI_KINDS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Kinds of PCIe paths, from the closest to the farthest: a switch, several, a host bridge, a NUMA
node, the system.
"""

KINDS = ("NVLINK", "XGMI", *PCI_KINDS, "PCIE", "NONE")
"""Kinds of a link: "PCIE" is any path through PCIe, "NONE" no direct link though the devices share
a fabric.
"""

ASSUMED_LATENCY = 3.4e-6
"""Latency in seconds, from NCCL's tuning table for rings of the Simple protocol in a node; no tool
reports it.
"""

FIELDS = ("packages", "links", "numa", "bus_ids")
"""The fields of a :class:`DeviceTree` that one tool may leave unknown and another may complete."""


@dataclass(frozen=True)
class DeviceLink:
    """Describes the link of two devices.

    Attributes:
        kind: one of :data:`KINDS`.
        count: physical links, 0 where it is not known or there is none.
        bandwidth: bytes/s in each direction over all of them, or None if unknown.
    """

    kind: str
    count: int = 0
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"link kind {self.kind!r} is unknown; it must be one of {', '.join(KINDS)}"
            )


@dataclass(frozen=True)
class DeviceTree:
    """Describes the devices of one node, numbered from 0 as the tool does.

    Attributes:
        tool: the source, for example "rocm-smi".
        count: number of devices.
        packages: package number of each device, or None if the tool does not report it.
        links: ``(i, j)`` with ``i < j`` -> link; absent pairs are unknown.
        numa: NUMA node of each device, None where unknown; None if none is known.
        bus_ids: PCI address of each device as :func:`normal_bus_id` writes it, or None.
        sources: field -> where it came from.

    Raises:
        ValueError: if a field does not fit the number of devices.
    """

    tool: str
    count: int
    packages: tuple[int, ...] | None = None
    links: Mapping[tuple[int, int], DeviceLink] = field(default_factory=dict, hash=False)
    numa: tuple[int | None, ...] | None = None
    bus_ids: tuple[str, ...] | None = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        read(Count, f"{self.tool}: number of devices", self.count)
        for key in ("packages", "numa", "bus_ids"):
            values = getattr(self, key)
            if values is not None and len(values) != self.count:
                raise ValueError(
                    f"{self.tool}: {len(values)} {key} for {self.count} devices; capture its "
                    "output again"
                )
        if self.numa is not None and set(self.numa) == {None}:
            object.__setattr__(self, "numa", None)
        wrong = [pair for pair in self.links if not 0 <= pair[0] < pair[1] < self.count]
        if wrong:
            raise ValueError(
                f"{self.tool}: link of devices {wrong[0]}, but there are {self.count}; capture it "
                "again"
            )
        said = {key: self.tool for key in FIELDS if getattr(self, key)}
        object.__setattr__(self, "sources", {"count": self.tool, **said, **self.sources})

    def link(self, a: int, b: int) -> DeviceLink | None:
        """Return the link of two devices, in any order; None if unknown."""
        return self.links.get((min(a, b), max(a, b)))

    def groups(self) -> list[list[int]]:
        """Return the devices of each package, ordered by first device; single devices if packages
        are unknown.
        """
        packages = self.packages or tuple(range(self.count))
        members: dict[int, list[int]] = {}
        for device, package in enumerate(packages):
            members.setdefault(package, []).append(device)
        return list(members.values())

    def shape(self) -> tuple[int, int]:
        """Return ``(gpus_per_node, ranks_per_gpu)``.

        Raises:
            ValueError: if packages differ in their number of devices, naming the odd device.
        """
        groups = self.groups()
        usual = max(map(len, groups))
        odd = next((group for group in groups if len(group) != usual), None)
        if odd is not None:
            address = f" ({self.bus_ids[odd[0]]})" if self.bus_ids else ""
            raise ValueError(
                f"{self.tool}: device {odd[0]}{address} is in a package of {len(odd)} where others "
                f"have {usual}: a "
                "device is missing or hidden, so the node has no regular tree; make all visible, "
                "or state the machine: "
                '{"nodes": N, "gpus_per_node": G, "ranks_per_gpu": R}'
            )
        return len(groups), usual

    def places(self) -> tuple[int, ...]:
        """Return each device's tree place in the node, ``[count]``: package by package, by their
        first device.
        """
        ordered = [device for group in self.groups() for device in group]
        return tuple(sorted(range(self.count), key=ordered.__getitem__))

    def node_links(self) -> dict[str, Link]:
        """Return the links of "gpu" and "node", as far as bandwidths are known; latencies are
        assumed.

        A package has the bandwidth of its slowest link, the node that of the best ring through all
        devices. A ring runs through each package, so the node's is unknown if that of a package is:
        partitions of a GPU share its links.
        """
        groups = self.groups()
        inside = [self._bandwidth(a, b) for group in groups for a in group for b in group if a < b]
        found = {"gpu": min(inside, default=0.0)}
        if len(groups) > 1 and (found["gpu"] or not inside):
            rates = [[self._bandwidth(a, b) for b in range(self.count)] for a in range(self.count)]
            found["node"] = ring_bandwidth(rates)
        return {domain: Link(rate, ASSUMED_LATENCY) for domain, rate in found.items() if rate > 0}

    def _bandwidth(self, a: int, b: int) -> float:
        link = None if a == b else self.link(a, b)
        return (link.bandwidth if link else None) or 0.0

    def select(self, devices: Sequence[int]) -> DeviceTree:
        """Return the tree of some of the devices, renumbered in the given order.

        Raises:
            ValueError: if one is named twice or does not exist.
        """
        new = {device: number for number, device in enumerate(devices)}
        if len(new) != len(devices) or not all(0 <= device < self.count for device in new):
            raise ValueError(
                f"{self.tool} has the devices 0 to {self.count - 1}, not {list(devices)} once each"
            )
        pairs = {
            (new[a], new[b]): link for (a, b), link in self.links.items() if a in new and b in new
        }
        return replace(
            self,
            count=len(new),
            packages=self.packages and tuple(self.packages[device] for device in devices),
            links={(min(pair), max(pair)): link for pair, link in pairs.items()},
            numa=self.numa and tuple(self.numa[device] for device in devices),
            bus_ids=self.bus_ids and tuple(self.bus_ids[device] for device in devices),
        )

    def topology(self, nodes: int = 1) -> Topology:
        """Return a topology of ``nodes`` such nodes with a rank on every device, in tree order.

        Raises:
            ValueError: if packages differ in their number of devices.
        """
        gpus, dies = self.shape()
        links = self.node_links()
        return Topology(self.tool, nodes, gpus, dies, links=links, sources=self.origins(links))

    def origins(self, links: Mapping[str, Any]) -> dict[str, str]:
        """Return the sources of the topology's fields that follow from the devices."""
        packages = self.sources.get(
            "packages", f"{self.tool} does not report them: every device is taken for a GPU"
        )
        known = {"gpus_per_node": packages, "ranks_per_gpu": packages}
        if links:
            known["links"] = f"{self.sources['links']}; latency assumed"
        return known

    def warnings(self) -> list[str]:
        """Return warnings about the reliability of the tree."""
        if self.packages is not None or not any(
            link.kind == "XGMI" for link in self.links.values()
        ):
            return []
        if any(link.bandwidth for link in self.links.values()):
            why = f"{self.count} devices without PCI addresses, so partitions of a GPU (CPX, TPX)"
            more = "`rocm-smi --showbus`"
        else:
            why = "XGMI links but no bandwidths, so the GCDs of a GPU"
            more = "`rocm-smi --shownodesbw` or of a newer `amd-smi topology --json`"
        return [
            f"{self.tool} shows {why} cannot be recognized: every device is taken for a GPU. Add "
            f"the output of {more}"
        ]


def physical(bus_id: str) -> str:
    """Return a PCI address without its function, which numbers the partitions of one AMD GPU."""
    return bus_id.rpartition(".")[0]


def partitioned(bus_ids: Sequence[str] | None) -> bool:
    """Return whether two of the devices are partitions of one GPU."""
    return len({physical(address) for address in bus_ids or ()}) < len(bus_ids or ())


def normal_bus_id(text: str) -> str:
    """Normalize a PCI address to ``"0000:c1:00.0"``: four domain digits (NVML: eight), lower case
    (rocm-smi: upper).

    Raises:
        ValueError: if the text is not a PCI address.
    """
    head, _, function = text.strip().lower().rpartition(".")
    parts = head.split(":")
    try:
        domain, bus, device = ("0", *parts)[-3:] if len(parts) == 2 else parts
        return (
            f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{int(function, 16):x}"
        )
    except ValueError:
        raise ValueError(
            f"{text!r} is no PCI address; it should look like '0000:c1:00.0'"
        ) from None


def merge(trees: Sequence[DeviceTree]) -> DeviceTree:
    """Complete the first tree with fields that only later ones have; the first tree with a field
    wins.

    Devices are matched by bus id if both trees have them, else by number.

    Raises:
        ValueError: if there is no tree, or the trees have different devices.
    """
    if not trees:
        raise ValueError("no tool described any device; name at least one")
    found = trees[0]
    for other in trees[1:]:
        other = _aligned(other, found)
        news = {
            key: getattr(other, key)
            for key in FIELDS
            if not getattr(found, key) and getattr(other, key)
        }
        sources = {**found.sources, **{key: other.sources[key] for key in news}}
        found = replace(found, **news, sources=sources)
    return found


def _aligned(tree: DeviceTree, like: DeviceTree) -> DeviceTree:
    """Return ``tree`` with its devices in the order of ``like``, without devices that ``like``
    lacks.
    """
    if tree.bus_ids and partitioned(like.bus_ids) and not partitioned(tree.bus_ids):
        return _of_partitions(tree, like)
    if tree.bus_ids and like.bus_ids:
        missing = [bus for bus in like.bus_ids if bus not in tree.bus_ids]
        if not missing:
            return tree.select([tree.bus_ids.index(bus) for bus in like.bus_ids])
        raise ValueError(
            f"{tree.tool} does not list device {missing[0]} of {like.tool}; capture both on one "
            "node"
        )
    if tree.count != like.count:
        raise ValueError(
            f"{like.tool} sees {like.count} devices but {tree.tool} {tree.count}; capture both on "
            "one node, with the same devices visible"
        )
    return tree


def _of_partitions(tree: DeviceTree, like: DeviceTree) -> DeviceTree:
    """Return the NUMA nodes of ``tree``, which lists whole GPUs, for the partitions that ``like``
    lists.
    """
    nodes = dict(zip(map(physical, tree.bus_ids or ()), tree.numa or (), strict=False))
    numa = tuple(nodes.get(physical(address)) for address in like.bus_ids or ())
    return DeviceTree(tree.tool, like.count, numa=numa, bus_ids=like.bus_ids)
