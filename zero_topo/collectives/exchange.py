# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The exchanges everything is made of, in one hop: to all others the same message, or to each its own.

Note [Point to point on gloo]
    gloo sends its collectives in rounds: with two ranks an all-to-all reaches half of a link's rate, an all-gather a
    little more, and its reduce-scatter sends every byte twice. There, whole messages go by ``isend`` and ``irecv``
    instead, all at once. Other backends use their own collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.handle import Work
from zero_topo.mesh import Hop


class Works:
    """Several works as one; keeps what they read and write alive."""

    def __init__(self, works: Sequence[Work], buffers: Sequence[Tensor] = ()) -> None:
        self._works, self._buffers = works, buffers

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        self._works, self._buffers = (), ()


def to_each(hop: Hop, send: Tensor) -> tuple[Tensor, Work]:
    """All-to-all: entry ``s`` of ``send`` (``[size, ...]``, in group order, contiguous) goes to group rank ``s``.

    Returns:
        What each group rank sent here, in the same shape, once the work has been waited for.
    """
    received = torch.empty_like(send)
    assert hop.group is not None
    if not _point_to_point(hop):
        return received, _begun(dist.all_to_all_single(received, send, group=hop.group, async_op=True), send)
    own = hop.slots[hop.index]
    received[own].copy_(send[own])
    return received, _swap(hop, {slot: send[slot] for slot in hop.slots if slot != own}, received)


def to_all(hop: Hop, message: Tensor) -> tuple[Tensor, Work]:
    """All-gather: ``message`` (1-D, contiguous, as long on every member) goes to every member.

    Returns:
        ``[size, numel]`` in group order, once the work has been waited for.
    """
    assert hop.group is not None
    received = torch.empty(hop.size, message.numel(), dtype=message.dtype, device=message.device)
    if not _point_to_point(hop):
        work = dist.all_gather_into_tensor(received.view(-1), message, group=hop.group, async_op=True)
        return received, _begun(work, message)
    own = hop.slots[hop.index]
    received[own].copy_(message)
    return received, _swap(hop, {slot: message for slot in hop.slots if slot != own}, received)


def to_each_uneven(hop: Hop, parts: Sequence[Tensor], sizes: Sequence[int]) -> tuple[list[Tensor], Work]:
    """All-to-all of messages of any length: ``parts[s]`` (bytes, contiguous) goes to group rank ``s``.

    Args:
        hop: the members.
        parts: uint8, 1-D, in group order.
        sizes: bytes that will come from each group rank.

    Returns:
        What each group rank sent here, once the work has been waited for.
    """
    assert hop.group is not None
    own = hop.slots[hop.index]
    if not _point_to_point(hop):
        send = torch.cat(list(parts))
        buffer = send.new_empty(sum(sizes))
        lengths = [part.numel() for part in parts]
        work = dist.all_to_all_single(buffer, send, list(sizes), lengths, group=hop.group, async_op=True)
        return list(buffer.split(list(sizes))), _begun(work, send)
    received = [parts[own] if slot == own else parts[own].new_empty(size) for slot, size in enumerate(sizes)]
    works: list[Work | None] = []
    for distance in range(1, hop.size):
        source, target = (own - distance) % hop.size, (own + distance) % hop.size
        if sizes[source]:
            works.append(dist.irecv(received[source], group=hop.group, group_src=source))
        if parts[target].numel():
            works.append(dist.isend(parts[target], group=hop.group, group_dst=target))
    return received, Works([work for work in works if work is not None], [*received, *parts])


def _point_to_point(hop: Hop) -> bool:
    return bool(dist.get_backend(hop.group) == "gloo")


def _begun(work: Work | None, sent: Tensor) -> Work:
    assert work is not None
    return Works([work], [sent])


def _swap(hop: Hop, parts: dict[int, Tensor], received: Tensor) -> Work:
    """Sends a part to each other group rank and receives one from each; nearest neighbours in the ring first."""
    own = hop.slots[hop.index]
    works: list[Work | None] = []
    for distance in range(1, hop.size):
        source, target = (own - distance) % hop.size, (own + distance) % hop.size
        works.append(dist.irecv(received[source], group=hop.group, group_src=source))
        works.append(dist.isend(parts[target], group=hop.group, group_dst=target))
    return Works([work for work in works if work is not None], [received, *parts.values()])
