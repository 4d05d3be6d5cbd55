# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Where each rank really runs, as it sees it itself, and the tree that all of them together make (pure).

The caller gathers one :class:`Seat` per rank, for example with ``all_gather_object``, and every rank then judges the
same list, so all come to the same tree or to the same error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from zero_topo.topology.checks import check_keys
from zero_topo.topology.devices import DeviceTree, normal_bus_id
from zero_topo.topology.hosts import check_hosts
from zero_topo.topology.model import Topology
from zero_topo.topology.render import compress

K = TypeVar("K")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
WAY_OUT = 'start the same ranks on every node, leave out the odd host, or state the machine in "topology"'


@dataclass(frozen=True)
class Seat:
    """What one rank contributes; JSON types only.

    Attributes:
        host: host name, for messages.
        boot_id: tells machines apart whose names are alike ("localhost"); "" where unknown.
        local_rank: number on the node, or None.
        bus_id: PCI address of its device as :func:`normal_bus_id` writes it, or None (no device, or not known).
        package: number of its device's GPU package on the node, or None.
        numa: NUMA node of its device, or None.
        devices: ``[devices, packages]`` that its node's tool sees, or None.
    """

    host: str
    boot_id: str = ""
    local_rank: int | None = None
    bus_id: str | None = None
    package: int | None = None
    numa: int | None = None
    devices: tuple[int, int] | None = None

    @property
    def machine(self) -> str:
        """What tells the rank's machine from others."""
        return self.boot_id or self.host

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` builds an equal seat."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Seat:
        """Read :meth:`to_json` back.

        Raises:
            ValueError: for an unknown key, or without a host.
        """
        check_keys("seat", data, [item.name for item in fields(cls)], required=("host",))
        devices = data.get("devices")
        return cls(**{**data, "devices": None if devices is None else tuple(devices)})


@dataclass(frozen=True)
class SeatedTree:
    """The tree the seats make: shape, tree position of each rank or None for block order, host name of each node."""

    nodes: int
    gpus_per_node: int
    ranks_per_gpu: int
    order: tuple[int, ...] | None
    hosts: tuple[str, ...]


def take_seat(host: str, local_rank: int | None, bus_id: str | None, tree: DeviceTree | None) -> Seat:
    """This rank's seat.

    Args:
        host: host name.
        local_rank: number on the node, or None.
        bus_id: PCI address of the rank's device in any form, or None.
        tree: this node's devices, or None.

    Raises:
        ValueError: if the bus id is none.
    """
    address = None if bus_id is None else normal_bus_id(bus_id)
    known = tree is not None and tree.bus_ids is not None and address in tree.bus_ids
    device = tree.bus_ids.index(address) if tree and tree.bus_ids and known and address else None
    return Seat(
        host=host,
        boot_id=BOOT_ID.read_text().strip() if BOOT_ID.exists() else "",
        local_rank=local_rank,
        bus_id=address,
        package=tree.packages[device] if tree and tree.packages and device is not None else None,
        numa=tree.numa[device] if tree and tree.numa and device is not None else None,
        devices=(tree.count, len(tree.groups())) if tree and tree.packages else None,
    )


def agree(seats: Sequence[Seat]) -> SeatedTree:
    """The tree that the seats of all ranks make, in rank order; nodes and GPUs in order of their first rank.

    Where no rank knows its package, each is taken for a GPU of its own.

    Raises:
        ValueError: naming the odd host, if hosts have unequal ranks, see different devices, share a device between
            ranks, lack a die of a package, or know packages only in part.
    """
    if not seats:
        raise ValueError("no rank reports where it runs; gather one seat per rank")
    nodes = _grouped(range(len(seats)), lambda rank: seats[rank].machine)
    _alike(seats, nodes, "runs {} ranks", len)
    _alike(seats, nodes, "sees the devices and packages {}", lambda ranks: seats[ranks[0]].devices)
    packages = []
    for ranks in nodes:
        _check_devices(seats, ranks)
        packages.append(
            _grouped(ranks, lambda rank: (seats[rank].package, rank if seats[rank].package is None else -1))
        )
    usual = Counter(len(group) for groups in packages for group in groups).most_common()
    size = max(length for length, times in usual if times == usual[0][1])
    for groups in packages:
        short = next((group for group in groups if len(group) != size), None)
        if short is not None:
            raise ValueError(
                f"host {seats[short[0]].host!r} has {len(short)} ranks on the GPU of rank {short[0]} "
                f"({seats[short[0]].bus_id}) where others have {size}: a die is missing or unused; {WAY_OUT}"
            )
    placed = [rank for groups in packages for group in groups for rank in group]
    order = tuple(sorted(range(len(seats)), key=placed.__getitem__))
    hosts = tuple(seats[ranks[0]].host for ranks in nodes)
    gpus = len(packages[0])
    return SeatedTree(len(nodes), gpus, size, None if order == tuple(range(len(order))) else order, hosts)


def check_seats(topology: Topology, seats: Sequence[Seat]) -> None:
    """Check that ranks share a host, and a GPU where that is known, exactly if the topology says so.

    Args:
        topology: what the configuration, the tools or the launcher said. An emulated one is not checked.
        seats: of every rank, in rank order.

    Raises:
        ValueError: as :func:`check_hosts`, or naming two ranks and their host.
    """
    names = Counter(host for host, _ in {(seat.host, seat.machine) for seat in seats})
    labels = [seat.host if names[seat.host] == 1 else f"{seat.host} ({seat.machine[:8]})" for seat in seats]
    check_hosts(topology, labels)
    if topology.emulated or topology.ranks_per_gpu == 1 or any(seat.package is None for seat in seats):
        return
    for node in range(topology.nodes):
        ranks = topology.node_ranks(node)
        for first in range(0, len(ranks), topology.ranks_per_gpu):
            one, *others = ranks[first : first + topology.ranks_per_gpu]
            odd = next((rank for rank in others if seats[rank].package != seats[one].package), None)
            if odd is not None:
                raise ValueError(
                    f"topology {topology.name!r} puts ranks {one} and {odd} on one GPU, but on host "
                    f"{seats[one].host!r} they run on {seats[one].bus_id} and {seats[odd].bus_id}, which are different "
                    "GPUs; bind ranks in the order that `zero-topo topology` prints on a node, or state the order in "
                    "the topology's JSON"
                )


def _grouped(ranks: Sequence[int], key: Callable[[int], K]) -> list[list[int]]:
    """Ranks of equal key, groups and ranks in order."""
    groups: dict[K, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())


def _alike(seats: Sequence[Seat], nodes: Sequence[list[int]], what: str, fact: Callable[[list[int]], Any]) -> None:
    """Check that a fact is the same on all nodes.

    Raises:
        ValueError: naming the first host that differs from the usual.
    """
    usual = Counter(fact(ranks) for ranks in nodes).most_common(1)[0][0]
    odd = next((ranks for ranks in nodes if fact(ranks) != usual), None)
    if odd is not None:
        raise ValueError(
            f"host {seats[odd[0]].host!r} {what.format(fact(odd))} but others {usual} (ranks {compress(odd)[:40]}): "
            f"the machine is no regular tree; {WAY_OUT}"
        )


def _check_devices(seats: Sequence[Seat], ranks: Sequence[int]) -> None:
    """Check that ranks of a host have devices of their own, and know all of their packages or none.

    Raises:
        ValueError: naming the host.
    """
    taken: dict[str, int] = {}
    for rank in ranks:
        bus_id = seats[rank].bus_id
        if bus_id is not None and bus_id in taken:
            raise ValueError(
                f"host {seats[rank].host!r}: ranks {taken[bus_id]} and {rank} both run on device {bus_id}; give each "
                "rank a device of its own (srun --gpus-per-task=1, or LOCAL_RANK)"
            )
        if bus_id is not None:
            taken[bus_id] = rank
    known = [rank for rank in ranks if seats[rank].package is not None]
    if known and len(known) < len(ranks):
        odd = next(rank for rank in ranks if seats[rank].package is None)
        raise ValueError(
            f"host {seats[odd].host!r}: the GPU of rank {odd} ({seats[odd].bus_id}) is not among the devices that its "
            f"tool lists, those of other ranks are; {WAY_OUT}"
        )
