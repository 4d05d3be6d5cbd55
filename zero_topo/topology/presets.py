# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Loads known machines (``presets/*.json``) and builds their topologies, and emulated ones for a
single host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from typing import Any

from zero_topo.strict import Count, did_you_mean, packaged, read, strict_dataclass
from zero_topo.topology.model import Bytes, Link, LinkedDomain, Topology
from zero_topo.topology.rates import Rates


@strict_dataclass
class Machine:
    """One node of a machine and how it reaches the others.

    Attributes:
        name: the preset's name.
        description: one line for people.
        clusters: Slurm's cluster names (``SLURM_CLUSTER_NAME``) of this machine.
        gpus_per_node: GPU packages per node; None means as many as a one-node world has ranks.
        ranks_per_gpu: ranks per package: GCDs of an MI250X, tiles of an Intel GPU, else 1.
        memory_per_rank: bytes, or None if unknown.
        links: per domain, as in :class:`Topology`, with every rank of the node in use.
        sources: where each fact was published and what was assumed.
        rates: how fast a rank computes and what its links reach, or None if unknown.
        hosts_per_node: hosts in each node: several where NVLink joins them, as in an NVL72.
        launch: null if no file in ``launch/machines`` describes batch jobs of this machine.
    """

    name: str
    description: str
    clusters: tuple[str, ...]
    gpus_per_node: Count | None
    ranks_per_gpu: Count
    memory_per_rank: Bytes | None
    links: Mapping[LinkedDomain, Link]
    sources: Mapping[str, str]
    rates: Rates | None = None
    hosts_per_node: Count = 1
    launch: bool | None = True

    @property
    def ranks_per_node(self) -> int | None:
        """Return the ranks in each node; None means as many as a one-node world has."""
        return None if self.gpus_per_node is None else self.gpus_per_node * self.ranks_per_gpu


def preset_names() -> list[str]:
    """Return the names of the known machines, sorted."""
    folder = resources.files(__package__).joinpath("presets")
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_machine(name: str) -> Machine:
    """Read a preset.

    Raises:
        ValueError: if there is no preset of that name; the error names the nearest one.
    """
    names = preset_names()
    if name not in names:
        raise ValueError(
            f"unknown machine {name!r}{did_you_mean(name, names)} (known: {', '.join(names)})"
        )
    return read(Machine, f"preset {name!r}", packaged(__package__, f"presets/{name}.json"))


def machine_of_cluster(cluster: str | None) -> Machine | None:
    """Return the machine whose Slurm cluster has this name, or None; outside of Slurm there is no
    name.
    """
    if not cluster:
        return None
    machines = (load_machine(name) for name in preset_names())
    return next((machine for machine in machines if cluster.lower() in machine.clusters), None)


def assumptions(name: str) -> list[str]:
    """Return the facts of a preset that are assumed, not published or measured; empty without such
    a preset.
    """
    sources = load_machine(name).sources if name in preset_names() else {}
    return [
        key.removeprefix("rates.") for key, said in sources.items() if said.startswith("assumed")
    ]


def load_preset(name: str, world_size: int | None) -> Topology:
    """Return the topology of a known machine with as many nodes as ``world_size`` ranks fill.

    Args:
        name: one of :func:`preset_names`.
        world_size: total number of ranks; None is one node.

    Raises:
        ValueError: if the name is unknown or the ranks do not fill whole nodes.
    """
    machine = load_machine(name)
    if world_size is None:
        world_size = machine.ranks_per_node or 1
    read(Count, "world size", world_size)
    per_node = machine.ranks_per_node or world_size
    if world_size % per_node:
        why = "is less than one node" if world_size < per_node else "does not fill whole nodes"
        raise ValueError(
            f"world size {world_size} {why} of preset {name!r}, which has {per_node} ranks per "
            "node; start a multiple "
            f"of {per_node} ranks, or describe what you start: an inline topology "
            '{"nodes": N, "gpus_per_node": G, "ranks_per_gpu": R} or {"emulated": {...}}'
        )
    optional = (key for key in ("links", "memory_per_rank") if getattr(machine, key))
    stated = ("gpus_per_node", "ranks_per_gpu", *optional)
    return Topology(
        name=machine.name,
        nodes=world_size // per_node,
        gpus_per_node=per_node // machine.ranks_per_gpu,
        ranks_per_gpu=machine.ranks_per_gpu,
        links=machine.links,
        memory_per_rank=machine.memory_per_rank,
        hosts_per_node=machine.hosts_per_node,
        sources={"nodes": "ranks / ranks per node", **dict.fromkeys(stated, f"preset {name}")},
    )


def emulated(nodes: int, gpus_per_node: int, gcds_per_gpu: int) -> Topology:
    """Build an emulated machine to try a multi-node plan on one host; ``gcds_per_gpu`` ranks share
    a GPU.

    Raises:
        ValueError: if a number is not a positive int.
    """
    sources = dict.fromkeys(("nodes", "gpus_per_node", "ranks_per_gpu"), "emulated")
    return Topology("emulated", nodes, gpus_per_node, gcds_per_gpu, emulated=True, sources=sources)


@strict_dataclass
class _Emulated:
    """The arguments of :func:`emulated` as a user writes them."""

    nodes: Count
    gpus_per_node: Count
    gcds_per_gpu: Count


def emulated_from_json(data: Mapping[str, Any]) -> Topology:
    """Build :func:`emulated` from ``{"nodes": ..., "gpus_per_node": ..., "gcds_per_gpu": ...}``.

    Raises:
        ValueError: if a key is unknown or missing, or a number not a positive int.
    """
    return emulated(**asdict(read(_Emulated, "topology: emulated", data)))
