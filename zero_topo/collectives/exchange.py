# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The exchanges in one hop: to all others the same message, or to each its own. Members are in tree order.

They are torch's, or for a hop over MPI those of ``mpi.py``.

Note [Point to point on gloo]
    gloo sends its collectives in rounds: with two ranks an all-to-all reaches half of a link's rate, an all-gather a
    little more, and its reduce-scatter sends every byte twice. There, whole messages go by ``isend`` and ``irecv``
    instead, all at once. Other backends use their own collectives.

Note [Group order]
    Backends count a group's members by global rank (``Hop.slots``). Where that is not the tree's order, what a
    collective sends and receives is reordered by one copy on the device, by an index that stays there; messages from
    point to point need none.

Note [Works that are kept]
    Who destroys a work of gloo spins until gloo's thread has let go of it. Where ranks have no two cores each that may
    wait for the scheduler: among four ranks on two cores a byte took 2.9 ms, and takes 1.3 where works that are done
    are kept until a later exchange of the same hop is waited for. They hold their messages: long ones go at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives import mpi
from zero_topo.collectives.handle import Handle, Work
from zero_topo.mesh import Hop

KEPT = 1 << 22  # bytes


class Works:
    """Several works as one, which takes the place of another when it is done; Note [Works that are kept]."""

    def __init__(self, works: Sequence[dist.Work], done: list[dist.Work]) -> None:
        self._works, self._done = works, done

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        self._done[:], self._works = self._works, ()


def to_all(hop: Hop, message: Tensor) -> Handle[Tensor]:
    """All-gather: ``message`` (1-D, contiguous, as long on every member) goes to every member.

    Returns:
        ``[size, numel]``, once waited for.
    """
    if hop.comm is not None:
        return mpi.to_all(hop.comm, message)
    received = torch.empty(hop.size, message.numel(), dtype=message.dtype, device=message.device)
    if _point_to_point(hop):
        received[hop.index].copy_(message)
        return Handle(_swap(hop, [message] * hop.size, received), (message,), lambda: received)
    work = dist.all_gather_into_tensor(received.view(-1), message, group=hop.group, async_op=True)
    return Handle(work, (message,), lambda: received if hop.in_order else received[_slots(hop.slots, message.device)])


def to_each(hop: Hop, table: Tensor) -> Handle[Tensor]:
    """All-to-all: entry ``c`` of ``table`` (``[size, ...]``, contiguous) goes to member ``c``.

    Returns:
        What each member sent here, in the same shape, once waited for.
    """
    if hop.comm is not None:
        return mpi.to_each(hop.comm, table)
    if _point_to_point(hop):
        received = torch.empty_like(table)
        received[hop.index].copy_(table[hop.index])
        return Handle(_swap(hop, table, received), (table,), lambda: received)
    send = table if hop.in_order else table[_slots(_members(hop.slots), table.device)]
    received = torch.empty_like(send)
    work = dist.all_to_all_single(received, send, group=hop.group, async_op=True)
    return Handle(work, (send,), lambda: received if hop.in_order else received[_slots(hop.slots, table.device)])


def to_each_uneven(hop: Hop, rows: Tensor, sizes: Sequence[int], expected: Sequence[int]) -> Handle[Tensor]:
    """All-to-all of any number of rows: the next ``sizes[c]`` of them go to member ``c``.

    Args:
        hop: the members.
        rows: uint8 ``[sum(sizes), width]``, contiguous.
        sizes: rows to each member.
        expected: rows that will come from each member.

    Returns:
        What came, ``[sum(expected), width]`` in the order of the members, once waited for.
    """
    if hop.comm is not None:
        return mpi.to_each_uneven(hop.comm, rows, sizes, expected)
    received = rows.new_empty(sum(expected), rows.shape[1])
    if _point_to_point(hop):
        parts, places = rows.split(list(sizes)), received.split(list(expected))
        places[hop.index].copy_(parts[hop.index])
        return Handle(_swap(hop, parts, places), (rows,), lambda: received)
    if hop.in_order:
        work = dist.all_to_all_single(received, rows, list(expected), list(sizes), group=hop.group, async_op=True)
        return Handle(work, (rows,), lambda: received)
    members = _slots(_members(hop.slots), torch.device("cpu"))
    lengths, due = torch.tensor(sizes), torch.tensor(expected)[members]
    send = _regrouped(rows, lengths, members)
    lists = due.tolist(), lengths[members].tolist()
    work = dist.all_to_all_single(received, send, *lists, group=hop.group, async_op=True)
    return Handle(work, (send,), lambda: _regrouped(received, due, _slots(hop.slots, torch.device("cpu"))))


def to_all_uneven(hop: Hop, rows: Tensor, sizes: Sequence[int]) -> Handle[Tensor]:
    """All-gather of any number of rows.

    Args:
        hop: the members.
        rows: uint8 ``[sizes[index], width]``, contiguous.
        sizes: rows of each member.

    Returns:
        Those of all, ``[sum(sizes), width]`` in the order of the members, once waited for.
    """
    if hop.comm is not None:
        return mpi.to_all_uneven(hop.comm, rows, sizes)
    if not _point_to_point(hop):
        return to_each_uneven(hop, rows.repeat(hop.size, 1), [len(rows)] * hop.size, sizes)
    received = rows.new_empty(sum(sizes), rows.shape[1])
    places = received.split(list(sizes))
    places[hop.index].copy_(rows)
    return Handle(_swap(hop, [rows] * hop.size, places), (rows,), lambda: received)


def _regrouped(rows: Tensor, sizes: Tensor, order: Tensor) -> Tensor:
    """Groups of rows, so many each (int64, on the host), in another order."""
    lengths, begins = sizes[order], (sizes.cumsum(0) - sizes)[order]
    shifts, counts = begins - (lengths.cumsum(0) - lengths), lengths.to(rows.device, non_blocking=True)
    shifts = shifts.to(rows.device, non_blocking=True).repeat_interleave(counts, output_size=rows.shape[0])
    return rows[torch.arange(rows.shape[0], device=rows.device) + shifts]


def _point_to_point(hop: Hop) -> bool:
    return bool(dist.get_backend(hop.group) == "gloo")


@lru_cache(maxsize=64)
def _slots(slots: tuple[int, ...], device: torch.device) -> Tensor:
    """An order as an index that stays on a device."""
    return torch.tensor(slots, device=device)


@lru_cache(maxsize=64)
def _members(slots: tuple[int, ...]) -> tuple[int, ...]:
    """The member that each group rank is."""
    return tuple(sorted(range(len(slots)), key=slots.__getitem__))


def _swap(hop: Hop, parts: Sequence[Tensor] | Tensor, received: Sequence[Tensor] | Tensor) -> Work:
    """Sends a part to each other member and receives one from each; nearest neighbours in the ring first.

    Empty messages are not sent.
    """
    members, own = _members(hop.slots), hop.slots[hop.index]
    works: list[dist.Work | None] = []
    nbytes = 0
    for distance in range(1, hop.size):
        source, target = (own - distance) % hop.size, (own + distance) % hop.size
        if received[members[source]].numel():
            nbytes += received[members[source]].nbytes
            works.append(dist.irecv(received[members[source]], group=hop.group, group_src=source))
        if parts[members[target]].numel():
            nbytes += parts[members[target]].nbytes
            works.append(dist.isend(parts[members[target]], group=hop.group, group_dst=target))
    return Works([work for work in works if work is not None], hop.done if nbytes <= KEPT else [])
