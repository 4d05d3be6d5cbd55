# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The exchanges of ``exchange.py`` over MPI: the same bits, another way. By way of the host.

For machines whose MPI knows the network better than torch's backends do, and for a job that ``mpirun`` or ``srun``
started. Communicators have the members in tree order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_topo.collectives.handle import Handle


class _Request:
    """A request of MPI as the work of a handle."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()


def to_all(comm: Any, message: Tensor) -> Handle[Tensor]:
    """All-gather; see there."""
    sent, received = message.cpu(), torch.empty(comm.Get_size(), message.numel(), dtype=message.dtype)
    work = _Request(comm.Iallgather(_bytes(sent), _bytes(received)))
    return Handle(work, (sent,), lambda: received.to(message.device))


def to_each(comm: Any, table: Tensor) -> Handle[Tensor]:
    """All-to-all; see there."""
    sent, received = table.cpu(), torch.empty_like(table, device="cpu")
    work = _Request(comm.Ialltoall(_bytes(sent), _bytes(received)))
    return Handle(work, (sent,), lambda: received.to(table.device))


def to_each_uneven(comm: Any, rows: Tensor, sizes: Sequence[int], expected: Sequence[int]) -> Handle[Tensor]:
    """All-to-all of any number of rows; see there. Blocks."""
    received, width = torch.empty(sum(expected), rows.shape[1], dtype=rows.dtype), rows.shape[1]
    lengths, due = (width * torch.tensor(counts, dtype=torch.int64).numpy() for counts in (sizes, expected))
    comm.Alltoallv([rows.cpu().numpy(), lengths], [received.numpy(), due])
    return Handle(None, (), lambda: received.to(rows.device))


def to_all_uneven(comm: Any, rows: Tensor, sizes: Sequence[int]) -> Handle[Tensor]:
    """All-gather of any number of rows; see there. Blocks."""
    received, width = torch.empty(sum(sizes), rows.shape[1], dtype=rows.dtype), rows.shape[1]
    comm.Allgatherv(rows.cpu().numpy(), [received.numpy(), width * torch.tensor(sizes).numpy()])
    return Handle(None, (), lambda: received.to(rows.device))


def _bytes(x: Tensor) -> Any:
    """What mpi4py takes, of any dtype."""
    return x.view(torch.uint8).numpy()
