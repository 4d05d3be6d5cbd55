# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the sparse modes of sync send and keep.

Note [Expected, not exact]
    How much a sparse mode sends depends on the data: which picks of several ranks coincide, how far a reused threshold
    has drifted. The formulas take ``k`` picks a rank, evenly spread, and of sums the most there can be; messages of
    counts and flags (8 bytes to a peer) are left out. Parameters of one dimension, which are reduced densely, count as
    if they were sparse. The meter says what was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

from zero_topo.config import GTopkSync, OkTopkSync, SparseSync, TopkDsaSync
from zero_topo.cost.memory import residual_elements
from zero_topo.cost.volume import ITEMSIZES, Books, Move, book_sync, sync_hops
from zero_topo.plan import Plan

INDEX_BYTES = 4


@book_sync.register
def _(mode: SparseSync, books: Books, widths: Sequence[int], itemsize: int) -> None:
    """All of these modes alike, but for what is exchanged across nodes."""
    book_sparse(mode, books, widths)


def book_sparse(mode: SparseSync, books: Books, widths: Sequence[int]) -> None:
    """Inside the node FP32 if that is not behind us, then the mode's messages, then FP32 rows inside the node."""
    plan, columns = books.plan, sum(widths)
    inner, outer = sync_hops(plan)
    peers = outer[1] // outer[0]
    if peers == 1:
        return
    if inner is not None:
        books.reduce(inner, peers * columns * 4)
    books.moves.append(Move(*outer, round(peer_bytes(mode, widths, plan, peers)), gathers=False))
    if inner is not None and plan.optimizer < inner[1]:
        books.gather((plan.optimizer, inner[1]), peers * columns * 4)


@singledispatch
def peer_bytes(mode: SparseSync, widths: Sequence[int], plan: Plan, peers: int) -> float:
    """Bytes that a rank sends to its peers in a step; here, picks: an index and a value each.

    Args:
        mode: the settings.
        widths: columns of each parameter.
        plan: says whether ranks need more than one row.
        peers: ``P``, at least 2.
    """
    return sent_picks(mode, peers * sum(widths), plan, peers) * (INDEX_BYTES + ITEMSIZES[mode.value_dtype])


@singledispatch
def sent_picks(mode: SparseSync, numel: int, plan: Plan, peers: int) -> float:
    """Picks (an index and a value each) that a rank sends: here, all of its own to every peer.

    Args:
        mode: the settings.
        numel: ``n``, elements that the peers reduce.
        plan: says whether ranks need more than one row.
        peers: ``P``, at least 2.
    """
    return mode.density * numel * (peers - 1)


@sent_picks.register
def _(mode: TopkDsaSync, numel: int, plan: Plan, peers: int) -> float:
    """To each owner its part; then sums to all, of which there may be ``k`` in a region, or it goes dense."""
    k = mode.density * numel
    dense = numel / peers * 4 / (INDEX_BYTES + ITEMSIZES[mode.value_dtype])
    back = min(k, dense) * (peers - 1) if plan.optimizer < plan.world_size else 0
    return k * (peers - 1) / peers + back


@sent_picks.register
def _(mode: GTopkSync, numel: int, plan: Plan, peers: int) -> float:
    """The root of the tree sends least on the way up and most on the way down."""
    return mode.density * numel * (peers - 1).bit_length()


@sent_picks.register
def _(mode: OkTopkSync, numel: int, plan: Plan, peers: int) -> float:
    """To each owner its part, then an equal share of ``k`` sums to all, unless these stay."""
    part = mode.density * numel * (peers - 1) / peers
    return part if mode.sharded else 2 * part


@residual_elements.register
def _(mode: SparseSync, plan: Plan) -> int:
    """All elements that the peers reduce."""
    lo, hi = sync_hops(plan)[1]
    return hi // lo if mode.error_feedback and not mode.offload_residual and hi > lo else 0
