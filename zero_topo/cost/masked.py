# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the modes send whose mask all peers share: Radius over one interval, SCAPE after its warm-up.

Note [A mean]
    Of an interval of Radius one step sends everything and the mask, the others what the mask holds. A step's bytes are
    thus never the mean; the formulas of one step of either kind are here too. Flags (a byte to a peer) are left out,
    and parameters of one dimension, which are reduced densely, count as if they were sparse: see ``sparse.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from zero_topo.config import RadiusSync, ScapeSync
from zero_topo.cost.memory import mask_bytes
from zero_topo.cost.sparse import PART_BYTES, book_sparse, exchanged_bytes, mode_bytes, peer_bytes
from zero_topo.cost.volume import ITEMSIZES, Books, book_sync, sync_hops
from zero_topo.plan import Plan


@peer_bytes.register
def _(mode: RadiusSync, widths: Sequence[int], plan: Plan, peers: int) -> float:
    """The mean over an interval."""
    between, resampling = between_bytes(mode, widths, plan), resampling_bytes(mode, sum(widths), plan)
    return ((mode.interval - 1) * between + resampling) / mode.interval


@mask_bytes.register
def _(mode: RadiusSync, plan: Plan, columns: int) -> int:
    """A bit for each element that the peers reduce, each of the ``P`` rows packed by itself."""
    return _peers(plan) * -(-columns // 8) if _peers(plan) > 1 else 0


@mode_bytes.register
def _(mode: RadiusSync, columns: int, plan: Plan, peers: int) -> float:
    """A step that reduces everything, or the mask as booleans and what it holds."""
    n, everywhere, itemsize = peers * columns, plan.optimizer < plan.world_size, ITEMSIZES[mode.value_dtype]
    dense = exchanged_bytes(n, peers, itemsize, everywhere)
    return max(dense, n + masked_bytes(mode.density * n, n, peers, (itemsize, everywhere)))


def masked_bytes(kept: float, numel: int, peers: int, wire: tuple[int, bool]) -> float:
    """Bytes that reducing what a mask holds makes beside the mask: positions and values, then the sums in their places.

    Args:
        kept: elements that it holds, of all rows.
        numel: ``n``.
        peers: ``P``.
        wire: bytes of a value, and whether all sums are told to all.
    """
    placed = 4 * (kept + numel) if wire[1] else (12 * kept + 4 * numel) / peers
    return 12 * kept + max(exchanged_bytes(kept, peers, *wire), placed)


def between_bytes(mode: RadiusSync, widths: Iterable[int], plan: Plan) -> int:
    """Bytes that a rank sends to its peers in a step that does not resample.

    Args:
        mode: the settings.
        widths: columns of each parameter that takes part.
        plan: says how many peers there are, and whether they need more than one row.
    """
    return _exchanged(mode, sum(max(1, int(mode.density * width)) for width in widths), plan)


def resampling_bytes(mode: RadiusSync, columns: int, plan: Plan) -> int:
    """Bytes that a rank sends to its peers in a step that resamples; arguments as :func:`between_bytes`."""
    return _exchanged(mode, columns, plan) + (_peers(plan) - 1) * -(-columns // 8)


def _exchanged(mode: RadiusSync, width: int, plan: Plan) -> int:
    """To each peer its row; then the sums of the own row to all, unless these stay."""
    times = 2 if plan.optimizer < plan.world_size else 1
    return times * (_peers(plan) - 1) * width * ITEMSIZES[mode.value_dtype]


def _peers(plan: Plan) -> int:
    lo, hi = sync_hops(plan)[1]
    return hi // lo


# -- SCAPE -------------------------------------------------------------------------------------------------------------


@peer_bytes.register
def _(mode: ScapeSync, widths: Sequence[int], plan: Plan, peers: int) -> float:
    """To each peer what the mask holds of its row, then the sums of the own row to all, and that row's bits."""
    columns = sum(widths)
    kept = sum(
        min(part, max(1, math.ceil(mode.density * part))) for part in (widths if mode.per_parameter else [columns])
    )
    return (peers - 1) * (2 * kept * ITEMSIZES[mode.value_dtype] + _bits(columns))


@mode_bytes.register
def _(mode: ScapeSync, columns: int, plan: Plan, peers: int) -> float:
    """The momentum, the mask as booleans, the choice; the first step, which reduces everything, or a later one."""
    n, itemsize = peers * columns, ITEMSIZES[mode.value_dtype]
    first = exchanged_bytes(n, peers, itemsize, True)
    sorting = PART_BYTES * columns if mode.per_parameter else 0
    return 5 * n + columns + max(first, sorting, masked_bytes(mode.density * n, n, peers, (itemsize, True)))


@book_sync.register
def _(mode: ScapeSync, books: Books, widths: Sequence[int], itemsize: int) -> None:
    """As every sparse mode; inside a node that is not behind us, the bits of all peers' rows too."""
    book_sparse(mode, books, widths)
    inner, outer = sync_hops(books.plan)
    if inner is not None and outer[1] > outer[0]:
        books.gather(inner, outer[1] // outer[0] * _bits(sum(widths)))


@mask_bytes.register
def _(mode: ScapeSync, plan: Plan, columns: int) -> int:
    """The mask in force and the next one, of all rows of the gradient shard."""
    return 2 * (plan.world_size // plan.gradients) * _bits(columns) if plan.gradients < plan.world_size else 0


def _bits(columns: int) -> int:
    return -(-columns // 8)
