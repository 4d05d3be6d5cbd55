# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Finds the bandwidth of the best ring through a set of devices, which limits ring collectives of
all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LARGEST = 16
"""Largest number of devices for which every ring is considered; the work grows as 2^n."""


def ring_bandwidth(rates: Sequence[Sequence[float]]) -> float:
    """Return the largest bandwidth for which some ring through all devices has links at least that
    fast.

    1. If all pairs have one rate, return it (switched NVLink).
    2. Otherwise find the fastest rate, by halving, with a ring of links at least as fast. (Held and
       Karp's sets: which devices can end a path that starts at device 0 and visits a given set.)

    Args:
        rates: bytes/s from device to device, ``[n, n]``, symmetric; 0 for none or unknown. The
            diagonal is ignored.

    Returns:
        Bytes/s in one direction; 0 if there is no ring, fewer than two devices, or more than 16
        unlike ones.
    """
    n = len(rates)
    known = sorted({rates[a][b] for a in range(n) for b in range(a)}, reverse=True)
    if len(known) <= 1:
        return known[0] if known else 0.0
    if n > LARGEST:
        return 0.0
    known = [rate for rate in known if rate > 0]
    at = bisect_left(known, True, key=lambda rate: _has_ring(rates, rate))
    return known[at] if at < len(known) else 0.0


def _has_ring(rates: Sequence[Sequence[float]], least: float) -> bool:
    """Return whether links of at least ``least`` bytes/s join all devices (two or more) in a
    ring.
    """
    n = len(rates)
    near = [sum(1 << b for b in range(n) if a != b and rates[a][b] >= least) for a in range(n)]
    ends = [0] * (1 << n)
    ends[1] = 1
    for visited in range(1, 1 << n, 2):
        open_ends = ends[visited]
        for device in range(1, n):
            if not visited >> device & 1 and open_ends & near[device]:
                ends[visited | 1 << device] |= 1 << device
    return bool(ends[-1] & near[0])
