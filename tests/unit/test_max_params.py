# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The largest model that fits: on a machine, with a scheme, whatever the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plans import TREE, resolve
from tests.unit.test_planner import FRONTIER, NEOX, largest, request
from zero_topo.config import SCHEMES
from zero_topo.cost.planner import max_params
from zero_topo.topology import load_preset
from zero_topo.units import GB


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("nodes", [1, 48])
def test_the_largest_model_fits_and_a_larger_one_does_not(scheme: str, nodes: int) -> None:
    assert largest(scheme, request(load_preset("frontier", 8 * nodes)))


@given(memory=st.integers(6, 500), scheme=st.sampled_from(["zero3", "mics", "topo"]), micro_batch=st.integers(1, 8))
def test_the_largest_model_is_that_whatever_the_memory(memory: int, scheme: str, micro_batch: int) -> None:
    largest(scheme, request(replace(FRONTIER, memory_per_rank=memory * GB), micro_batch=micro_batch))


def test_a_shape_that_is_leaner_than_a_smaller_one_is_found() -> None:
    """Without recomputation a shape of one layer less holds less: the first size that does not fit is not the last."""
    wanted = request(replace(load_preset("frontier", 8), memory_per_rank=206_464_492_619))
    model = replace(NEOX, sequence=8192)
    wanted = replace(wanted, job=replace(wanted.job, model=model, checkpointing=False))
    assert (max_params(resolve(wanted.machine, scheme="topo"), wanted) or 0) > 1.09e9


def test_the_papers_36_billion_are_about_what_its_plan_holds() -> None:
    wanted = replace(request(), reserve=0.1)
    found = max_params(resolve(wanted.machine, scheme="paper", secondary="node"), wanted)
    assert found == pytest.approx(36e9, rel=0.08)


def test_there_is_no_largest_model_where_memory_is_not_known_or_too_small() -> None:
    config = resolve(scheme="zero3")
    assert max_params(config, request(TREE)) is None
    assert max_params(config, request(replace(TREE, memory_per_rank=GB))) == 0


# -- "scheme": "auto" --------------------------------------------------------------------------------------------------
