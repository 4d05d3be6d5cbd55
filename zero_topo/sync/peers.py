# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the members of one hop say to one another in a sparse mode: messages of any length, every byte metered.

Members are counted in tree order. All calls are collective: every member makes the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from zero_topo.collectives.exchange import to_all, to_each, to_each_uneven
from zero_topo.collectives.handle import Handle
from zero_topo.collectives.meter import Exchange, Meter
from zero_topo.mesh import Hop


class Peers:
    """The members of a hop.

    Attributes:
        size: how many there are.
        index: which one this rank is.
    """

    def __init__(self, hop: Hop, meter: Meter, device: torch.device, phase: str = "sync") -> None:
        self.size, self.index = hop.size, hop.index
        self._hop, self._meter, self._device, self._phase = hop, meter, device, phase

    def gather(self, x: Tensor) -> Tensor:
        """``x``, of one shape on all members, from each: ``[size, *x.shape]``."""
        return self.gather_later(x).wait()

    def gather_later(self, x: Tensor) -> Handle[Tensor]:
        """As :meth:`gather`, under way when this returns; wait for it before any other call of this object.

        Args:
            x: must not change until then.
        """
        if self.size == 1:
            return Handle(None, (), lambda: x[None])
        message = as_bytes(x)
        exchange = self._exchange("all_gather", (self.size - 1) * message.numel())
        received, work = self._meter.exchange(exchange, lambda: to_all(self._hop, message))
        slots = list(self._hop.slots)
        return Handle(work, (message, received), lambda: received[slots].view(x.dtype).view(self.size, *x.shape))

    def gather_uneven(self, x: Tensor) -> list[Tensor]:
        """``x``, 1-D of any length, from each."""
        return self.scatter_uneven([x] * self.size)

    def scatter_uneven(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """``parts[c]``, 1-D of any length, goes to member ``c``; what each member sent here."""
        sizes = self.scatter_sizes([part.numel() for part in parts])
        return self.scatter_known(parts, sizes)

    def scatter_sizes(self, sizes: Sequence[int]) -> list[int]:
        """``sizes[c]`` goes to member ``c``; what each member says here."""
        if self.size == 1:
            return list(sizes)
        send = torch.zeros(self.size, dtype=torch.int64)
        send[list(self._hop.slots)] = torch.tensor(sizes)
        send = send.to(self._device)
        exchange = self._exchange("all_to_all", (self.size - 1) * send.itemsize)
        received, work = self._meter.exchange(exchange, lambda: to_each(self._hop, send))
        work.wait()
        return [int(n) for n in received[list(self._hop.slots)].tolist()]

    def scatter_known(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """As :meth:`scatter_uneven`, where all members know the lengths: ``sizes[c]`` elements come from ``c``."""
        if self.size == 1:
            return list(parts)
        dtype, itemsize = parts[0].dtype, parts[0].itemsize
        placed: list[Tensor] = [parts[0]] * self.size
        lengths = [0] * self.size
        for member, slot in enumerate(self._hop.slots):
            placed[slot] = as_bytes(parts[member])
            lengths[slot] = sizes[member] * itemsize
        own = self._hop.slots[self.index]
        nbytes = sum(part.numel() for slot, part in enumerate(placed) if slot != own)
        exchange = self._exchange("all_to_all", nbytes, even=False)
        received, work = self._meter.exchange(exchange, lambda: to_each_uneven(self._hop, placed, lengths))
        work.wait()
        return [received[slot].view(dtype) for slot in self._hop.slots]

    def _exchange(self, op: Literal["all_gather", "all_to_all"], nbytes: int, even: bool = True) -> Exchange:
        return Exchange(op, self._phase, self._hop.domain, self.size, nbytes, even)


def as_bytes(x: Tensor) -> Tensor:
    """A tensor as uint8, 1-D."""
    return x.contiguous().view(-1).view(torch.uint8)
