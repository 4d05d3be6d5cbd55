# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Implements the process groups of backends that need their own exchanges.

Note [Point to point on gloo]
    gloo sends its collectives in rounds: with two ranks an all-to-all reaches half of a link's
    rate, an all-gather a little more, and its reduce-scatter sends every byte twice. With gloo,
    :class:`Gloo` therefore sends whole messages by ``isend`` and ``irecv``, all at once. Other
    backends use their own collectives.

Note [Works that are kept]
    A thread that destroys a work of gloo spins until gloo's thread has released it. On ranks with
    fewer than two cores each, this may take a time slice of the scheduler. Among four ranks on two
    cores, sending a byte took 2.9 ms; it takes 1.3 ms if finished works are kept until a later
    exchange of the same group is waited for. A work keeps its message alive, so works of long
    messages are released at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Group

KEPT = 1 << 22  # bytes


class Gloo(Group):
    """Exchanges messages point to point; see Note [Point to point on gloo]."""

    sums = False

    def _all_gather(self, x: Tensor, counts: Sequence[int] = ()) -> Handle[Tensor]:
        rows = x.contiguous() if counts else x[None].contiguous()
        counts = counts or [1] * self.size
        received = self._room(counts, rows)
        return self._swap([rows] * self.size, received.split(list(counts)), received)

    def _all_to_all(
        self,
        x: Tensor,
        counts: Sequence[int] = (),
        expected: Sequence[int] = (),
    ) -> Handle[Tensor]:
        rows = x.contiguous()
        counts = counts or [1] * self.size
        received = self._room(expected or counts, rows)
        places = received.split(list(expected or counts))
        return self._swap(rows.split(list(counts)), places, received)

    def _swap(
        self,
        parts: Sequence[Tensor],
        places: Sequence[Tensor],
        received: Tensor,
    ) -> Handle[Tensor]:
        """Send a part to each other member and receive one from each, nearest neighbours in the
        ring first.

        Empty messages are not sent.
        """
        members = self.members
        size = self.size
        own = self.group_ranks[self.index]
        # The own part is not sent.
        places[self.index].copy_(parts[self.index])
        works: list[Any] = []
        nbytes = 0
        for distance in range(1, size):
            # A receive is posted before each send, so that a message finds its place.
            source = (own - distance) % size
            target = (own + distance) % size
            if (place := places[members[source]]).numel():
                nbytes += place.nbytes
                works.append(dist.irecv(place, group=self.group, group_src=source))
            if (part := parts[members[target]]).numel():
                nbytes += part.nbytes
                works.append(dist.isend(part, group=self.group, group_dst=target))
        done = self.done if nbytes <= KEPT else []

        def wait() -> None:
            for work in works:
                work.wait()
            # The previous works are destroyed only now; see Note [Works that are kept].
            done[:] = works
            works.clear()

        return Handle(received, wait, (parts, received))


def transport() -> Callable[..., Group]:
    """Return what makes groups for the world's backend; without a name torch chooses one for each
    device.
    """
    backend: str = dist.get_backend()
    if backend == "undefined" and dist.get_backend_config() == "cpu:gloo":
        backend = "gloo"
    return Gloo if backend == "gloo" else Group
