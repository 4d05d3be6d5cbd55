# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The permutation between parameters and nested shards, as views wherever strides can say it."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_topo.plan import Plan


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
