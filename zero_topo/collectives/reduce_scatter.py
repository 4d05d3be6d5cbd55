# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The reduce hop: one all-to-all, FP32 accumulation in tree order of the members.

Why not a library reduce-scatter: its sum order and precision depend on the backend (BF16 sums, ring order), it cannot
carry block-quantized values, and gloo's sends every byte twice. One all-to-all sends ``(d - 1) / d`` of the input, as
a ring does, and the same code serves INT4, INT8, 16-bit and FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.collectives.meter import Meter
from zero_topo.collectives.wire import Wire, settle
from zero_topo.mesh import Hop
from zero_topo.quant.ops import PLAIN
from zero_topo.quant.pieces import Piece, read_all, total_numel
from zero_topo.quant.reference import Reduce


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


def reduce_scatter(hops: Sequence[Hop], parts: Sequence[Sequence[Piece]], wire: Wire, sums: Sums) -> None:
    """Sum over the members of a chain of hops; each keeps its own part.

    1. encode ``parts[k]`` into one message for destination ``k``;
    2. per hop: one all-to-all takes each message to the member that stands for its destination, where the messages
       for one destination are summed in tree order (FP32) and, if a hop follows, encoded again;
    3. the last sums go into ``sums.pieces``.

    Args:
        hops: from the innermost outwards, ``(lo, a), (a, b), ...``.
        parts: for each destination, ordered by tree position modulo the last hop's degree, its values; all of one size.
        wire: the format.
        sums: where they go.

    A chain of one member sums nothing, and does not quantize.
    """
    numel = total_numel(sums.pieces)
    if all(hop.group is None for hop in hops):
        settle(read_all(parts[0]), sums.pieces, sums.reduce)
        return
    send = _empty(hops[0], len(parts), wire.nbytes(numel), sums.pieces[0].flat.device)
    for destination, pieces in enumerate(parts):
        wire.encode(pieces, _place(send, hops[0], destination))
    for hop, following in zip_longest(hops, hops[1:]):
        received = _exchange(hop, send, sums)
        by_destination = [[received[slot, rest] for slot in hop.slots] for rest in range(send.shape[1])]
        if following is None:
            wire.reduce(by_destination[0], sums.pieces, sums.reduce)
            return
        send = _empty(following, len(by_destination), wire.nbytes(numel), send.device)
        for destination, messages in enumerate(by_destination):
            wire.recode(messages, _place(send, following, destination), numel)


def _empty(hop: Hop, destinations: int, nbytes: int, device: torch.device) -> Tensor:
    """Room for the messages of a hop: ``[members in group order, destinations behind each, bytes]``."""
    return torch.empty(hop.size, destinations // hop.size, nbytes, dtype=torch.uint8, device=device)


def _place(send: Tensor, hop: Hop, destination: int) -> Tensor:
    member, rest = destination % hop.size, destination // hop.size
    return send[hop.slots[member], rest]


def _exchange(hop: Hop, send: Tensor, sums: Sums) -> Tensor:
    if hop.group is None:
        return send
    sums.meter.record(sums.phase, hop.domain, (hop.size - 1) * (send.nbytes // hop.size))
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=hop.group)
    return received
