# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the members of one hop say to one another over MPI: the same calls, the same bits, another way.

For machines whose MPI knows the network better than torch's backends do, and for a job that ``mpirun`` or ``srun``
started. mpi4py is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.handle import Handle
from zero_topo.collectives.meter import Counted
from zero_topo.collectives.peers import Peers, as_bytes
from zero_topo.mesh import Hop

T = TypeVar("T")


class MpiPeers(Peers):
    """The members of a hop, over a communicator of their own, in tree order. By way of the host, and blocking.

    Raises:
        ValueError: on every rank, if MPI does not know the job's ranks as torch does.
    """

    def __init__(self, hop: Hop, counted: Counted) -> None:
        super().__init__(hop, counted)
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        world = self._mpi.COMM_WORLD
        if (world.Get_size(), world.Get_rank()) != (dist.get_world_size(), dist.get_rank()):
            raise ValueError(
                f"sync.transport = mpi: MPI sees rank {world.Get_rank()} of {world.Get_size()}, torch rank "
                f'{dist.get_rank()} of {dist.get_world_size()}; start the job with mpirun, or set "transport": "torch"'
            )
        if hop.group is not None:
            ranks = dist.get_process_group_ranks(hop.group)
            members = world.Get_group().Incl([ranks[slot] for slot in hop.slots])
            self._comm = world.Create_group(members, hop.lo)

    def _to_all(self, message: Tensor) -> Handle[Tensor]:
        received = torch.empty(self.size, message.numel(), dtype=torch.uint8)
        self._comm.Allgather(message.cpu().numpy(), received.numpy())
        return _came(received.to(message.device))

    def _to_each(self, table: Tensor) -> Handle[Tensor]:
        received = torch.empty_like(table, device="cpu")
        self._comm.Alltoall(as_bytes(table.cpu()).numpy(), as_bytes(received).numpy())
        return _came(received.to(table.device))

    def _to_each_uneven(self, rows: Tensor, sizes: Sequence[int], expected: Sequence[int]) -> Handle[Tensor]:
        received, width = torch.empty(sum(expected), rows.shape[1], dtype=torch.uint8), rows.shape[1]
        lengths, due = (width * torch.tensor(counts, dtype=torch.int64).numpy() for counts in (sizes, expected))
        self._comm.Alltoallv([rows.cpu().numpy(), lengths], [received.numpy(), due])
        return _came(received.to(rows.device))

    def _to_all_uneven(self, rows: Tensor, sizes: Sequence[int]) -> Handle[Tensor]:
        received, width = torch.empty(sum(sizes), rows.shape[1], dtype=torch.uint8), rows.shape[1]
        self._comm.Allgatherv(rows.cpu().numpy(), [received.numpy(), width * torch.tensor(sizes).numpy()])
        return _came(received.to(rows.device))


def _came(result: T) -> Handle[T]:
    return Handle(None, (), lambda: result)
