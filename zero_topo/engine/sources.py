# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a gather sends: rows of a shard, or the wire bytes that such rows were quantized to before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from zero_topo.collectives.pack import members, span_pieces
from zero_topo.collectives.wire import Wire
from zero_topo.engine.shards import Layout
from zero_topo.mesh import Route
from zero_topo.quant.codes import Codes


class Source(Protocol):
    """What a gather needs; see :class:`Rows`."""

    @property
    def route(self) -> Route:
        """The members that hold all rows between them."""

    def message(self, slots: Sequence[int]) -> tuple[Tensor, list[int]]:
        """What this rank sends."""

    def decode(self, index: int, messages: Tensor, rows: Tensor) -> None:
        """What has come, as rows."""


@dataclass(frozen=True)
class Rows:
    """Rows of a shard, sent in their own type or quantized on the fly.

    Attributes:
        layout: the slots.
        route: the members that hold all rows between them.
        rows: ``[N / route.hi, F]``.
        wire: the format.
    """

    layout: Layout
    route: Route
    rows: Tensor
    wire: Wire

    @property
    def tensor(self) -> Tensor:
        """What is held."""
        return self.rows

    def message(self, slots: Sequence[int]) -> tuple[Tensor, list[int]]:
        """One message of some slots, uint8 1-D, and where each slot's part begins (plus the end)."""
        parts = [self.layout.slot(self.rows, index) for index in slots]
        ends = _ends(self.wire.nbytes(part.numel()) for part in parts)
        message = self.rows.new_empty(ends[-1], dtype=torch.uint8)
        for part, (begin, end) in zip(parts, pairwise(ends), strict=True):
            self.wire.encode(span_pieces(part, [(0, part.shape[1])]), message[begin:end])
        return message, ends

    def decode(self, index: int, messages: Tensor, rows: Tensor) -> None:
        """A slot's parts of all members' messages -> its rows ``[N / route.lo, width]``, interleaved and rounded."""
        self.wire.decode(messages, span_pieces(members(rows, self.route.size), [(0, rows.shape[1])]))

    def store(self, index: int, rows: Tensor) -> None:
        """Put other values in the place of a slot's rows ``[N / route.hi, width]``."""
        self.layout.slot(self.rows, index).copy_(rows)


class Stored:
    """Rows of a shard that were quantized once, to be sent as often as they are wanted.

    Args:
        like: rows of the same layout, for the slots and the device.
        route: the members that hold all rows between them.
        wire: the format.

    Attributes:
        tensor: uint8, the messages of all slots side by side.
    """

    def __init__(self, like: Rows, route: Route, wire: Wire) -> None:
        self.route, self.wire = route, wire
        rows = like.layout.plan.world_size // route.hi
        self._ends = _ends(wire.nbytes(rows * width) for width in like.layout.widths)
        self.tensor = torch.zeros(self._ends[-1], dtype=torch.uint8, device=like.rows.device)

    def message(self, slots: Sequence[int]) -> tuple[Tensor, list[int]]:
        """As :meth:`Rows.message`, quantized already."""
        parts = [self._part(index) for index in slots]
        return parts[0] if len(parts) == 1 else torch.cat(parts), _ends(part.numel() for part in parts)

    def decode(self, index: int, messages: Tensor, rows: Tensor) -> None:
        """As :meth:`Rows.decode`."""
        self.wire.decode(messages, span_pieces(members(rows, self.route.size), [(0, rows.shape[1])]))

    def store(self, index: int, rows: Tensor) -> None:
        """Quantize a slot's rows ``[N / route.hi, width]``."""
        self.wire.encode(span_pieces(rows, [(0, rows.shape[1])]), self._part(index))

    def _part(self, index: int) -> Tensor:
        return self.tensor[self._ends[index] : self._ends[index + 1]]


class Coded:
    """Parameters of which some are held as codes, and sent as such; the others as rows.

    Args:
        plain: rows of the others, in a layout of their own.
        codes: theirs.
        wire: the format of a slot's codes and scales.
        places: of each slot: whether it has codes, and its place among those alike.
        spans: of each slot that has codes: where its message begins and ends among all.
    """

    def __init__(
        self,
        plain: Rows,
        codes: Codes,
        wire: Wire,
        places: Sequence[tuple[bool, int]],
        spans: Sequence[tuple[int, int]],
    ) -> None:
        self.route = plain.route
        self._plain, self._codes, self._wire, self._places, self._spans = plain, codes, wire, places, spans

    def message(self, slots: Sequence[int]) -> tuple[Tensor, list[int]]:
        """As :meth:`Rows.message`."""
        parts = [self._part(*self._places[index]) for index in slots]
        return parts[0] if len(parts) == 1 else torch.cat(parts), _ends(part.numel() for part in parts)

    def _part(self, coded: bool, place: int) -> Tensor:
        return self._codes.held[slice(*self._spans[place])] if coded else self._plain.message([place])[0]

    def decode(self, index: int, messages: Tensor, rows: Tensor) -> None:
        """As :meth:`Rows.decode`; rows of codes are filled up to whole blocks."""
        coded, place = self._places[index]
        if not coded:
            self._plain.decode(place, messages, rows)
            return
        table = members(rows, self.route.size)
        self._wire.decode(messages, span_pieces(table, [(0, rows.shape[1])], self._wire.block))


def _ends(sizes: Iterable[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))
