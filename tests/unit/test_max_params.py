# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The largest model that fits: on a machine, with a scheme, whatever the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plans import TREE, resolve
from tests.unit.test_planner import NEOX, request
from zero_topo.config import SCHEMES
from zero_topo.cost.largest import max_params
from zero_topo.cost.memory import predict_memory
from zero_topo.cost.transformer import scaled
from zero_topo.cost.volume import Workload
from zero_topo.topology import load_preset
from zero_topo.units import GB


@given(
    nodes=st.sampled_from([1, 48]),
    memory=st.integers(6, 500),
    scheme=st.sampled_from(list(SCHEMES)),
    micro_batch=st.integers(1, 8),
)
def test_the_largest_model_fits_and_a_larger_one_does_not(
    nodes: int, memory: int, scheme: str, micro_batch: int
) -> None:
    """If one fits at all; what is 0.5, 2 or 5 percent larger does not."""
    machine = replace(load_preset("frontier", 8 * nodes), memory_per_rank=memory * GB)
    wanted = request(machine, micro_batch=micro_batch)
    config = resolve(machine, scheme=scheme)
    found = max_params(config, wanted)
    assert found is not None and wanted.limit is not None
    for params in (found, int(found * 1.005), int(found * 1.02), int(found * 1.05)):
        model = scaled(max(params, 1000))
        stored = predict_memory(
            config, Workload.uniform(model.numels()), replace(wanted.job, model=model)
        )
        assert (sum(stored.values()) <= wanted.limit) == (params == found > 0)


def test_a_shape_that_is_leaner_than_a_smaller_one_is_found() -> None:
    """Without recomputation a shape of one layer less holds less: the first size that does not fit
    is not the last.
    """
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
