# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Topology and plan -> process groups, one per hop, and routes through them.

Note [One call makes all groups of a hop]
    Where the world is bound to devices, as DeepSpeed binds it on GPUs, torch splits a new group's communicator off the
    world's, which takes all ranks: with ``new_group`` one collective of the world for each group, 65,864 of them at
    75,264 ranks. ``split_group`` makes all groups of a hop at once; colors are the members' lowest ranks
    (pytorch#173687; relied on from torch 2.13 on). It names a group by its ranks and by how many groups the rank is in.
    Where ranks are in unequally many, be it only in the user's own code, members know one group by different names, and
    ``destroy_process_group``, which goes by name, hangs (pytorch#190431). Then, with an older torch, and on every other
    backend, all ranks create all groups of a hop in one order, numbered alike. The world's device is unset meanwhile,
    so that nothing is split: groups of others cost microseconds, own ones connect at their first collective.
    ``use_local_synchronization``, by which a rank creates only its own, has the same names, and gloo's members meet by
    name: it hangs in the same case, and those of a second mesh find addresses that a destroyed one left behind.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zero_topo.collectives import transport
from zero_topo.collectives.transport import Group
from zero_topo.collectives.transport import Route as Route
from zero_topo.plan import Plan
from zero_topo.topology.model import Topology
from zero_topo.units import MIB, format_bytes
from zero_topo.versions import torch_has

NCCL_BUFFER = 4 * MIB
"""Bytes that NCCL holds by default for each channel to each neighbour of a communicator: its NCCL_BUFFSIZE
(docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)."""


class Mesh:
    """The process groups of a plan.

    Attributes:
        calls: how often all ranks together had to create groups.

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
        self._transport = transport.transport()
        self._splitter, self._timeout = _splitter(), _timeout()
        self.calls = 0
        hops = dict.fromkeys(hop for pair in pairs for hop in plan.route(*pair))
        self._hops = {hop: self._create(*hop) for hop in hops}
        self._over_mpi: dict[tuple[int, int], Group] = {}

    def route(self, lo: int, hi: int) -> Route:
        """The way through the hop ``(lo, hi)``.

        Raises:
            KeyError: as :meth:`hop`.
        """
        return Route(tuple(self.hop(*pair) for pair in self.plan.route(lo, hi)))

    def hop(self, lo: int, hi: int) -> Group:
        """One hop, created at construction.

        Raises:
            KeyError: if it was not asked for at construction: groups are never created in the middle of a step.
        """
        return self._hops[lo, hi]

    def over_mpi(self, hop: Group) -> Group:
        """A hop of this mesh whose messages MPI carries; its members call it together, the first time.

        Raises:
            ValueError: on every rank, if MPI does not know the job's ranks as torch does.
        """
        if hop.group is None:
            return hop
        if (hop.lo, hop.hi) not in self._over_mpi:
            world: Any = importlib.import_module("mpi4py.MPI").COMM_WORLD
            if (world.Get_size(), world.Get_rank()) != (dist.get_world_size(), dist.get_rank()):
                raise ValueError(
                    f"sync.transport = mpi: MPI sees rank {world.Get_rank()} of {world.Get_size()}, torch rank "
                    f"{dist.get_rank()} of {dist.get_world_size()}; start the job with mpirun, or set "
                    '"transport": "torch"'
                )
            ranks = self.plan.group(self.rank, hop.lo, hop.hi)
            comm = world.Create_group(world.Get_group().Incl(ranks), hop.lo)
            self._over_mpi[hop.lo, hop.hi] = transport.Mpi(hop, comm)
        return self._over_mpi[hop.lo, hop.hi]

    def _create(self, lo: int, hi: int) -> Group:
        ranks = self.plan.group(self.rank, lo, hi)
        group_rank = {rank: index for index, rank in enumerate(sorted(ranks))}
        group_ranks = tuple(group_rank[rank] for rank in ranks)
        group = self._group(lo, hi) if len(ranks) > 1 else None
        return self._transport(lo, hi, ranks.index(self.rank), group_ranks, self.topology.domain(hi), group)

    def _group(self, lo: int, hi: int) -> dist.ProcessGroup:
        """This rank's group of a hop; creates those of all ranks, see Note [One call makes all groups of a hop]."""
        if hi // lo == self.plan.world_size:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        groups, name = self.plan.groups(lo, hi), f"zero_topo {lo} to {hi}"
        if self._splitter is not None:
            own = dist.split_group(split_ranks=groups, timeout=self._timeout, group_desc=name, backend=self._splitter)
        else:
            with _unbound():
                made = [dist.new_group(ranks, timeout=self._timeout, group_desc=name) for ranks in groups]
            own = next(group for group in made if isinstance(group, dist.ProcessGroup))
        assert own is not None
        self.calls += len(groups) if self._splitter is None else 1
        self._created.append(own)
        return own

    def words(self, env: Mapping[str, str] = os.environ) -> str:
        """The process groups of this rank and the memory of NCCL's buffers for them; one line for the log, or none.

        Args:
            env: where NCCL reads the size of its buffers.
        """
        sizes = [group.size() for group in self._created]
        if not sizes:
            return ""
        set_by_user = env.get("NCCL_BUFFSIZE", "")
        buffer = int(set_by_user) if set_by_user.isdecimal() else NCCL_BUFFER
        held = buffer * sum(min(2, size - 1) for size in sizes)  # both neighbours of a ring
        return (
            f"process groups of this rank, beside the world's: {len(sizes)}, of {sizes} ranks, created in {self.calls} "
            f"collective calls; with NCCL their buffers take {format_bytes(held)} per channel "
            f"(NCCL_BUFFSIZE = {format_bytes(buffer)} per neighbour)"
        )

    def destroy(self) -> None:
        """Destroy the groups this mesh created; every rank must call it, in the same place."""
        for hop in self._hops.values():
            hop.done.clear()
        for group in self._created:
            dist.destroy_process_group(group)
        self._created.clear()
        self._hops.clear()


def _timeout() -> timedelta | None:
    """How long collectives of the world may take, as it was set for the world; None if its backends do not say."""
    world: Any = dist.group.WORLD
    options: Iterator[Any] = (getattr(world._get_backend(device), "options", None) for device in world._device_types)
    return max((told._timeout for told in options if hasattr(told, "_timeout")), default=None)


@contextmanager
def _unbound() -> Iterator[None]:
    """The world without its device, of which each new group would be split; see the note of this module."""
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def _splitter() -> str | None:
    """The world's backend if :func:`dist.split_group` may be used, see Note [One call makes all groups of a hop].

    Collective where the backend splits.
    """
    world: Any = dist.group.WORLD
    device = world.bound_device_id
    relied_on = torch_has("torch.distributed.split_group(backend=)", torch.__version__)
    if device is None or not relied_on or not world._get_backend(device).supports_splitting:
        return None
    known = len(dist.distributed_c10d._world.pg_names)
    extremes = torch.tensor([known, -known], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return str(world._get_backend(device).name()) if int(extremes.sum()) == 0 else None
