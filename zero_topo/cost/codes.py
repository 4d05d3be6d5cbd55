# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes the bytes of INT8 weights: bytes stored, and bytes of the buffers that publish their changes.

Note [Expected changes]
    The bytes of a publish depend on which INT8 weights change (``quant/spec.py``), hence on the data. In a matrix whose
    weights have the standard deviation ``sigma``, the share ``7.4 lr / sigma`` of the INT8 weights changes in a step of
    Adam: a scale is about ``.0245 sigma``, an update ``.18 lr``. Changes are taken to be independent of each other, so
    the number of changes of a tile is binomial. How many blocks are sent whole, and how many tiles have a change larger
    than 1, follows from the share of changes (:data:`SHARES`, measured with blocks of 256 over 600 steps of a small
    model): almost none once an eighth of the INT8 weights or less changes. By default ``lr / sigma`` is a hundredth,
    for example 1e-4 to .01. This describes the second half of a training.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from functools import cache
from math import ceil, comb

from zero_topo.quant.spec import BlockSpec, ChangeSpec

COUNT_BYTES = 16  # per run: its blocks sent whole and its bytes of changes, which all ranks receive before its buffer
CHANGED = 7.4  # share of INT8 weights that change in a step, divided by lr / sigma
LR_OVER_SIGMA = 0.01
SHARES = (
    (0.0, 0.0, 0.0),
    (0.1, 0.002, 0.0),
    (0.16, 0.005, 0.005),
    (0.2, 0.006, 0.08),
    (0.25, 0.016, 0.25),
    (0.3, 0.03, 0.31),
)
"""By the share of INT8 weights that change: the share of blocks sent whole, and of tiles with larger changes."""


@cache
def expected_shares(block_size: int, lr_over_sigma: float = LR_OVER_SIGMA) -> tuple[float, float]:
    """Return the share of blocks that a step sends whole, and the bytes of changes per INT8 weight of the others.

    See Note [Expected changes].

    Args:
        block_size: number of values that share a scale.
        lr_over_sigma: the learning rate over the standard deviation of a matrix's weights.
    """
    tile, share = ChangeSpec(block_size).tile, min(CHANGED * lr_over_sigma, SHARES[-1][0])
    above = bisect(SHARES, (share,), lo=1, hi=len(SHARES) - 1)
    (low, *few), (high, *many) = SHARES[above - 1 : above + 1]
    whole, large = (a + (b - a) * (share - low) / (high - low) for a, b in zip(few, many, strict=True))
    bytes_of = 0.0
    for c in range(tile + 1):
        signed, new = min(c, tile // 8 + ceil(c / 8)), min(c, tile // 8) + c
        bytes_of += comb(tile, c) * share**c * (1 - share) ** (tile - c) * ((1 - large) * signed + large * new)
    return whole, bytes_of / tile


def codes_bytes(rows: int, width: int, spec: BlockSpec) -> int:
    """Return the bytes of the INT8 weights and scales of ``rows`` rows of a parameter, each padded to whole blocks."""
    return spec.nbytes(rows * spec.blocks(width) * spec.block_size)


def change_bytes(rows: int, widths: Iterable[int], spec: BlockSpec, lr_over_sigma: float = LR_OVER_SIGMA) -> int:
    """Return the expected bytes of a packed buffer with the changes of the INT8 weights of some rows.

    Args:
        rows: rows of one group rank.
        widths: columns of each parameter.
        spec: format of the INT8 weights.
        lr_over_sigma: the learning rate over the standard deviation of a matrix's weights.
    """
    blocks = rows * sum(map(spec.blocks, widths))
    whole_share, change_share = expected_shares(spec.block_size, lr_over_sigma)
    whole = ceil(whole_share * blocks)
    changes = ceil(change_share * (blocks - whole) * spec.block_size)
    return ChangeSpec(spec.block_size).nbytes(blocks, whole, changes)


def largest_change_bytes(rows: int, widths: Iterable[int], spec: BlockSpec) -> int:
    """Return the bytes of the largest packed buffer that :func:`change_bytes` may need: all blocks are sent whole."""
    return ChangeSpec(spec.block_size).largest(rows * sum(map(spec.blocks, widths)))
