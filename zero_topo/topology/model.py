# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Describes the machine: a regular tree of nodes, GPUs and ranks, and the placement of each rank in
it.

Note [Tree positions]
    The leaves of the tree are numbered ``t = (node * gpus_per_node + gpu) * ranks_per_gpu + die``,
    so that any domain is a run of consecutive positions. ``order[rank] = t`` is the placement of
    each rank. Everything that depends on the machine (which ranks share a shard, which
    link a message crosses) is a function of ``t``, never of the rank, so block, cyclic and
    arbitrary placements share one code path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SkipValidation, StrictBool

from zero_topo.strict import (
    Count,
    Positive,
    Strings,
    Text,
    did_you_mean,
    read,
    strict_dataclass,
    to_json,
)

DOMAINS = ("rank", "gpu", "node", "world")
"""The domains, from the smallest to the largest; each is a set of ranks that share one unit of the
machine.
"""

MOST_RANKS = 1 << 20
"""The maximal number of ranks of a topology: lists of all ranks still fit into memory."""

LINKED_DOMAINS = DOMAINS[1:]
"""The domains that have a link, which connects their parts (ranks, GPUs, nodes)."""


def _linked(domain: str) -> str:
    if domain not in LINKED_DOMAINS:
        known = ", ".join(LINKED_DOMAINS)
        raise ValueError(
            f"unknown domain {domain!r}{did_you_mean(domain, LINKED_DOMAINS)} (links belong to "
            f"{known})"
        )
    return domain


LinkedDomain = Annotated[str, AfterValidator(_linked)]


Bytes = Annotated[int, Field(strict=True, ge=1)]


@strict_dataclass
class Link:
    """One level of the machine as one rank sees it when all ranks of the domain talk at once.

    Attributes:
        bandwidth: bytes/s that one rank can send in one direction; positive.
        latency: seconds before the first byte arrives.

    Raises:
        ValueError: if the bandwidth is not positive, the latency negative, or a number too large to
            compute with.
    """

    bandwidth: Positive
    latency: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


