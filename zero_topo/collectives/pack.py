# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The permutation between parameters and nested shards, as views wherever strides can say it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from zero_topo.plan import Plan
from zero_topo.quant.pieces import Piece, piece_of

Span = tuple[int, int]


def members(rows: Tensor, size: int) -> Tensor:
    """View of a degree-``lo`` shard by member of the hop ``(lo, lo * size)``.

    Args:
        rows: ``[N / lo, ...]``.
        size: members of the hop.

    Returns:
        ``[size, N / (lo * size), ...]``, a view: entry ``c`` is what member ``c`` holds (Note [Hops] in ``plan.py``).
    """
    return rows.unflatten(0, (-1, size)).transpose(0, 1)


def rows_of(flat: Tensor, plan: Plan, rank_at: Tensor | None = None) -> Tensor:
    """A parameter-shaped tensor as world shards in tree order.

    Args:
        flat: ``[numel]``, contiguous.
        plan: gives the world size and the order.
        rank_at: the plan's, on the device of ``flat``, if it is there already.

    Returns:
        ``[N, ceil(numel / N)]``, zero-padded; a view of ``flat`` if no padding and no reordering are needed.
    """
    width = plan.shard_numel(flat.numel())
    missing = plan.world_size * width - flat.numel()
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    rows = flat.view(plan.world_size, width)
    if plan.order is None:
        return rows
    return rows[torch.tensor(plan.rank_at, device=flat.device) if rank_at is None else rank_at]


def shard_piece(flat: Tensor, plan: Plan, degree: int) -> Piece:
    """A parameter's shards of some degree as pieces of the whole: nothing is copied, the padding does not exist.

    Args:
        flat: ``[numel]`` in tree order; what lies beyond its end is zero. See :meth:`Layout.in_tree_order`.
        plan: gives the world size.
        degree: of the shards.

    Returns:
        ``N / degree`` rows of ``ceil(numel / N)`` for each tree position modulo ``degree``.
    """
    width = plan.shard_numel(flat.numel())
    return Piece(flat, plan.world_size // degree, width, degree * width, degree, width)


def merged(spans: Iterable[Span], block: int = 1) -> tuple[Span, ...]:
    """The same columns in fewer spans: neighbours are one where a block ends between them."""
    found: list[Span] = []
    for begin, end in spans:
        if found and found[-1][1] == begin and (found[-1][1] - found[-1][0]) % block == 0:
            begin = found.pop()[0]
        found.append((begin, end))
    return tuple(found)


def places_of(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The columns of a table that holds these spans one after the other."""
    return tuple(pairwise(accumulate((end - begin for begin, end in spans), initial=0)))


def span_pieces(rows: Tensor, spans: Iterable[Span], block: int = 1) -> list[Piece]:
    """Some columns of some rows, span by span, each row and span filled up to whole blocks.

    Blocks that share a scale then never hold values of two parameters, and what is in them does not depend on which
    spans travel together.

    Args:
        rows: ``[members, r, F]``, or ``[r, F]`` of one member; columns adjacent.
        spans: ranges of columns.
        block: elements of a block; 1 fills nothing up.
    """
    rows, pieces = rows if rows.dim() == 3 else rows[None], []
    for begin, end in spans:
        piece = piece_of(rows[..., begin:end], block)
        assert piece is not None
        pieces.append(piece)
    return pieces
