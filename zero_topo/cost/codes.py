# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes the bytes of INT8 weights: bytes stored, and bytes of the buffers that publish their changes.

Note [Expected changes]
    The bytes of a publish depend on which INT8 weights change (``quant/spec.py``), hence on the data. In a matrix whose
    weights have the standard deviation ``sigma``, the share ``7.4 lr / sigma`` of the INT8 weights changes in a step of
    Adam: a scale is about ``.0245 sigma``, an update ``.18 lr``. Changes are taken to be independent of each other, so
    the number of changes of a tile is binomial. The share of blocks sent whole follows from the share of changes
    (:data:`WHOLE`, measured with blocks of 256 over 600 steps of a small model): an eighth of the blocks in the
    warm-up, under a hundredth once an eighth of the INT8 weights or less changes. By default ``lr / sigma`` is a
    hundredth, for example 1e-4 to .01. This describes the second half of a training.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from functools import cache
from math import ceil, comb, log

from zero_topo.quant.spec import BlockSpec, ChangeSpec

COUNT_BYTES = 16  # per run: its blocks sent whole and its bytes of changes, which all ranks receive before its buffer
CHANGED = 7.4  # share of INT8 weights that change in a step, divided by lr / sigma
LR_OVER_SIGMA = 0.01
WHOLE = ((0.021, 0.0007), (0.057, 0.002), (0.12, 0.008), (0.20, 0.124), (0.27, 0.132))
"""Pairs: the share of INT8 weights that change in a step, and the share of blocks that are sent whole."""


def whole_share(lr_over_sigma: float = LR_OVER_SIGMA) -> float:
    """Return the share of blocks that a step sends whole; see Note [Expected changes].

    Args:
        lr_over_sigma: the learning rate over the standard deviation of a matrix's weights.
    """
    changed = min(max(CHANGED * lr_over_sigma, WHOLE[0][0]), WHOLE[-1][0])
    at = min(bisect(WHOLE, (changed,)), len(WHOLE) - 1) or 1
    (low, few), (high, many) = WHOLE[at - 1 : at + 1]
    return few * (many / few) ** (log(changed / low) / log(high / low))


@cache
def tile_share(block_size: int, lr_over_sigma: float) -> float:
    """Return the expected bytes of changes per INT8 weight of a block that is not sent whole."""
    tile, share = ChangeSpec(block_size).tile, min(CHANGED * lr_over_sigma, 1.0)
    chances = (comb(tile, c) * share**c * (1 - share) ** (tile - c) for c in range(tile + 1))
    return sum(chance * min(c, tile // 8 + ceil(c / 8)) for c, chance in enumerate(chances)) / tile


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
    whole = ceil(whole_share(lr_over_sigma) * blocks)
    changes = ceil(tile_share(spec.block_size, lr_over_sigma) * (blocks - whole) * spec.block_size)
    return ChangeSpec(spec.block_size).nbytes(blocks, whole, changes)


def largest_change_bytes(rows: int, widths: Iterable[int], spec: BlockSpec) -> int:
    """Return the bytes of the largest packed buffer that :func:`change_bytes` may need: all blocks are sent whole."""
    return ChangeSpec(spec.block_size).largest(rows * sum(map(spec.blocks, widths)))
