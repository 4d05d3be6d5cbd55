# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes the bytes of INT8 weights: bytes stored, and bytes of the buffers that publish their changes.

Note [Blocks sent whole]
    The bytes of a publish depend on how many blocks are sent whole (``quant/spec.py``). This depends on the data. In a
    matrix whose weights have the standard deviation ``sigma``, the share ``7.4 lr / sigma`` of the INT8 weights changes
    in a step of Adam: a scale is about ``.0245 sigma``, an update ``.18 lr``. The share of blocks sent whole follows
    from that share (:data:`ESCAPED`, measured with blocks of 256 over 600 steps of a small model): an eighth of the
    blocks in the warm-up, under a hundredth once an eighth of the INT8 weights or less changes. By
    default ``lr / sigma`` is a hundredth, for example 1e-4 to .01. This describes the second half of a training, in
    which a message takes 1.6 bits per weight.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from math import ceil, log

from zero_topo.quant.spec import BlockSpec, TritSpec

COUNT_BYTES = 8  # per run: the number of its blocks sent whole, which all ranks receive before its buffer
CHANGED = 7.4  # share of INT8 weights that change in a step, divided by lr / sigma
LR_OVER_SIGMA = 0.01
ESCAPED = ((0.021, 0.0007), (0.057, 0.002), (0.12, 0.008), (0.20, 0.124), (0.27, 0.132))
"""Pairs: the share of INT8 weights that change in a step, and the share of blocks that are sent whole."""


def escaped_share(lr_over_sigma: float = LR_OVER_SIGMA) -> float:
    """Return the share of blocks that a step sends whole; see Note [Blocks sent whole].

    Args:
        lr_over_sigma: the learning rate over the standard deviation of a matrix's weights.
    """
    changed = min(max(CHANGED * lr_over_sigma, ESCAPED[0][0]), ESCAPED[-1][0])
    at = min(bisect(ESCAPED, (changed,)), len(ESCAPED) - 1) or 1
    (low, few), (high, many) = ESCAPED[at - 1 : at + 1]
    return few * (many / few) ** (log(changed / low) / log(high / low))


def codes_bytes(rows: int, width: int, spec: BlockSpec) -> int:
    """Return the bytes of the INT8 weights and scales of ``rows`` rows of a parameter, each padded to whole blocks."""
    return spec.nbytes(rows * spec.blocks(width) * spec.block_size)


def change_bytes(rows: int, widths: Iterable[int], spec: BlockSpec, escaped: int | None = None) -> int:
    """Return the bytes of a packed buffer with the changes of the INT8 weights of some rows of some parameters.

    Args:
        rows: rows of one group rank.
        widths: columns of each parameter.
        spec: format of the INT8 weights.
        escaped: blocks sent whole by the group rank with most; None assumes the share of :func:`escaped_share`.
    """
    blocks = rows * sum(spec.blocks(width) for width in widths)
    return TritSpec(spec.block_size).nbytes(blocks, ceil(escaped_share() * blocks) if escaped is None else escaped)
