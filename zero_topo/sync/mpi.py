# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The messages of a sparse mode over MPI: the same calls, the same bits, another way.

For machines whose MPI knows the network better than torch's backends do, and for a job that ``mpirun`` or ``srun``
started. mpi4py is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.exchange import Works
from zero_topo.collectives.meter import Exchange, Meter
from zero_topo.mesh import Hop
from zero_topo.sync.peers import Peers, as_bytes


class MpiPeers(Peers):
    """The members of a hop, over a communicator of their own, in tree order. Messages go by way of the host.

    Raises:
        ValueError: on every rank, if MPI does not know the job's ranks as torch does.
    """

    def __init__(self, hop: Hop, meter: Meter, device: torch.device) -> None:
        super().__init__(hop, meter, device)
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

    def gather(self, x: Tensor) -> Tensor:
        """See :meth:`Peers.gather`."""
        if self.size == 1:
            return x[None]
        message = as_bytes(x).cpu()
        received = torch.empty(self.size, message.numel(), dtype=torch.uint8)
        exchange = self._exchange("all_gather", (self.size - 1) * message.numel())
        self._blocking(exchange, lambda: self._comm.Allgather(message.numpy(), received.numpy()))
        return received.view(x.dtype).view(self.size, *x.shape).to(x.device)

    def scatter_sizes(self, sizes: Sequence[int]) -> list[int]:
        """See :meth:`Peers.scatter_sizes`."""
        if self.size == 1:
            return list(sizes)
        send = torch.tensor(sizes, dtype=torch.int64)
        received = torch.empty_like(send)
        exchange = self._exchange("all_to_all", (self.size - 1) * send.itemsize)
        self._blocking(exchange, lambda: self._comm.Alltoall(send.numpy(), received.numpy()))
        return [int(n) for n in received.tolist()]

    def scatter_known(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """See :meth:`Peers.scatter_known`."""
        if self.size == 1:
            return list(parts)
        dtype, device = parts[0].dtype, parts[0].device
        bytes_of = [as_bytes(part).cpu() for part in parts]
        send = torch.cat(bytes_of)
        lengths = [size * dtype.itemsize for size in sizes]
        received = torch.empty(sum(lengths), dtype=torch.uint8)
        sent = [send.numpy(), [part.numel() for part in bytes_of]]
        nbytes = sum(part.numel() for member, part in enumerate(bytes_of) if member != self.index)
        exchange = self._exchange("all_to_all", nbytes, even=False)
        self._blocking(exchange, lambda: self._comm.Alltoallv(sent, [received.numpy(), lengths]))
        return [part.clone().view(dtype).to(device) for part in received.split(lengths)]

    def _blocking(self, exchange: Exchange, call: Callable[[], None]) -> None:
        def begin() -> tuple[None, Works]:
            call()
            return None, Works(())

        self._meter.exchange(exchange, begin)
