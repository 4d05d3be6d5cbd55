# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The permutation between parameters and nested shards, as views wherever strides can say it."""

from __future__ import annotations

from collections.abc import Iterable

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


def rows_of(flat: Tensor, plan: Plan) -> Tensor:
    """A parameter-shaped tensor as world shards in tree order.

    Args:
        flat: ``[numel]``, contiguous.
        plan: gives the world size and the order.

    Returns:
        ``[N, ceil(numel / N)]``, zero-padded; a view of ``flat`` if no padding and no reordering are needed.
    """
    width = plan.shard_numel(flat.numel())
    missing = plan.world_size * width - flat.numel()
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    rows = flat.view(plan.world_size, width)
    return rows if plan.order is None else rows[torch.tensor(plan.rank_at, device=flat.device)]


def flat_of(rows: Tensor, numel: int, plan: Plan) -> Tensor:
    """The inverse of :func:`rows_of`: ``[N, width]`` in tree order -> ``[numel]``, a view if the order allows."""
    if plan.order is not None:
        rows = rows[torch.tensor(plan.order, device=rows.device)]
    return rows.reshape(-1)[:numel]


def shard_piece(flat: Tensor, plan: Plan, position: int, degree: int) -> Piece:
    """A parameter's shard of some degree as a piece of the whole: nothing is copied, the padding does not exist.

    Args:
        flat: ``[numel]`` in tree order; what lies beyond its end is zero. See :func:`in_tree_order`.
        plan: gives the world size.
        position: a tree position modulo ``degree``.
        degree: of the shard.

    Returns:
        ``N / degree`` rows of ``ceil(numel / N)``.
    """
    width = plan.shard_numel(flat.numel())
    begin = min(position * width, flat.numel())
    return Piece(flat[begin:], plan.world_size // degree, width, degree * width)


def in_tree_order(flat: Tensor, plan: Plan) -> Tensor:
    """A parameter-shaped tensor ``[numel]`` with its world shards in tree order; itself if ranks are placed in it."""
    return flat if plan.order is None else rows_of(flat, plan).reshape(-1)


def span_pieces(rows: Tensor, spans: Iterable[Span], block: int = 1) -> list[Piece]:
    """Some columns of some rows, span by span, each row and span filled up to whole blocks.

    Blocks that share a scale then never hold values of two parameters, and what is in them does not depend on which
    spans travel together.

    Args:
        rows: ``[r, F]``, columns adjacent.
        spans: ranges of columns.
        block: elements of a block; 1 fills nothing up.
    """
    pieces = []
    for begin, end in spans:
        width = -(-(end - begin) // block) * block
        if block == 1:
            piece = piece_of(rows[:, begin:end])
            assert piece is not None
            pieces.append(piece)
        else:
            pieces += [Piece(row[begin:end], 1, width, width) for row in rows]
    return pieces
