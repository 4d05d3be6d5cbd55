# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What Radius sends: the mean of a step over one interval, after the dense steps at the beginning.

Note [A mean]
    One step of an interval sends everything and the mask, the others what the mask holds. A step's bytes are thus never
    the mean; the formulas of one step of either kind are here too. Flags (a byte to a peer) are left out, and
    parameters of one dimension, which are reduced densely, count as if they were sparse: see ``sparse.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zero_topo.config import RadiusSync
from zero_topo.cost.memory import mask_bytes
from zero_topo.cost.sparse import peer_bytes
from zero_topo.cost.volume import ITEMSIZES, sync_hops
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
