# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Shapes of transformers: their parts and FLOPs, and sizes made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plans import GPT2, NEOX
from zero_topo.cost.job import Job
from zero_topo.cost.transformer import Transformer, scaled

SHAPES = [
    GPT2,
    NEOX,
    Transformer("70b", 80, 8192, 64, 128256, 8192, 28672, kv_heads=8, gated=True, biases=False),
]


@pytest.mark.parametrize("model", SHAPES, ids=lambda model: model.name)
def test_parts_hold_all_parameters_once(model: Transformer) -> None:
    modules = model.modules()
    assert len(modules) == 1 + model.layers + 1 == len(model.module_flops(1))
    assert sum(map(sum, modules)) == model.params
    work = Job(model).work
    matrices = sum(n for n, dims in zip(work.numels, work.dims, strict=True) if dims == 2)
    assert model.params * 0.99 < matrices < model.params and set(work.dims) == {1, 2}


def test_flops_of_a_forward_pass_are_two_per_parameter_and_token_and_those_of_the_scores() -> None:
    model = NEOX
    tokens = 4096
    matrices = model.layers * 12 * model.hidden**2 + model.hidden * model.vocab
    scores = model.layers * 4 * model.sequence * model.hidden
    assert sum(model.module_flops(tokens)) == tokens * (2 * matrices + scores)
    assert model.module_flops(tokens)[0] == 0


@given(params=st.integers(10**8, 10**13))
def test_a_made_up_model_has_the_size_asked_for(params: int) -> None:
    model = scaled(params)
    assert model.params == pytest.approx(params, rel=1e-3)
    assert 2 * model.hidden <= model.intermediate <= 7 * model.hidden


def test_a_size_without_a_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        scaled(10)


def test_a_shape_of_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="layers is 0"):
        Transformer("m", 0, 8, 1, 8, 8, 8)
