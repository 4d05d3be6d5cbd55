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

from zero_topo.collectives.exchange import to_all, to_all_uneven, to_each, to_each_uneven
from zero_topo.collectives.handle import Handle
from zero_topo.collectives.meter import Counted, Exchange
from zero_topo.mesh import Hop

T = TypeVar("T")


class Peers:
    """The members of a hop, as ``exchange.py`` carries it.

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
        came = self._begin("all_gather", (self.size - 1) * x.nbytes, partial(to_all, self._hop, as_bytes(x)))
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
        return self._begin("all_to_all", nbytes, partial(to_each, self._hop, table))

    def scatter(self, table: Tensor) -> Tensor:
        """As :meth:`scatter_later`, of any type, waited for."""
        came = self.scatter_later(as_bytes(table).view(self.size, -1)).wait()
        return came.view(-1).view(table.dtype).view(table.shape)

    def gather_known(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """``rows`` (``[sizes[index], ...]``) of each, where all members know how many: ``[sum(sizes), ...]``."""
        begin = partial(to_all_uneven, self._hop, _rows_of_bytes(rows), sizes)
        return self._uneven(rows, (self.size - 1) * rows.nbytes, begin)

    def scatter_known(self, rows: Tensor, sizes: Sequence[int], expected: Sequence[int]) -> Tensor:
        """The next ``sizes[c]`` rows go to member ``c``; what each member sent here, one after the other.

        Args:
            rows: ``[sum(sizes), ...]``, contiguous.
            sizes: on the host.
            expected: rows that come from each member, who say the same.
        """
        table = _rows_of_bytes(rows)
        begin = partial(to_each_uneven, self._hop, table, sizes, expected)
        return self._uneven(rows, (len(table) - sizes[self.index]) * table.shape[1], begin)

    def _uneven(self, rows: Tensor, nbytes: int, begin: Callable[[], Handle[Tensor]]) -> Tensor:
        """What comes, as rows like those given."""
        if self.size == 1:
            return rows
        came = self._begin("all_to_all", nbytes, begin, even=False).wait()
        return came.view(-1).view(rows.dtype).view(len(came), *rows.shape[1:])

    def _begin(
        self, op: Literal["all_gather", "all_to_all"], nbytes: int, begin: Callable[[], Handle[T]], even: bool = True
    ) -> Handle[T]:
        exchange = Exchange(op, self._counted.phase, self._hop.domain, self.size, nbytes, even)
        return self._counted.meter.exchange(exchange, begin)


def _rows_of_bytes(rows: Tensor) -> Tensor:
    """Rows of any shape as uint8, ``[rows, width]``."""
    return rows.view(torch.uint8).view(len(rows), rows.shape[1:].numel() * rows.itemsize)


def as_bytes(x: Tensor) -> Tensor:
    """A tensor as uint8, 1-D."""
    return x.contiguous().view(-1).view(torch.uint8)
