# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Weights held as INT8 codes: bytes held, and bytes of the messages that say how codes changed.

Note [Expected escapes]
    What a publish sends depends on how many blocks escape (``quant/spec.py``), which the data decide. Of the codes of
    a matrix whose weights deviate by ``sigma`` from their mean, ``7.4 lr / sigma`` change in a step of Adam: a scale is
    about ``.0245 sigma``, an update ``.18 lr``. Escapes follow, as measured with blocks of 256 over 600 steps of a
    small model (:data:`ESCAPED`): an eighth of the blocks in the warm-up, under a hundredth from an eighth of codes
    changed on. Without anything better ``lr / sigma`` is taken to be a hundredth, such as 1e-4 to .01: the second half
    of a training, in which a message takes 1.6 bits for each code.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from math import ceil, log

from zero_topo.quant.spec import BlockSpec, TritSpec

COUNT_BYTES = 8  # of a run: how many of its blocks escape, told to all before its message
CHANGED = 7.4  # share of codes that change in a step, to lr / sigma
LR_OVER_SIGMA = 0.01
ESCAPED = ((0.021, 0.0007), (0.057, 0.002), (0.12, 0.008), (0.20, 0.124), (0.27, 0.132))
"""Share of codes that change in a step, and of blocks that escape."""


def escaped_share(lr_over_sigma: float = LR_OVER_SIGMA) -> float:
    """Share of blocks that escape in a step; see Note [Expected escapes].

    Args:
        lr_over_sigma: the learning rate over the standard deviation of a matrix's weights.
    """
    changed = min(max(CHANGED * lr_over_sigma, ESCAPED[0][0]), ESCAPED[-1][0])
    at = min(bisect(ESCAPED, (changed,)), len(ESCAPED) - 1) or 1
    (low, few), (high, many) = ESCAPED[at - 1 : at + 1]
    return few * (many / few) ** (log(changed / low) / log(high / low))


def codes_bytes(rows: int, width: int, spec: BlockSpec) -> int:
    """Bytes of the codes and scales of some rows of a parameter, each filled up to whole blocks."""
    return spec.nbytes(rows * spec.blocks(width) * spec.block_size)


def change_bytes(rows: int, widths: Iterable[int], spec: BlockSpec, escaped: int | None = None) -> int:
    """Bytes of a message that says how the codes of some rows of some parameters changed.

    Args:
        rows: of a member.
        widths: columns of each parameter.
        spec: of the codes.
        escaped: blocks that escape, of the member with most; None expects the share of :func:`escaped_share`.
    """
    blocks = rows * sum(spec.blocks(width) for width in widths)
    return TritSpec(spec.block_size).nbytes(blocks, ceil(escaped_share() * blocks) if escaped is None else escaped)