@strict_dataclass
class Topology:
    """A regular machine tree and the placement of ranks in it (see Note [Tree positions]).

    Attributes:
        name: what to call it in logs.
        nodes: number of nodes.
        gpus_per_node: GPU packages in each node.
        ranks_per_gpu: ranks in each GPU package: GCDs of an MI250X, tiles of an Intel GPU, else 1.
        order: ``order[rank]`` is the rank's tree position; None means the identity (block
            placement).
        links: link of a domain, keys among "gpu", "node", "world"; absent where it is not known.
        memory_per_rank: bytes of device memory of a rank, or None.
        hosts: host name of each node in tree order, or None.
        emulated: the nodes are make-believe, so the hosts are not checked against the machine.
        hosts_per_node: hosts in each node: several where NVLink joins them, as in an NVL72.
        sources: where each field came from, for people to read.

    Raises:
        ValueError: if a field contradicts another or is out of range.
    """

    name: Text
    nodes: Count
    gpus_per_node: Count
    ranks_per_gpu: Count
    order: tuple[SkipValidation[int], ...] | None = None
    links: Mapping[LinkedDomain, Link] = field(default_factory=dict, hash=False)
    memory_per_rank: Bytes | None = None
    hosts: Strings | None = None
    emulated: StrictBool = False
    hosts_per_node: Count = 1
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.world_size > MOST_RANKS:
            raise ValueError(
                f"topology {self.name!r}: {self.shape} are more than the {MOST_RANKS:,} ranks it "
                "may have"
            )
        if self.ranks_per_node % self.hosts_per_node:
            raise ValueError(
                f"topology {self.name!r}: hosts_per_node is {self.hosts_per_node}, which does not "
                f"divide the {self.ranks_per_node} ranks of a node; it is 1 unless NVLink joins "
                "hosts"
            )
        self._check_order()
        self._check_hosts()

    def _check_order(self) -> None:
        if self.order is None:
            return
        world = self.world_size
        if len(self.order) != world:
            raise ValueError(
                f"topology {self.name!r}: order has {len(self.order)} entries but {self.nodes} "
                f"nodes x {self.gpus_per_node} GPUs x {self.ranks_per_gpu} ranks are {world} "
                "ranks; give order one tree position per rank, or leave it out for block placement"
            )
        seen: dict[int, int] = {}
        for rank, position in enumerate(self.order):
            if (
                isinstance(position, bool)
                or not isinstance(position, int)
                or not 0 <= position < world
            ):
                raise ValueError(
                    f"topology {self.name!r}: order[{rank}] is {position!r}; tree positions are 0 "
                    f"to {world - 1}"
                )
            if position in seen:
                raise ValueError(
                    f"topology {self.name!r}: order puts ranks {seen[position]} and {rank} both at "
                    f"tree position {position}; each rank needs a position of its own"
                )
            seen[position] = rank

    def _check_hosts(self) -> None:
        if self.hosts is None:
            return
        if len(self.hosts) != self.nodes:
            raise ValueError(
                f"topology {self.name!r}: {len(self.hosts)} hosts are named for {self.nodes} "
                "nodes; name one per node, in tree order, or none"
            )
        host, times = Counter(self.hosts).most_common(1)[0]
        if times > 1 and not self.emulated:
            raise ValueError(
                f"topology {self.name!r}: host {host!r} is named for {times} nodes; name each "
                "once, or set 'emulated': true if several nodes are pretended on one host"
            )

    @property
    def shape(self) -> str:
        """Return the numbers of nodes, GPUs and ranks, for messages."""
        return f"{self.nodes} nodes x {self.gpus_per_node} GPUs x {self.ranks_per_gpu} ranks"

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks in each node."""
        return self.gpus_per_node * self.ranks_per_gpu

    @property
    def world_size(self) -> int:
        """Return the total number of ranks."""
        return self.nodes * self.ranks_per_node

    def degree(self, domain: str) -> int:
        """Return the number of ranks in a domain.

        Raises:
            ValueError: if ``domain`` is none of "rank", "gpu", "node", "world".
        """
        degrees = {
            "rank": 1,
            "gpu": self.ranks_per_gpu,
            "node": self.ranks_per_node,
            "world": self.world_size,
        }
        if domain not in degrees:
            raise ValueError(
                f"unknown domain {domain!r}{did_you_mean(domain, DOMAINS)} (known: {DOMAINS})"
            )
        return degrees[domain]

    def domain(self, degree: int) -> str:
        """Return the smallest domain that contains every aligned block of ``degree`` tree
        positions.

        A block of ``degree`` positions starting at a multiple of ``degree`` stays inside a domain
        if ``degree`` divides the domain's. For 3 ranks and 4 ranks per node the domain is therefore
        the world. If domains coincide (one rank per GPU, one node), the smaller one is returned.

        Raises:
            ValueError: if ``degree`` is not from 1 to the world size.
        """
        if not 1 <= degree <= self.world_size:
            raise ValueError(
                f"degree {degree} is out of range; the world of {self.name!r} has "
                f"{self.world_size} ranks"
            )
        return next((name for name in DOMAINS[:-1] if self.degree(name) % degree == 0), "world")

    def position(self, rank: int) -> int:
        """Return the tree position of a rank."""
        return rank if self.order is None else self.order[rank]

    def rank_at(self, position: int) -> int:
        """Return the rank at a tree position; the inverse of :meth:`position`."""
        return position if self.order is None else self._ranks[position]

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        """Return the rank at each tree position, for an explicit order."""
        return (
            tuple(sorted(range(self.world_size), key=self.order.__getitem__)) if self.order else ()
        )

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return ``(node, gpu, die)`` of a rank: the node, the GPU in the node, the rank (GCD) in
        the GPU.
        """
        node, local = divmod(self.position(rank), self.ranks_per_node)
        return (node, *divmod(local, self.ranks_per_gpu))

    def node_ranks(self, node: int) -> list[int]:
        """Return the ranks of a node in tree order."""
        first = node * self.ranks_per_node
        return [self.rank_at(position) for position in range(first, first + self.ranks_per_node)]

    def among(self, ranks: Sequence[int]) -> Topology:
        """Return the tree that some ranks form, for example a data-parallel group, numbered in the
        given order.

        Links stay those of one rank: the other ranks of a GPU or node send at the same time.

        Args:
            ranks: ranks of this topology, each once.

        Raises:
            ValueError: if nodes or GPUs have different numbers of these ranks.
        """
        places = [self.coordinates(rank) for rank in ranks]
        on_node = Counter(node for node, _, _ in places)
        on_gpu = Counter((node, gpu) for node, gpu, _ in places)
        gpus_of_node = Counter(node for node, _ in on_gpu)
        if any(len({*counts.values()}) > 1 for counts in (on_node, on_gpu, gpus_of_node)):
            raise ValueError(
                f"topology {self.name!r}: nodes or GPUs have different numbers of the ranks "
                f"{list(ranks[:16])} of one group, so no plan fits; choose a tensor-parallel or "
                "expert-parallel size that divides a node's ranks"
            )
        in_tree_order = sorted(range(len(ranks)), key=lambda index: self.position(ranks[index]))
        order = [0] * len(ranks)
        for position, index in enumerate(in_tree_order):
            order[index] = position
        hosts = None
        if self.hosts is not None:
            hosts = tuple(self.hosts[node] for node in sorted(on_node))
        return replace(
            self,
            nodes=len(on_node),
            gpus_per_node=len(on_gpu) // len(on_node),
            ranks_per_gpu=len(ranks) // len(on_gpu),
            order=None if order == sorted(order) else tuple(order),
            hosts=hosts,
            hosts_per_node=1,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which ``from_json`` builds an equal topology, without fields at
        their default.
        """
        return to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Topology:
        """Build a topology from a JSON object with the fields of this class.

        ``nodes``, ``gpus_per_node`` and ``ranks_per_gpu`` are required; the other fields have the
        class's defaults.

        Raises:
            ValueError: if a key is unknown (the nearest known one is named), missing, or its value
                does not fit.
        """
        return read(cls, "topology", {"name": "custom", **data})
