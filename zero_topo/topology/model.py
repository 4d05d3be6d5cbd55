# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the machine is: a regular tree of nodes, GPUs and ranks, and where each rank sits in it.

Note [Tree positions]
    The leaves of the tree are numbered ``t = (node * gpus_per_node + gpu) * ranks_per_gpu + die``, so that any domain
    is a run of consecutive positions. ``order[rank] = t`` says where the launcher put each rank. Everything that
    depends on the machine (who shares a shard, which link a message crosses) is a function of ``t``, never of the
    rank, so block, cyclic and arbitrary placements need no code of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from zero_topo.topology.checks import check_int, check_keys, check_mapping, check_number, check_strings, nearest

DOMAINS = ("rank", "gpu", "node", "world")
"""The domains, from the smallest to the largest; each is a set of ranks that share one unit of the machine."""

LINKED_DOMAINS = DOMAINS[1:]
"""The domains that have a link: the one over which their parts (ranks, GPUs, nodes) reach each other."""


@dataclass(frozen=True)
class Link:
    """One level of the machine as one rank sees it when all ranks of the domain talk at once.

    Attributes:
        bandwidth: bytes/s that one rank can send in one direction; positive.
        latency: seconds before the first byte arrives.

    Raises:
        ValueError: if a number is not finite, the bandwidth not positive or the latency negative.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "bandwidth", check_number("link bandwidth (bytes/s)", self.bandwidth, positive=True))
        object.__setattr__(self, "latency", check_number("link latency (s)", self.latency, positive=False))

    @classmethod
    def from_json(cls, what: str, data: object) -> Link:
        """Build a link from ``{"bandwidth": bytes/s, "latency": s}``; ``what`` names it in errors."""
        mapping = check_mapping(what, data)
        check_keys(what, mapping, known=("bandwidth", "latency"), required=("bandwidth", "latency"))
        return cls(mapping["bandwidth"], mapping["latency"])


@dataclass(frozen=True)
class Topology:
    """A regular machine tree and the placement of ranks in it (see Note [Tree positions]).

    Attributes:
        name: what to call it in logs.
        nodes: number of nodes.
        gpus_per_node: GPU packages in each node.
        ranks_per_gpu: ranks (dies) in each GPU package.
        order: ``order[rank]`` is the rank's tree position; None means the identity (block placement).
        links: link of a domain, keys among "gpu", "node", "world"; absent where it is not known.
        memory_per_rank: bytes of device memory of a rank, or None.
        hosts: host name of each node in tree order, or None.
        emulated: the nodes are make-believe, so the hosts are not checked against the machine.
        sources: where each field came from, for people to read; the key "warning" holds a doubt worth showing.

    Raises:
        ValueError: if a field contradicts another or is out of range.
    """

    name: str
    nodes: int
    gpus_per_node: int
    ranks_per_gpu: int
    order: tuple[int, ...] | None = None
    links: Mapping[str, Link] = field(default_factory=dict, hash=False)
    memory_per_rank: int | None = None
    hosts: tuple[str, ...] | None = None
    emulated: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for key in ("nodes", "gpus_per_node", "ranks_per_gpu"):
            check_int(f"topology {self.name!r}: {key}", getattr(self, key))
        if self.memory_per_rank is not None:
            check_int(f"topology {self.name!r}: memory_per_rank (bytes)", self.memory_per_rank)
        self._check_order()
        self._check_hosts()
        for domain in self.links:
            if domain not in LINKED_DOMAINS:
                raise ValueError(
                    f"topology {self.name!r}: link of unknown domain {domain!r}; did you mean "
                    f"{nearest(domain, LINKED_DOMAINS)!r}? (links belong to {', '.join(LINKED_DOMAINS)})"
                )

    def _check_order(self) -> None:
        if self.order is None:
            return
        object.__setattr__(self, "order", tuple(self.order))
        world = self.world_size
        if len(self.order) != world:
            raise ValueError(
                f"topology {self.name!r}: order has {len(self.order)} entries but {self.nodes} nodes x "
                f"{self.gpus_per_node} GPUs x {self.ranks_per_gpu} ranks are {world} ranks; give order one tree "
                "position per rank, or leave it out for block placement"
            )
        seen: dict[int, int] = {}
        for rank, position in enumerate(self.order):
            if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position < world:
                raise ValueError(
                    f"topology {self.name!r}: order[{rank}] is {position!r}; tree positions are 0 to {world - 1}"
                )
            if position in seen:
                raise ValueError(
                    f"topology {self.name!r}: order puts ranks {seen[position]} and {rank} both at tree position "
                    f"{position}; each rank needs a position of its own"
                )
            seen[position] = rank

    def _check_hosts(self) -> None:
        if self.hosts is None:
            return
        object.__setattr__(self, "hosts", tuple(self.hosts))
        if len(self.hosts) != self.nodes:
            raise ValueError(
                f"topology {self.name!r}: {len(self.hosts)} hosts are named for {self.nodes} nodes; name one per node, "
                "in tree order, or none"
            )
        host, times = Counter(self.hosts).most_common(1)[0]
        if times > 1 and not self.emulated:
            raise ValueError(
                f"topology {self.name!r}: host {host!r} is named for {times} nodes; name each once, or set 'emulated': "
                "true if several nodes are pretended on one host"
            )

    @property
    def ranks_per_node(self) -> int:
        """Ranks in each node."""
        return self.gpus_per_node * self.ranks_per_gpu

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    def degree(self, domain: str) -> int:
        """Number of ranks in a domain.

        Raises:
            ValueError: if ``domain`` is none of "rank", "gpu", "node", "world".
        """
        degrees = {"rank": 1, "gpu": self.ranks_per_gpu, "node": self.ranks_per_node, "world": self.world_size}
        if domain not in degrees:
            raise ValueError(
                f"unknown domain {domain!r}; did you mean {nearest(domain, DOMAINS)!r}? (known: {DOMAINS})"
            )
        return degrees[domain]

    def domain(self, degree: int) -> str:
        """The smallest domain in which the aligned blocks of ``degree`` tree positions lie whole.

        A block of ``degree`` positions starting at a multiple of ``degree`` stays inside a domain if ``degree``
        divides the domain's; 3 ranks of a world with 4 ranks per node are thus a matter of the world. Where domains
        coincide (one rank per GPU, one node), the smaller name is given.

        Raises:
            ValueError: if ``degree`` is not from 1 to the world size.
        """
        if not 1 <= degree <= self.world_size:
            raise ValueError(f"degree {degree} is out of range; the world of {self.name!r} has {self.world_size} ranks")
        return next((name for name in DOMAINS[:-1] if self.degree(name) % degree == 0), "world")

    def position(self, rank: int) -> int:
        """Tree position of a rank.

        Raises:
            ValueError: if there is no such rank.
        """
        self._check_index("rank", rank)
        return rank if self.order is None else self.order[rank]

    def rank_at(self, position: int) -> int:
        """Rank at a tree position; the inverse of :meth:`position`.

        Raises:
            ValueError: if there is no such position.
        """
        self._check_index("tree position", position)
        return position if self.order is None else self._ranks[position]

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        """Rank at each tree position, for an explicit order."""
        return tuple(sorted(range(self.world_size), key=self.order.__getitem__)) if self.order else ()

    def _check_index(self, what: str, index: int) -> None:
        if not 0 <= index < self.world_size:
            raise ValueError(
                f"{what} {index} is out of range; {self.name!r} has {self.world_size} ranks, counted from 0"
            )

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """``(node, gpu, die)`` of a rank: the node, the GPU inside the node, the die inside the GPU."""
        node, local = divmod(self.position(rank), self.ranks_per_node)
        return (node, *divmod(local, self.ranks_per_gpu))

    def node_ranks(self, node: int) -> list[int]:
        """The ranks of a node in tree order."""
        first = node * self.ranks_per_node
        return [self.rank_at(position) for position in range(first, first + self.ranks_per_node)]

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` builds an equal topology; fields at their default are left out."""
        data: dict[str, Any] = {key: getattr(self, key) for key in ("name", "nodes", "gpus_per_node", "ranks_per_gpu")}
        if self.order is not None:
            data["order"] = list(self.order)
        if self.links:
            data["links"] = {
                domain: {"bandwidth": link.bandwidth, "latency": link.latency} for domain, link in self.links.items()
            }
        if self.memory_per_rank is not None:
            data["memory_per_rank"] = self.memory_per_rank
        if self.hosts is not None:
            data["hosts"] = list(self.hosts)
        if self.emulated:
            data["emulated"] = True
        if self.sources:
            data["sources"] = dict(self.sources)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Topology:
        """Build a topology from a JSON object with the fields of this class.

        ``nodes``, ``gpus_per_node`` and ``ranks_per_gpu`` are required, the rest has the class's defaults.

        Raises:
            ValueError: if a key is unknown (the nearest known one is named), missing, or its value does not fit.
        """
        known = [item.name for item in fields(cls)]
        check_keys("topology", data, known, required=("nodes", "gpus_per_node", "ranks_per_gpu"))
        values: dict[str, Any] = {"name": "custom", **data}
        if not isinstance(values["name"], str) or not values["name"]:
            raise ValueError(f"topology: name is {values['name']!r}; it must be a string, not empty")
        links = check_mapping("topology: links", values.get("links", {}))
        values["links"] = {domain: Link.from_json(f"topology: link {domain!r}", link) for domain, link in links.items()}
        sources = check_mapping("topology: sources", values.get("sources", {}))
        check_strings("topology: sources", list(sources.values()))
        values["sources"] = dict(sources)
        if values.get("hosts") is not None:
            values["hosts"] = check_strings("topology: hosts", values["hosts"])
        if values.get("order") is not None and not isinstance(values["order"], list | tuple):
            raise ValueError(
                f"topology: order is {values['order']!r}; it must be a list of tree positions, one per rank"
            )
        if not isinstance(values.get("emulated", False), bool):
            raise ValueError(f"topology: emulated is {values['emulated']!r}; it must be true or false")
        return cls(**values)
