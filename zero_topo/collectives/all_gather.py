# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The gather hop: every member sends one message to all others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.handle import Handle
from zero_topo.collectives.meter import Meter
from zero_topo.mesh import Hop


@dataclass(frozen=True)
class Counted:
    """How a blocking gather is counted and cut: the meter, the phase, the elements one collective may carry."""

    meter: Meter
    phase: str
    chunk_numel: int = 1 << 26


def all_gather(hop: Hop, message: Tensor, meter: Meter, phase: str) -> Handle[list[Tensor]]:
    """All-gather one message per member.

    1. send ``message`` (1-D, contiguous, the same size on every member) to the other members;
    2. on ``wait``, return the messages in tree order of the members.

    A group of one moves nothing and returns the message itself.

    Args:
        hop: the group.
        message: values or wire bytes.
        meter: counts ``(size - 1) * message bytes`` under ``phase``.
        phase: one of ``meter.PHASES``.
    """
    if hop.group is None:
        return Handle(None, (message,), lambda: [message])
    meter.record(phase, hop.domain, (hop.size - 1) * message.nbytes)
    received = torch.empty(hop.size * message.numel(), dtype=message.dtype, device=message.device)
    work = dist.all_gather_into_tensor(received, message, group=hop.group, async_op=True)
    pieces = received.view(hop.size, message.numel())
    return Handle(work, (message, received), lambda: [pieces[slot] for slot in hop.slots])


def all_gather_rows(hop: Hop, rows: Tensor, counted: Counted, dtype: torch.dtype | None = None) -> None:
    """All-gather, in place, the degree-``lo`` shard of which this rank holds its degree-``hi`` rows. Blocking.

    Where every member holds one row and torch's group order is the tree's, rows are received where they belong;
    otherwise they pass through a buffer of at most ``counted.chunk_numel`` elements.

    Args:
        hop: the group.
        rows: ``[N / lo, columns]``; on entry the rows ``j`` with ``j % size == index`` are valid, on return all are.
        counted: meter, phase and chunk size.
        dtype: type in which the values travel; None means that of ``rows``. The sender's own rows are not rounded.
    """
    if hop.group is None or rows.numel() == 0:
        return
    if rows.shape[0] == hop.size and hop.in_order and rows.is_contiguous() and dtype in (None, rows.dtype):
        own = rows[hop.index]
        counted.meter.record(counted.phase, hop.domain, (hop.size - 1) * own.nbytes)
        dist.all_gather_into_tensor(rows.view(-1), own, group=hop.group)
        return
    width = max(1, counted.chunk_numel // rows.shape[0])
    for begin in range(0, rows.shape[1], width):
        by_member = rows[:, begin : begin + width].unflatten(0, (-1, hop.size))
        message = by_member[:, hop.index].to(dtype or rows.dtype).contiguous()
        pieces = all_gather(hop, message.view(-1), counted.meter, counted.phase).wait()
        for member, piece in enumerate(pieces):
            if member != hop.index:
                by_member[:, member].copy_(piece.view_as(message))
