# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The reduction: per hop one all-to-all, FP32 accumulation in tree order of the members.

Why not a library reduce-scatter: its sum order and precision depend on the backend (BF16 sums, ring order), it cannot
carry block-quantized values, and gloo's sends every byte twice. One all-to-all sends ``(d - 1) / d`` of the input, as
a ring does, and the same code serves INT4, INT8, 16-bit and FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from zero_topo.collectives.exchange import to_each
from zero_topo.collectives.handle import Handle
from zero_topo.collectives.meter import Exchange, Meter
from zero_topo.collectives.wire import Wire, settle
from zero_topo.mesh import Hop, Route
from zero_topo.quant.ops import PLAIN
from zero_topo.quant.pieces import Piece, read_all, total_numel
from zero_topo.quant.spec import Reduce


@dataclass(frozen=True)
class Sums:
    """Where a reduction goes and how it is counted.

    Attributes:
        pieces: take this rank's sums.
        reduce: what becomes of them.
        meter: counts the bytes sent.
        phase: one of ``meter.PHASES``.
    """

    pieces: Sequence[Piece]
    meter: Meter
    phase: str
    reduce: Reduce = PLAIN


def reduce_scatter(route: Route, parts: Sequence[Sequence[Piece]], wire: Wire, sums: Sums) -> Handle[None]:
    """Sum over the members of a route; each keeps its own part.

    1. encode ``parts[k]`` into one message for member ``k``;
    2. per hop, the innermost first: one all-to-all takes each message to the member that stands for its destination,
       where the messages for one destination are summed in tree order (FP32) and, if a hop follows, encoded again;
    3. the last sums go into ``sums.pieces``.

    Args:
        route: the members.
        parts: for each member, in tree order, the values it shall sum; all of one size.
        wire: the format.
        sums: where they go.

    Returns:
        Finishes with step 2's sums when waited for. A route of one member sums nothing, and does not quantize.
    """
    if route.size == 1:
        settle(read_all(parts[0]), sums.pieces, sums.reduce)
        return Handle(None, (), _nothing)
    first, numel = route.hops[0], total_numel(sums.pieces)
    send = _empty(first, len(parts), wire.nbytes(numel), sums.pieces[0].flat.device)
    for member, pieces in enumerate(parts):
        wire.encode(pieces, _place(send, first, member))
    began = _exchange(first, send, sums)

    def finish() -> None:
        received = began.wait()
        for hop, following in zip_longest(route.hops, route.hops[1:]):
            by_destination = [[received[slot, rest] for slot in hop.slots] for rest in range(received.shape[1])]
            if following is None:
                wire.reduce(by_destination[0], sums.pieces, sums.reduce)
                return
            send = _empty(following, len(by_destination), wire.nbytes(numel), received.device)
            for destination, messages in enumerate(by_destination):
                wire.recode(messages, _place(send, following, destination), numel)
            received = _exchange(following, send, sums).wait()

    return Handle(None, (), finish)


def _nothing() -> None:
    return None


def _empty(hop: Hop, destinations: int, nbytes: int, device: torch.device) -> Tensor:
    """Room for the messages of a hop: ``[members in group order, destinations behind each, bytes]``."""
    return torch.empty(hop.size, destinations // hop.size, nbytes, dtype=torch.uint8, device=device)


def _place(send: Tensor, hop: Hop, destination: int) -> Tensor:
    member, rest = destination % hop.size, destination // hop.size
    return send[hop.slots[member], rest]


def _exchange(hop: Hop, send: Tensor, sums: Sums) -> Handle[Tensor]:
    if hop.group is None:
        return Handle(None, (), lambda: send)
    nbytes = (hop.size - 1) * (send.nbytes // hop.size)
    exchange = Exchange("all_to_all", sums.phase, hop.domain, hop.size, nbytes)
    received, work = sums.meter.exchange(exchange, lambda: to_each(hop, send))
    return Handle(work, (), lambda: received)
