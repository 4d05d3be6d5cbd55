# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The reduction: per hop one all-to-all, FP32 accumulation in tree order of the members.

Why not a library reduce-scatter: its sum order and precision depend on the backend (BF16 sums, ring order), it cannot
carry block-quantized values, and gloo's sends every byte twice. One all-to-all sends ``(d - 1) / d`` of the input, as
a ring does, and the same code serves INT4, INT8, 16-bit and FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_topo.collectives.handle import Handle
from zero_topo.collectives.meter import Counted
from zero_topo.collectives.transport import Group, Route
from zero_topo.collectives.wire import Wire
from zero_topo.quant.ops import PLAIN
from zero_topo.quant.pieces import Piece, at_blocks, total_numel
from zero_topo.quant.spec import Cast, Reduce


@dataclass(frozen=True)
class Sums:
    """Where a reduction goes and how it is counted.

    Attributes:
        pieces: take this rank's sums.
        counted: meter and phase.
        reduce: what becomes of them.
    """

    pieces: Sequence[Piece]
    counted: Counted
    reduce: Reduce = PLAIN


def reduce_scatter(route: Route, parts: Sequence[Piece], wire: Wire, sums: Sums) -> Handle[None]:
    """Sum over the members of a route; each keeps its own part.

    1. encode the parts of each member into one message for it; each part begins a block, so that it does not share a
       scale with another, which may be a thousand times larger (a matrix beside a norm);
    2. per hop, the innermost first: one all-to-all takes each message to the member that stands for its destination,
       where the messages for one destination are summed in tree order (FP32) and, if a hop follows, encoded again;
    3. the last sums go into ``sums.pieces``.

    Args:
        route: the members.
        parts: the values that each member, in tree order, shall sum.
        wire: the format.
        sums: where they go; part by part as large as ``parts`` if blocks have scales.

    Returns:
        Finishes with step 2's sums when waited for. A route of one member sums nothing, and does not quantize.
    """
    if route.size == 1:
        exact = Wire(Cast("fp32"))
        exact.decode(exact.encode(parts), sums.pieces, sums.reduce)
        return Handle(None, (), lambda: None)
    pieces = at_blocks(sums.pieces, wire.block)
    first, numel = route.hops[0], total_numel(pieces)
    send = _empty(first, route.size, wire.nbytes(numel), pieces[0].flat.device)
    wire.encode(at_blocks(parts, wire.block), send.transpose(0, 1))

    def finish(received: Tensor) -> None:
        for following in route.hops[1:]:
            send = _empty(following, received.shape[1], wire.nbytes(numel), received.device)
            wire.recode(received, send.transpose(0, 1), numel)
            received = following.metered(sums.counted).scatter_later(send).wait()
        wire.reduce(received[:, 0], pieces, sums.reduce)

    return first.metered(sums.counted).scatter_later(send).then(finish)


def _empty(hop: Group, destinations: int, nbytes: int, device: torch.device) -> Tensor:
    """Room for the messages of a hop: ``[members, destinations behind each, bytes]``."""
    return torch.empty(hop.size, destinations // hop.size, nbytes, dtype=torch.uint8, device=device)
