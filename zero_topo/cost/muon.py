# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Counts what Muon computes: Newton-Schulz iterations of whole matrices, in five steps, as DeepSpeed 0.19.8 does.

A matrix of ``m`` by ``n <= m`` takes products of ``2 n^2 m`` or ``2 n^3`` FLOPs. "standard" takes ten and five of them.
"gram" iterates on the Gram matrix and starts it anew once: four, and fourteen; a square matrix as "standard".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from zero_topo.cost.transformer import Shape

PRODUCTS = {"standard": (10, 5), "gram": (4, 14)}


def method_of(ds_config: Mapping[str, Any]) -> str | None:
    """Return the method of Newton-Schulz in a DeepSpeed config; None if its optimizer is not Muon."""
    optimizer = ds_config.get("optimizer")
    if not isinstance(optimizer, Mapping) or str(optimizer.get("type")).lower() != "muon":
        return None
    return "standard" if (optimizer.get("params") or {}).get("ns_method") == "standard" else "gram"


def newton_schulz_flops(shape: Shape, method: str) -> float:
    """Return the FLOPs of one matrix, or of each of a stack of them; ``method`` is "gram" or "standard"."""
    n, m = sorted(shape[-2:])
    large, small = PRODUCTS["standard" if n == m else method]
    return math.prod(shape[:-2]) * 2.0 * n**2 * (large * m + small * n)


def owner_flops(shapes: Iterable[Shape], owners: int, method: str) -> float:
    """Return the FLOPs of the busiest of the ranks that divide matrices among themselves, large ones first."""
    ordered = sorted(shapes, key=math.prod, reverse=True)
    return sum(newton_schulz_flops(shape, method) for shape in ordered[::owners])
