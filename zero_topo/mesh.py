# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Creates the process groups of a plan on a topology, and combines them for hierarchical
collectives.

Note [One call makes all groups]
    If the world is bound to devices, as DeepSpeed binds it on GPUs, torch splits a new group's
    communicator off the world's. This is a collective of all ranks: ``new_group`` needs one for
    each group, 65,864 of them at 75,264 ranks. ``split_group`` makes all groups ``(lo, hi)`` at
    once; colors are the members' lowest ranks (pytorch#173687; from torch 2.13 on). It names a
    group by its ranks and by the number of groups the rank is in. If ranks are in different numbers
    of groups, even by the user's own code, members have different names for one group, and
    ``destroy_process_group``, which uses the name, hangs (pytorch#190431). In this case, with an
    older torch, or on any other backend, all ranks create all groups ``(lo, hi)`` in one order,
    with equal numbers. The world's device is unset meanwhile, so that nothing is split: groups of
    other ranks cost microseconds, and a rank's own groups connect at their first collective.
    ``use_local_synchronization``, by which a rank creates only its own groups, is no alternative.
    It uses the same names, and gloo's members rendezvous by name: it hangs in the same case, and
    groups of a second mesh find addresses that a destroyed mesh left behind.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zero_topo.collectives import backends
from zero_topo.collectives.meter import Meter
from zero_topo.collectives.mpi import Mpi
from zero_topo.collectives.transport import Group
from zero_topo.collectives.transport import Hierarchy as Hierarchy
from zero_topo.plan import Plan
from zero_topo.topology.groups import Groups
from zero_topo.topology.model import Topology
from zero_topo.versions import torch_has


class Mesh:
    """Holds the process groups of a plan.

    Attributes:
        calls: number of collective calls that created groups.
        rank: this rank's number in the plan.
        ranks: the global ranks that the plan counts from 0.
        plans: the plan of each group of ranks.
        meter: counts the exchanges of all groups.

    Args:
        plan: the degrees.
        topology: the tree of the plan's ranks, for the names of domains.
        meter: counts the exchanges of all groups.
        pairs: the ``(lo, hi)`` between which collectives run, equal on every rank; their groups are
            created.
        more_pairs: further ``(lo, hi)`` that are used as one group each.
        groups: the groups of ranks that each use the plan; None for one group of all ranks.
    """

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        meter: Meter,
        pairs: Iterable[tuple[int, int]],
        more_pairs: Iterable[tuple[int, int]] = (),
        groups: Groups | None = None,
    ) -> None:
        self.plan = plan
        self.topology = topology
        self.meter = meter
        self.ranks = tuple(range(dist.get_world_size()))
        self.plans = {self.ranks: plan}
        if groups is not None:
            self.ranks = groups.ranks(dist.get_rank())
            # Ranks of other groups may be placed in another order.
            plans = [replace(plan, order=tree.order) for tree in groups.trees]
            self.plans = dict(zip(groups.members, plans, strict=True))
        self.rank = self.ranks.index(dist.get_rank())
        self._prefix = groups.prefix if groups else ""
        self._created: list[dist.ProcessGroup] = []
        self._transport = backends.transport()
        self._splitter, self._timeout = _splitter(), _timeout()
        self.calls = 0
        used = dict.fromkeys(
            [*(stage for pair in pairs for stage in plan.stages(*pair)), *more_pairs]
        )
        self._groups = {pair: self._create(*pair) for pair in used}
        self._over_mpi: dict[tuple[int, int], Group] = {}

    def hierarchy(self, lo: int, hi: int) -> Hierarchy:
        """Return the groups that a collective over ``(lo, hi)`` uses, innermost first.

        Raises:
            KeyError: if one of them was not requested at construction.
        """
        return Hierarchy(tuple(self.group(*pair) for pair in self.plan.stages(lo, hi)))

    def group(self, lo: int, hi: int) -> Group:
        """Return one process group, created at construction.

        Raises:
            KeyError: if it was not requested at construction: groups are never created during a
                step.
        """
        return self._groups[lo, hi]

    def over_mpi(self, group: Group) -> Group:
        """Return a group of this mesh whose messages are sent over MPI. The first call is
        collective for its members.

        Raises:
            ValueError: on every rank, if MPI's ranks of the job are not those of torch.
        """
        if group.group is None:
            return group
        if (group.lo, group.hi) not in self._over_mpi:
            world: Any = importlib.import_module("mpi4py.MPI").COMM_WORLD
            if (world.Get_size(), world.Get_rank()) != (dist.get_world_size(), dist.get_rank()):
                raise ValueError(
                    f"sync.transport = mpi: MPI sees rank {world.Get_rank()} of "
                    f"{world.Get_size()}, torch rank "
                    f"{dist.get_rank()} of {dist.get_world_size()}; start the job with mpirun, or "
                    "set "
                    '"transport": "torch"'
                )
            ranks = [self.ranks[rank] for rank in self.plan.group(self.rank, group.lo, group.hi)]
            comm = world.Create_group(world.Get_group().Incl(ranks), group.lo)
            self._over_mpi[group.lo, group.hi] = Mpi(group, comm)
        return self._over_mpi[group.lo, group.hi]

    def _create(self, lo: int, hi: int) -> Group:
        ranks = self.plan.group(self.rank, lo, hi)
        group_rank = {rank: index for index, rank in enumerate(sorted(ranks))}
        group_ranks = tuple(group_rank[rank] for rank in ranks)
        group = self._group(lo, hi) if len(ranks) > 1 else None
        domain = f"{self._prefix}{self.topology.domain(hi)}"
        return self._transport(
            lo, hi, ranks.index(self.rank), group_ranks, domain, group, self.meter
        )

    def _group(self, lo: int, hi: int) -> dist.ProcessGroup:
        """Create all groups ``(lo, hi)`` and return this rank's; see Note [One call makes all
        groups].
        """
        if hi // lo == dist.get_world_size():
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        groups = []
        for ranks, plan in self.plans.items():
            groups += [[ranks[rank] for rank in group] for group in plan.groups(lo, hi)]
        name = f"zero_topo {self._prefix}{lo} to {hi}"
        if self._splitter is not None:
            own = dist.split_group(
                split_ranks=groups, timeout=self._timeout, group_desc=name, backend=self._splitter
            )
        else:
            with _unbound():
                made = [
                    dist.new_group(ranks, timeout=self._timeout, group_desc=name)
                    for ranks in groups
                ]
            own = next(group for group in made if isinstance(group, dist.ProcessGroup))
        assert own is not None
        self.calls += len(groups) if self._splitter is None else 1
        self._created.append(own)
        return own

    def destroy(self) -> None:
        """Destroy the groups this mesh created; every rank must call it, at one point of the
        program.
        """
        for kept in self._groups.values():
            kept.done.clear()
        for group in self._created:
            dist.destroy_process_group(group)
        self._created.clear()
        self._groups.clear()


def _timeout() -> timedelta | None:
    """Return the timeout of the world's collectives; None if its backends do not report it."""
    world: Any = dist.group.WORLD
    options: Iterator[Any] = (
        getattr(world._get_backend(device), "options", None) for device in world._device_types
    )
    return max((option._timeout for option in options if hasattr(option, "_timeout")), default=None)


@contextmanager
def _unbound() -> Iterator[None]:
    """Unset the world's device inside the context, so that new groups are not split; see the
    module's note.
    """
    world: Any = dist.group.WORLD
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def _splitter() -> str | None:
    """Return the world's backend if ``dist.split_group`` may be used; see Note [One call makes all
    groups].

    Collective where the backend splits.
    """
    world: Any = dist.group.WORLD
    device = world.bound_device_id
    relied_on = torch_has("torch.distributed.split_group(backend=)", torch.__version__)
    if device is None or not relied_on or not world._get_backend(device).supports_splitting:
        return None
    known = len(dist.distributed_c10d._world.pg_names)
    extremes = torch.tensor([known, -known], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return str(world._get_backend(device).name()) if int(extremes.sum()) == 0 else None
