# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The gather: every member of a route sends one message to all others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero_topo.collectives.handle import Handle
from zero_topo.collectives.meter import Counted
from zero_topo.collectives.pack import members
from zero_topo.collectives.transport import Route
from zero_topo.collectives.wire import Wire
from zero_topo.quant.ops import PLAIN
from zero_topo.quant.pieces import Piece
from zero_topo.quant.spec import Reduce


def all_gather(route: Route, message: Tensor, counted: Counted) -> Handle[Tensor]:
    """All-gather one message per member.

    1. send ``message`` to the members of the outermost hop, one in each node if there are two hops;
    2. if there is an inner hop: pass on inside the node all that came, on ``wait``.

    A route of one member moves nothing and returns the message itself.

    Args:
        route: the members.
        message: values or wire bytes, 1-D, contiguous, the same size on every member.
        counted: meter and phase.

    Returns:
        ``[outer, inner, numel]`` on ``wait``, a view: what member ``m`` sent is at ``[m // inner, m % inner]``.
    """
    outer = route.hops[-1].metered(counted).gather_later(message)
    if len(route.hops) == 1:
        return outer.then(lambda came: came[None])
    inner = route.hops[0].metered(counted)
    return outer.then(lambda came: inner.gather(came).transpose(0, 1))


def all_gather_pieces(route: Route, pieces: Sequence[Piece], wire: Wire, counted: Counted) -> Handle[None]:
    """All-gather what each member holds into the places where it belongs.

    1. encode this rank's pieces into one message; gather;
    2. on ``wait``, decode every other member's message into its pieces.

    Args:
        route: the members.
        pieces: of all members, in tree order.
        wire: the format.
        counted: meter and phase.
    """
    message = wire.encode([piece.member(route.index) for piece in pieces])
    return spread(route, message, pieces, wire, counted)


def spread(
    route: Route, message: Tensor, pieces: Sequence[Piece], wire: Wire, counted: Counted, reduce: Reduce = PLAIN
) -> Handle[None]:
    """:func:`all_gather_pieces` of a message that is encoded already.

    Args:
        route: as there.
        message: this rank's.
        pieces: as there.
        wire: as there.
        counted: as there.
        reduce: how decoded values meet what the pieces of the others hold; this rank's own are not touched.
    """
    handle = all_gather(route, message, counted)
    return handle.then(lambda messages: wire.decode(messages, pieces, reduce, without=route.index))


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
        by_member = members(rows[:, begin : begin + width], route.size)
        own = by_member[route.index].contiguous()
        came = all_gather(route, own.view(-1), counted).wait()
        by_member.unflatten(0, came.shape[:2]).copy_(came.unflatten(2, own.shape))
