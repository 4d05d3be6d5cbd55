# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The gather: every member of a route sends one message to all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_topo.collectives.handle import Handle
from zero_topo.collectives.meter import Counted
from zero_topo.collectives.peers import Peers
from zero_topo.collectives.wire import Wire
from zero_topo.mesh import Route
from zero_topo.quant.ops import PLAIN
from zero_topo.quant.pieces import Piece, total_numel
from zero_topo.quant.spec import Reduce


def all_gather(route: Route, message: Tensor, counted: Counted) -> Handle[list[Tensor]]:
    """All-gather one message per member.

    1. send ``message`` to the members of the outermost hop, one in each node if there are two hops;
    2. if there is an inner hop: pass on inside the node all that came, on ``wait``;
    3. return the messages in tree order of the members.

    A route of one member moves nothing and returns the message itself.

    Args:
        route: the members.
        message: values or wire bytes, 1-D, contiguous, the same size on every member.
        counted: meter and phase.
    """
    outer = Peers(route.hops[-1], counted).gather_later(message)
    if len(route.hops) == 1:
        return Handle(None, (), lambda: list(outer.wait()))
    inner = Peers(route.hops[0], counted)

    def finish() -> list[Tensor]:
        # [inner member, outer member, values]: member c of the route is c % inner.size there, c // inner.size here
        table = inner.gather(outer.wait())
        return [table[c % inner.size, c // inner.size] for c in range(route.size)]

    return Handle(None, (), finish)


def all_gather_pieces(
    route: Route, members: Sequence[Sequence[Piece]], wire: Wire, counted: Counted, reduce: Reduce = PLAIN
) -> Handle[None]:
    """All-gather what each member holds into the places where it belongs.

    1. encode this rank's pieces, ``members[route.index]``, into one message; gather;
    2. on ``wait``, decode every other member's message into its pieces.

    Args:
        route: the members.
        members: for each, in tree order, its pieces; of one total size.
        wire: the format.
        counted: meter and phase.
        reduce: how decoded values meet what the pieces of the others hold; this rank's own are not touched.
    """
    own = members[route.index]
    message = torch.empty(wire.nbytes(total_numel(own)), dtype=torch.uint8, device=own[0].flat.device)
    wire.encode(own, message)
    return spread(route, message, members, wire, counted, reduce)


def spread(
    route: Route,
    message: Tensor,
    members: Sequence[Sequence[Piece]],
    wire: Wire,
    counted: Counted,
    reduce: Reduce = PLAIN,
) -> Handle[None]:
    """:func:`all_gather_pieces` of a message that is encoded already."""
    handle = all_gather(route, message, counted)

    def finish() -> None:
        for member, (pieces, came) in enumerate(zip(members, handle.wait(), strict=True)):
            if member != route.index:
                wire.reduce([came], pieces, reduce)

    return Handle(None, (), finish)


def all_gather_rows(route: Route, rows: Tensor, counted: Counted, chunk_numel: int = 1 << 26) -> None:
    """All-gather, in place, the degree-``lo`` shard of which this rank holds its degree-``hi`` rows. Blocking.

    Args:
        route: the members.
        rows: ``[N / lo, columns]``; on entry the rows ``j`` with ``j % size == index`` are valid, on return all are.
        counted: meter and phase.
        chunk_numel: elements that one collective may carry.
    """
    if route.size == 1 or rows.numel() == 0:
        return
    width = max(1, chunk_numel // rows.shape[0])
    for begin in range(0, rows.shape[1], width):
        by_member = rows[:, begin : begin + width].unflatten(0, (-1, route.size))
        message = by_member[:, route.index].contiguous()
        pieces = all_gather(route, message.view(-1), counted).wait()
        for member, piece in enumerate(pieces):
            if member != route.index:
                by_member[:, member].copy_(piece.view_as(message))
