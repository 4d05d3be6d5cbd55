# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Implements process groups whose messages are sent over MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Group, host_counts


class Mpi(Group):
    """Exchanges messages over MPI, copied through the host; the received bits equal those of the
    other transports.

    It is meant for machines on which MPI is faster than torch's backends, and for jobs that
    ``mpirun`` or ``srun`` started.

    Args:
        like: the group to carry over MPI.
        comm: MPI communicator with the members in tree order.
    """

    sums = False

    def __init__(self, like: Group, comm: Any) -> None:
        super().__init__(
            like.lo, like.hi, like.index, like.group_ranks, like.domain, like.group, like.meter
        )
        self._comm = comm

    def _all_gather(self, message: Tensor) -> Handle[Tensor]:
        sent = message.cpu()
        received = torch.empty(self.size, message.numel(), dtype=message.dtype, device="cpu")
        request = self._comm.Iallgather(_buffer(sent), _buffer(received))
        return Handle(received, request.Wait, (sent,)).then(lambda r: r.to(message.device))

    def _all_to_all(self, table: Tensor) -> Handle[Tensor]:
        sent = table.cpu()
        received = torch.empty_like(table, device="cpu")
        request = self._comm.Ialltoall(_buffer(sent), _buffer(received))
        return Handle(received, request.Wait, (sent,)).then(lambda r: r.to(table.device))

    def _all_to_all_uneven(
        self,
        rows: Tensor,
        sizes: Sequence[int],
        expected: Sequence[int],
    ) -> Handle[Tensor]:
        """Run the exchange before returning: it blocks."""
        width = rows.shape[1]
        received = torch.empty(sum(expected), width, dtype=rows.dtype, device="cpu")
        lengths = width * host_counts(sizes).numpy()
        due = width * host_counts(expected).numpy()
        # MPI counts bytes, of a row's width each.
        self._comm.Alltoallv([rows.cpu().numpy(), lengths], [received.numpy(), due])
        return Handle(received.to(rows.device))

    def _all_gather_uneven(self, rows: Tensor, sizes: Sequence[int]) -> Handle[Tensor]:
        """Run the exchange before returning: it blocks."""
        width = rows.shape[1]
        received = torch.empty(sum(sizes), width, dtype=rows.dtype, device="cpu")
        due = width * host_counts(sizes).numpy()
        self._comm.Allgatherv(rows.cpu().numpy(), [received.numpy(), due])
        return Handle(received.to(rows.device))


def _buffer(x: Tensor) -> Any:
    """Return a tensor of any dtype as a buffer that mpi4py accepts."""
    return x.view(torch.uint8).numpy()
