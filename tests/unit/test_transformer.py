# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Shapes of transformers: their parts and FLOPs, and sizes made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_topo.cost.transformer import scaled


@given(params=st.integers(10**8, 10**13))
def test_a_made_up_model_has_the_size_asked_for(params: int) -> None:
    model = scaled(params)
    assert model.params == pytest.approx(params, rel=1e-3)
    assert 2 * model.hidden <= model.intermediate <= 7 * model.hidden
