# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What SCAPE sends: the elements of the mask, summed and told to all, and the bits of the next mask.

After the warm-up; flags (a byte to a peer) are left out, and parameters of one dimension count as if they were sparse:
see ``sparse.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zero_topo.config import ScapeSync
from zero_topo.cost.memory import mask_bytes
from zero_topo.cost.radius import exchanged_bytes, masked_bytes
from zero_topo.cost.sparse import book_sparse, mode_bytes, peer_bytes
from zero_topo.cost.volume import ITEMSIZES, Books, book_sync, sync_hops
from zero_topo.plan import Plan


@peer_bytes.register
def _(mode: ScapeSync, widths: Sequence[int], plan: Plan, peers: int) -> float:
    """To each peer what the mask holds of its row, then the sums of the own row to all, and that row's bits."""
    columns = sum(widths)
    kept = min(columns, max(1, math.ceil(mode.density * columns)))
    return (peers - 1) * (2 * kept * ITEMSIZES[mode.value_dtype] + _bits(columns))


@mode_bytes.register
def _(mode: ScapeSync, columns: int, plan: Plan, peers: int) -> float:
    """The momentum, the mask as booleans, the choice; the first step, which reduces everything, or a later one."""
    n, itemsize = peers * columns, ITEMSIZES[mode.value_dtype]
    first = exchanged_bytes(n, peers, itemsize, True)
    return 5 * n + columns + max(first, masked_bytes(mode.density * n, n, peers, (itemsize, True)))


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
