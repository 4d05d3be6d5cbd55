# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Picks: what goes into a message comes out, cutting loses none, and thresholds pass as many as they should."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero_topo.quant.registry import BACKENDS
from zero_topo.quant.sparse_ops import SparseOps
from zero_topo.sync.picks import TINY, Picked, above, added, kth_largest, largest, message_bytes, non_zero, share

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = st.lists(FLOATS, min_size=1, max_size=200).map(torch.tensor)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(VECTORS, DTYPES)
def test_a_message_brings_what_was_picked(x: Tensor, dtype: torch.dtype) -> None:
    """Indices exactly, values as rounded; the length is the formula's."""
    picked = non_zero(x)
    message = picked.encode(dtype)
    assert message.numel() == message_bytes(len(picked), dtype.itemsize)
    came, rounded = Picked.decode(message, dtype), picked.rounded(dtype)
    assert torch.equal(came.indices, picked.indices) and torch.equal(came.values, rounded.values)


@given(VECTORS, st.lists(st.integers(0, 200), max_size=5))
def test_cutting_loses_nothing(x: Tensor, cuts: list[int]) -> None:
    """Parts, counted from their lower bounds, are the whole again; equal bounds make empty parts."""
    bounds = [0, *sorted(min(cut, x.numel()) for cut in cuts), x.numel()]
    parts = non_zero(x).cut(bounds)
    assert len(parts) == len(bounds) - 1
    whole = [Picked(part.indices + low, part.values) for part, low in zip(parts, bounds, strict=False)]
    assert torch.equal(added(whole, x.numel(), x), x + 0.0)


@given(VECTORS, st.floats(0.001, 1))
def test_the_kth_largest_passes_k(x: Tensor, density: float) -> None:
    """At least k elements reach it, zeros aside, and fewer than k are above it."""
    k = share(density, x.numel())
    assert 1 <= k <= x.numel()
    bound = kth_largest(x, k)
    passed = above(x, bound, SparseOps("reference", BACKENDS["reference"](x.device)))  # type: ignore[arg-type]
    assert len(passed) >= min(k, int((x.abs() >= TINY).sum()))
    assert bound == TINY or int((x.abs() > bound).sum()) < k
    assert set(largest(x, k).indices.tolist()) <= set(passed.indices.tolist())
    assert torch.equal(passed.values, x[passed.indices])


@pytest.mark.parametrize(("density", "numel", "k"), [(0.001, 1, 1), (0.5, 3, 2), (1, 7, 7), (0.01, 1000, 10)])
def test_a_density_is_at_least_one_element(density: float, numel: int, k: int) -> None:
    """However small: a rank always says something."""
    assert share(density, numel) == k
