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

    def _all_gather(self, x: Tensor, counts: Sequence[int] = ()) -> Handle[Tensor]:
        """Begin the exchange; of rows, also end it."""
        sent = x.cpu().contiguous()
        if counts:
            received = self._room(counts, sent)
            places = _row_bytes(sent) * host_counts(counts).numpy()
            self._comm.Allgatherv(_buffer(sent), [_buffer(received), places])
            return Handle(received.to(x.device))
        received = sent.new_empty(self.size, *sent.shape)
        request = self._comm.Iallgather(_buffer(sent), _buffer(received))
        return Handle(received, request.Wait, (sent,)).then(lambda r: r.to(x.device))

    def _all_to_all(
        self,
        x: Tensor,
        counts: Sequence[int] = (),
        expected: Sequence[int] = (),
    ) -> Handle[Tensor]:
        """Begin the exchange; of rows, also end it."""
        sent = x.cpu().contiguous()
        if counts:
            received = self._room(expected, sent)
            lengths = _row_bytes(sent) * host_counts(counts).numpy()
            places = _row_bytes(sent) * host_counts(expected).numpy()
            self._comm.Alltoallv([_buffer(sent), lengths], [_buffer(received), places])
            return Handle(received.to(x.device))
        received = torch.empty_like(sent)
        request = self._comm.Ialltoall(_buffer(sent), _buffer(received))
        return Handle(received, request.Wait, (sent,)).then(lambda r: r.to(x.device))


def _buffer(x: Tensor) -> Any:
    """Return a tensor of any dtype as a buffer that mpi4py accepts: bytes."""
    return x.view(-1).view(torch.uint8).numpy()


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1:].numel() * rows.itemsize
