# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the members of one hop say to one another, every byte metered.

Members are counted in tree order. All calls are collective: every member makes the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor

from zero_topo.collectives.exchange import to_all, to_each, to_each_uneven
from zero_topo.collectives.handle import Handle
from zero_topo.collectives.meter import Counted, Exchange
from zero_topo.mesh import Hop

T = TypeVar("T")


class Peers:
    """The members of a hop, by torch's collectives. Another transport overrides the three ``_to_`` methods.

    Attributes:
        size: how many there are.
        index: which one this rank is.
    """

    def __init__(self, hop: Hop, counted: Counted) -> None:
        self.size, self.index = hop.size, hop.index
        self._hop, self._counted = hop, counted

    def gather(self, x: Tensor) -> Tensor:
        """``x``, of one shape on all members, from each: ``[size, *x.shape]``."""
        return self.gather_later(x).wait()

    def gather_later(self, x: Tensor) -> Handle[Tensor]:
        """As :meth:`gather`, under way when this returns.

        Args:
            x: must not change until it has been waited for.
        """
        if self.size == 1:
            return Handle(None, (), lambda: x[None])
        came = self._begin("all_gather", (self.size - 1) * x.nbytes, partial(self._to_all, as_bytes(x)))
        return Handle(None, (), lambda: came.wait().view(x.dtype).view(self.size, *x.shape))

    def scatter_later(self, table: Tensor) -> Handle[Tensor]:
        """Entry ``c`` of ``table`` goes to member ``c``; what each member sent here, under way when this returns.

        Args:
            table: ``[size, ...]``, contiguous, of one shape on all members; must not change until it has been waited
                for.
        """
        if self.size == 1:
            return Handle(None, (), lambda: table)
        nbytes = (self.size - 1) * (table.nbytes // self.size)
        return self._begin("all_to_all", nbytes, partial(self._to_each, table))

    def gather_uneven(self, x: Tensor) -> list[Tensor]:
        """``x``, 1-D of any length, from each."""
        return self.scatter_uneven([x] * self.size)

    def scatter_uneven(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """``parts[c]``, 1-D of any length, goes to member ``c``; what each member sent here."""
        sizes = torch.tensor([part.numel() for part in parts], device=parts[0].device)
        return self.scatter_known(parts, self.scatter_sizes(sizes))

    def scatter_sizes(self, sizes: Tensor) -> list[int]:
        """``sizes[c]`` (int64 ``[size]``) goes to member ``c``; what each member says here."""
        return [int(n) for n in self.scatter_later(sizes).wait().tolist()]

    def scatter_known(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """As :meth:`scatter_uneven`, where all members know the lengths: ``sizes[c]`` elements come from ``c``."""
        if self.size == 1:
            return list(parts)
        dtype = parts[0].dtype
        messages, lengths = [as_bytes(part) for part in parts], [n * dtype.itemsize for n in sizes]
        nbytes = sum(message.numel() for member, message in enumerate(messages) if member != self.index)
        begin = partial(self._to_each_uneven, messages, lengths)
        return [message.view(dtype) for message in self._begin("all_to_all", nbytes, begin, even=False).wait()]

    def _begin(
        self, op: Literal["all_gather", "all_to_all"], nbytes: int, begin: Callable[[], Handle[T]], even: bool = True
    ) -> Handle[T]:
        exchange = Exchange(op, self._counted.phase, self._hop.domain, self.size, nbytes, even)
        return self._counted.meter.exchange(exchange, begin)

    def _to_all(self, message: Tensor) -> Handle[Tensor]:
        return to_all(self._hop, message)

    def _to_each(self, table: Tensor) -> Handle[Tensor]:
        return to_each(self._hop, table)

    def _to_each_uneven(self, messages: Sequence[Tensor], lengths: Sequence[int]) -> Handle[list[Tensor]]:
        return to_each_uneven(self._hop, messages, lengths)


def as_bytes(x: Tensor) -> Tensor:
    """A tensor as uint8, 1-D."""
    return x.contiguous().view(-1).view(torch.uint8)
