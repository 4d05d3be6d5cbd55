# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the sparse modes of sync send and keep.

Note [Expected, not exact]
    How much a sparse mode sends depends on the data: which picks of several ranks coincide, how far a reused threshold
    has drifted. The formulas take ``k`` picks a rank, evenly spread, and of sums the most there can be; messages of
    counts and flags (8 bytes to a peer) are left out. Parameters of one dimension, which are reduced densely, count as
    if they were sparse. The meter says what was sent.

Note [At the peak]
    Of the ``n`` elements that the peers reduce, a reduction holds gradient plus residual in FP32, ``4 n`` bytes, which
    become the next residual. Beside them, by mode, there are magnitudes to select from (``4 n``) or the sums, and
    picks: an index and a value are 12 bytes, 41 while they are sorted to be added up in order. What torch's selection
    and sort need inside is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

from zero_topo.config import GTopkSync, OkTopkSync, SparseSync, TernarySync, TopkDsaSync
from zero_topo.config.sparse_config import index_bytes
from zero_topo.config.ternary_config import BLOCK
from zero_topo.cost.memory import residual_elements, work_bytes
from zero_topo.cost.volume import ITEMSIZES, Books, Move, book_sync, sync_hops
from zero_topo.plan import Plan

PICK_BYTES = 12  # index and value, taken apart
SORTING_BYTES = 41  # of a pick that is being added up, itself included
PART_BYTES = 39  # of an element while the largest of each parameter are found


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
    numel = peers * sum(widths)
    return sent_picks(mode, numel, plan, peers) * record_bytes(mode, numel, peers)


@peer_bytes.register
def _(mode: TernarySync, widths: Sequence[int], plan: Plan, peers: int) -> int:
    """To each owner the bits of its row's blocks, and a scale for each; as much back, if all need all rows; exact."""
    blocks, ways = -(-sum(widths) // BLOCK), 2 if plan.optimizer < plan.world_size else 1
    return ways * (peers - 1) * (-(-blocks * mode.block_bits // 8) + blocks * ITEMSIZES[mode.value_dtype])


def record_bytes(mode: SparseSync, numel: int, peers: int) -> int:
    """Bytes of a pick on the wire: a value, and an index into ``numel`` elements, or into a row where owners add up."""
    by_row = isinstance(mode, TopkDsaSync) or (isinstance(mode, OkTopkSync) and mode.sharded)
    return index_bytes(numel // peers if by_row else numel) + ITEMSIZES[mode.value_dtype]


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
    dense = numel / peers * 4 / record_bytes(mode, numel, peers)
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


@work_bytes.register
def _(mode: SparseSync, plan: Plan, columns: int) -> int:
    """Gradient plus residual, and what the mode makes of it; Note [At the peak]. Or FP32 messages inside the node."""
    inner, (lo, hi) = sync_hops(plan)
    peers = hi // lo
    if peers == 1:
        return 0
    within = 2 * 4 * peers * columns * (inner[1] // inner[0]) if inner is not None else 0
    everywhere = plan.optimizer < plan.world_size
    dense = exchanged_bytes(peers * columns, peers, ITEMSIZES[mode.value_dtype], everywhere) if mode.start else 0
    return 4 * peers * columns + round(max(within, dense, mode_bytes(mode.busiest, columns, plan, peers)))


def exchanged_bytes(numel: float, peers: int, itemsize: int, everywhere: bool) -> float:
    """Bytes that reducing so many values makes beside them: rounded, those that came, in FP32, sums, those told.

    Args:
        numel: in all rows.
        peers: ``P``.
        itemsize: of a value on the wire.
        everywhere: whether all sums are told to all.
    """
    row, rounds = 4 * numel / peers, itemsize < 4
    coming = (2 * itemsize + 4) * numel if rounds else 4 * numel + row
    told = row + (itemsize + 4 if rounds else 4) * numel + (row / 4 * itemsize if rounds else 0) if everywhere else 0
    return max(coming, told)


@singledispatch
def mode_bytes(mode: SparseSync, columns: int, plan: Plan, peers: int) -> float:
    """Bytes that a mode makes at its peak beside gradient plus residual; here, all picks of all peers come.

    Args:
        mode: the settings.
        columns: ``C``, elements of a row.
        plan: says whether ranks need more than one row.
        peers: ``P``, at least 2.
    """
    n, k = peers * columns, mode.density * peers * columns
    return PICK_BYTES * k + max(4 * n + PICK_BYTES * peers * k, SORTING_BYTES * peers * k)


@mode_bytes.register
def _(mode: TopkDsaSync, columns: int, plan: Plan, peers: int) -> float:
    """Selecting; adding up; and where all rows are needed, these, sparse or in dense messages."""
    n, k, row = peers * columns, mode.density * peers * columns, 4 * columns
    back = 0.0
    if plan.optimizer < plan.world_size:
        sparse = k * record_bytes(mode, n, peers) < row
        back = row + (4 * n + (PICK_BYTES + 8) * peers * k if sparse else 8 * n)
    return PICK_BYTES * k + max(4 * n, SORTING_BYTES * k, back)


@mode_bytes.register
def _(mode: GTopkSync, columns: int, plan: Plan, peers: int) -> float:
    """At the end the sums, and the picks of the last two levels."""
    n = peers * columns
    return 4 * n + 6 * PICK_BYTES * mode.density * n


@mode_bytes.register
def _(mode: OkTopkSync, columns: int, plan: Plan, peers: int) -> float:
    """Selecting; adding up; a row of sums, and what is chosen of it or, where all sums are told to all, of all."""
    n, k, row = peers * columns, mode.density * peers * columns, 4 * columns
    chosen: float = row + columns if mode.sharded else 4 * n + (PICK_BYTES + 4) * min(peers * k, n)
    own = row if mode.sharded else 0  # is put aside, and becomes the sums
    return PICK_BYTES * k + max(own + 4 * n, own + SORTING_BYTES * k, row + chosen)


@mode_bytes.register
def _(mode: TernarySync, columns: int, plan: Plan, peers: int) -> float:
    """Blocks, filled up; what others sent, taken apart and then in its place; sums, twice if all need them."""
    row = -(-columns // BLOCK)
    sums, apart = 4 * BLOCK * row, peers * row * (1.125 * mode.block_bits + 28 * mode.picks)
    everywhere = plan.optimizer < plan.world_size
    return 4 * BLOCK * (2 * peers - 1) * row + (sums + apart if everywhere else max(sums, apart))


@residual_elements.register
def _(mode: SparseSync, plan: Plan, loss_scaled: bool) -> int:
    """All elements that the peers reduce."""
    lo, hi = sync_hops(plan)[1]
    return hi // lo if mode.error_feedback and not mode.offload_residual and hi > lo else 0
