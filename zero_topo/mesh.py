# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Topology and plan -> process groups, one per hop, and a torch ``DeviceMesh`` of the machine's levels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

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


class Mesh:
    """The process groups of a plan.

    Every rank creates its own groups, and only those, in the same order (``use_local_synchronization``): a world of
    75,264 ranks costs each rank a handful of groups, not one per pair. Hops over the same ranks share a group.

    Args:
        plan: the degrees.
        topology: the machine, for the names of domains.
        hops: the ``(lo, hi)`` pairs to create groups for, the same on every rank.
    """

    def __init__(self, plan: Plan, topology: Topology, hops: Iterable[tuple[int, int]]) -> None:
        self.plan = plan
        self.topology = topology
        self.rank = dist.get_rank()
        self._hops = {pair: self._create(*pair) for pair in dict.fromkeys(hops)}

    def hop(self, lo: int, hi: int) -> Hop:
        """The hop ``(lo, hi)``, created at construction.

        Raises:
            KeyError: if it was not asked for at construction: groups are never created in the middle of a step.
        """
        return self._hops[lo, hi]

    def _create(self, lo: int, hi: int) -> Hop:
        ranks = self.plan.group(self.rank, lo, hi)
        ascending = sorted(ranks)
        slots = tuple(ascending.index(r) for r in ranks) if ascending != ranks else tuple(range(len(ranks)))
        group = self._group(tuple(ascending)) if len(ranks) > 1 else None
        return Hop(lo, hi, ranks.index(self.rank), slots, self.topology.domain(hi), group)

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD if len(ranks) == self.plan.world_size else _shared_group(dist.group.WORLD, ranks)

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """The machine as a ``DeviceMesh`` of dimensions ("node", "gpu", "rank"), for code that speaks DTensor.

        Collective: every rank must call it, in the same place.
        """
        shape = (self.topology.nodes, self.topology.gpus_per_node, self.topology.ranks_per_gpu)
        ranks = torch.tensor(self.plan.rank_at, dtype=torch.int).view(shape)
        position = self.plan.position(self.rank)
        node, rest = divmod(position, shape[1] * shape[2])
        gpu, die = divmod(rest, shape[2])
        lines = (ranks[:, gpu, die], ranks[node, :, die], ranks[node, gpu, :])
        groups = [self._group(tuple(sorted(line.tolist()))) for line in lines]
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=("node", "gpu", "rank"))


@cache
def _shared_group(world: dist.ProcessGroup, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of ascending ``ranks`` within ``world``, created once per process and never destroyed.

    Engines come and go within one process (tests, sweeps) and want the same groups. Creating one anew under
    ``use_local_synchronization`` would reuse its name, and gloo would then connect to the addresses that the destroyed
    one left in the store. The groups end with the world's.
    """
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
