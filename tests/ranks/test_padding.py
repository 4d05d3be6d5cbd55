# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Zeroing the padding of a shard touches all of the padding and nothing else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_topo.collectives.pack import rows_of
from zero_topo.engine.shards import Layout
from zero_topo.plan import Plan

DEGREES = (1, 2, 4, 8)


@given(data=st.data(), numels=st.lists(st.integers(1, 40), min_size=1, max_size=4), shuffled=st.booleans())
def test_exactly_the_padding_is_zeroed(data: st.DataObject, numels: list[int], shuffled: bool) -> None:
    """On every rank, in a shard of every degree, whole or from some slot on, in any placement."""
    order = tuple(data.draw(st.permutations(range(8)))) if shuffled else None
    plan = Plan(8, weights=1, secondary=None, gradients=1, optimizer=1, order=order)
    layout = Layout(plan, data.draw(st.integers(0, 7)), tuple(numels))
    degree = data.draw(st.sampled_from(DEGREES))
    first = layout.begins[data.draw(st.integers(0, len(numels) - 1))]
    world = torch.cat([rows_of(torch.ones(numel), plan) for numel in numels], dim=1)
    expected = layout.subset(world, 1, degree)[:, first:]
    shard = torch.full_like(expected, torch.nan).masked_fill(expected == 1, 1.0)
    layout.clear_padding(shard, degree, first)
    assert torch.equal(shard, expected)
