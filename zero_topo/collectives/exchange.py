# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""torch's exchanges in one hop: to all others the same message, or to each its own. Members are in tree order.

Note [Point to point on gloo]
    gloo sends its collectives in rounds: with two ranks an all-to-all reaches half of a link's rate, an all-gather a
    little more, and its reduce-scatter sends every byte twice. There, whole messages go by ``isend`` and ``irecv``
    instead, all at once. Other backends use their own collectives.

Note [Group order]
    Backends count a group's members by global rank (``Hop.slots``). Where that is not the tree's order, what a
    collective sends and receives is reordered by a copy; messages from point to point need none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.handle import Handle, Work
from zero_topo.mesh import Hop


class Works:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        self._works = ()


def to_all(hop: Hop, message: Tensor) -> Handle[Tensor]:
    """All-gather: ``message`` (1-D, contiguous, as long on every member) goes to every member.

    Returns:
        ``[size, numel]``, once waited for.
    """
    received = torch.empty(hop.size, message.numel(), dtype=message.dtype, device=message.device)
    if _point_to_point(hop):
        received[hop.index].copy_(message)
        return Handle(_swap(hop, [message] * hop.size, received), (message,), lambda: received)
    work = dist.all_gather_into_tensor(received.view(-1), message, group=hop.group, async_op=True)
    return Handle(work, (message,), lambda: received if hop.in_order else received[list(hop.slots)])


def to_each(hop: Hop, table: Tensor) -> Handle[Tensor]:
    """All-to-all: entry ``c`` of ``table`` (``[size, ...]``, contiguous) goes to member ``c``.

    Returns:
        What each member sent here, in the same shape, once waited for.
    """
    if _point_to_point(hop):
        received = torch.empty_like(table)
        received[hop.index].copy_(table[hop.index])
        return Handle(_swap(hop, table, received), (table,), lambda: received)
    send = table if hop.in_order else table[_by_slot(hop)]
    received = torch.empty_like(send)
    work = dist.all_to_all_single(received, send, group=hop.group, async_op=True)
    return Handle(work, (send,), lambda: received if hop.in_order else received[list(hop.slots)])


def to_each_uneven(hop: Hop, parts: Sequence[Tensor], sizes: Sequence[int]) -> Handle[list[Tensor]]:
    """All-to-all of messages of any length: ``parts[c]`` (bytes, 1-D, contiguous) goes to member ``c``.

    Args:
        hop: the members.
        parts: uint8.
        sizes: bytes that will come from each member.

    Returns:
        What each member sent here, once waited for; what stays here is not copied.
    """
    if _point_to_point(hop):
        received = [parts[hop.index].new_empty(size) for size in sizes]
        received[hop.index] = parts[hop.index]
        return Handle(_swap(hop, parts, received), tuple(parts), lambda: received)
    members = _by_slot(hop)
    send = torch.cat([parts[member] for member in members])
    lengths, expected = ([count[member] for member in members] for count in ([p.numel() for p in parts], sizes))
    buffer = send.new_empty(sum(sizes))
    work = dist.all_to_all_single(buffer, send, expected, lengths, group=hop.group, async_op=True)
    received = buffer.split(expected)
    return Handle(work, (send,), lambda: [received[slot] for slot in hop.slots])


def _point_to_point(hop: Hop) -> bool:
    return bool(dist.get_backend(hop.group) == "gloo")


def _by_slot(hop: Hop) -> list[int]:
    """The member that each group rank is."""
    return sorted(range(hop.size), key=hop.slots.__getitem__)


def _swap(hop: Hop, parts: Sequence[Tensor] | Tensor, received: Sequence[Tensor] | Tensor) -> Work:
    """Sends a part to each other member and receives one from each; nearest neighbours in the ring first.

    Empty messages are not sent.
    """
    members, own = _by_slot(hop), hop.slots[hop.index]
    works: list[Work | None] = []
    for distance in range(1, hop.size):
        source, target = (own - distance) % hop.size, (own + distance) % hop.size
        if received[members[source]].numel():
            works.append(dist.irecv(received[members[source]], group=hop.group, group_src=source))
        if parts[members[target]].numel():
            works.append(dist.isend(parts[members[target]], group=hop.group, group_dst=target))
    return Works([work for work in works if work is not None])
