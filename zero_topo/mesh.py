# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Topology and plan -> process groups, one per hop.

Note [Every rank creates every group]
    ``new_group`` numbers groups by how many a rank has created, so all ranks create all groups of a hop in one order;
    those of others cost a rank microseconds. The tempting ``use_local_synchronization``, by which a rank creates only
    its own, hangs as soon as ranks are members of unequally many groups, be it only in the user's own code: torch
    derives the name of such a group from that number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from zero_topo.plan import Plan
from zero_topo.topology.model import Topology


@dataclass(frozen=True)
class Hop:
    """This rank's group of one hop (see Note [Hops] in ``plan.py``).

    Attributes:
        lo: degree of the larger shard.
        hi: degree of the smaller shard.
        index: this rank's place among the members, in tree order.
        slots: ``slots[c]`` is the group rank of member ``c``: torch sorts a group by global rank, the tree may not.
        domain: smallest domain that holds the group.
        group: the process group; None for a group of one.
    """

    lo: int
    hi: int
    index: int
    slots: tuple[int, ...]
    domain: str
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of members."""
        return self.hi // self.lo

    @property
    def in_order(self) -> bool:
        """Whether group ranks follow the tree order."""
        return self.slots == tuple(range(self.size))


@dataclass(frozen=True)
class Route:
    """This rank's way through a hop ``(lo, hi)`` (see Note [Routes] in ``plan.py``).

    Attributes:
        hops: innermost first, ``(lo, a), (a, hi)``, or ``(lo, hi)`` alone.
    """

    hops: tuple[Hop, ...]

    @property
    def lo(self) -> int:
        """Degree of the larger shard."""
        return self.hops[0].lo

    @property
    def hi(self) -> int:
        """Degree of the smaller shard."""
        return self.hops[-1].hi

    @property
    def size(self) -> int:
        """Number of members."""
        return self.hi // self.lo

    @property
    def index(self) -> int:
        """This rank's place among the members, in tree order."""
        place, step = 0, 1
        for hop in self.hops:
            place, step = place + step * hop.index, step * hop.size
        return place


class Mesh:
    """The process groups of a plan.

    Args:
        plan: the degrees.
        topology: the machine, for the names of domains.
        pairs: the ``(lo, hi)`` that will be travelled; groups are created for all hops of their routes. The same on
            every rank.
    """

    def __init__(self, plan: Plan, topology: Topology, pairs: Iterable[tuple[int, int]]) -> None:
        self.plan = plan
        self.topology = topology
        self.rank = dist.get_rank()
        self._created: list[dist.ProcessGroup] = []
        hops = dict.fromkeys(hop for pair in pairs for hop in plan.route(*pair))
        self._hops = {hop: self._create(*hop) for hop in hops}

    def route(self, lo: int, hi: int) -> Route:
        """The way through the hop ``(lo, hi)``.

        Raises:
            KeyError: as :meth:`hop`.
        """
        return Route(tuple(self.hop(*pair) for pair in self.plan.route(lo, hi)))

    def hop(self, lo: int, hi: int) -> Hop:
        """One hop, created at construction.

        Raises:
            KeyError: if it was not asked for at construction: groups are never created in the middle of a step.
        """
        return self._hops[lo, hi]

    def _create(self, lo: int, hi: int) -> Hop:
        ranks = self.plan.group(self.rank, lo, hi)
        place = {rank: slot for slot, rank in enumerate(sorted(ranks))}
        slots = tuple(place[rank] for rank in ranks)
        group = self._group(lo, hi) if len(ranks) > 1 else None
        return Hop(lo, hi, ranks.index(self.rank), slots, self.topology.domain(hi), group)

    def _group(self, lo: int, hi: int) -> dist.ProcessGroup:
        """This rank's group of a hop; creates those of all ranks, see Note [Every rank creates every group]."""
        if hi // lo == self.plan.world_size:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        own: dist.ProcessGroup | None = None
        for ranks in self.plan.groups(lo, hi):
            group = dist.new_group(ranks)
            if self.rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                own = group
        assert own is not None
        self._created.append(own)
        return own

    def destroy(self) -> None:
        """Destroy the groups this mesh created; every rank must call it, in the same place."""
        for group in self._created:
            dist.destroy_process_group(group)
        self._created.clear()
        self._hops.clear()
