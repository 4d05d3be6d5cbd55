# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the sync mode tagc sends.

To the owners of the other rows, 1 bit per element and 32 / r bits of sketch: ``(1 + 32 / r) (P - 1) / P`` bits for each
of the ``n`` elements; the paper's index goes to all ranks, which makes it 2 + 32 / r. Sketches are counted by their
rows. As in Note [Expected, not exact] of ``cost/sparse.py``, picks of several ranks are taken to coincide by
chance only, which says whether a sketch is safe; left out are counts, and the few values beside a sketch.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_topo.config import TagcSync
from zero_topo.config.tagc_config import BLOCK
from zero_topo.cost.sparse import PART_BYTES, PICK_BYTES, SORTING_BYTES, mode_bytes, peer_bytes
from zero_topo.cost.volume import ITEMSIZES
from zero_topo.plan import Plan


@peer_bytes.register
def _(mode: TagcSync, widths: Sequence[int], plan: Plan, peers: int) -> int:
    """To each owner its row; from each owner its sums, unless these stay."""
    row = bytes_to_owner(mode, sum(widths), peers)
    if plan.optimizer < plan.world_size:
        row += bytes_from_owner(mode, sum(widths), peers)
    return (peers - 1) * row


def bytes_to_owner(mode: TagcSync, width: int, peers: int) -> int:
    """Bytes that a rank sends to the owner of a row of ``width`` elements: bits, and a sketch or, if need be, values.

    Args:
        mode: the settings.
        width: ``C``, elements of the row.
        peers: ``P``, at least 2.
    """
    ratio = mode.safe_ratio(_union(mode, peers), width)
    if ratio is None:
        return -(-width // 8) + round((1 - mode.zeros(peers)) * width) * ITEMSIZES[mode.value_dtype]
    return -(-width // 8) + mode.sketch_rows(width, ratio) * BLOCK * 4


def bytes_from_owner(mode: TagcSync, width: int, peers: int) -> int:
    """Bytes that an owner sends to each peer that needs its row: the bits of the union, and FP32 sums."""
    return -(-width // 8) + round(_union(mode, peers) * width) * 4


@mode_bytes.register
def _(mode: TagcSync, columns: int, plan: Plan, peers: int) -> float:
    """Selecting; or masks, then probing and sketches, or values that are added up; where all need them, all rows."""
    n, picks = peers * columns, (1 - mode.zeros(peers)) * peers * columns
    ratio = mode.safe_ratio(_union(mode, peers), columns)
    if ratio is None:
        reducing = n + SORTING_BYTES * picks
    else:
        sketches = peers * mode.sketch_rows(columns, ratio) * BLOCK * 4
        reducing = max(10 * columns, sketches + max(4 * n, sketches))
    union = _union(mode, peers) * n
    everywhere = 0.0
    if plan.optimizer < plan.world_size:
        everywhere = 4 * columns + 5 * n + 12 * union + 4 * union / peers
    masks = n + (n + columns) // 8 + columns
    selecting = (PART_BYTES - 4) * n if mode.per_parameter else 0  # the value is there
    return max(selecting, PICK_BYTES * picks + max(4 * n, masks + max(reducing, everywhere)))


def _union(mode: TagcSync, peers: int) -> float:
    """The share that at least one of so many ranks picks, if they pick independently."""
    return 1 - mode.zeros(peers) ** peers
