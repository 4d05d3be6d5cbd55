# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One block gives the plan of experts, which are sharded over smaller groups, next to that of all
other parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.plans import resolve
from tests.steps import shape
from zero_topo.config import ResolvedConfig
from zero_topo.hook.initialize import resolve_experts
from zero_topo.topology.groups import Groups
from zero_topo.topology.presets import load_preset

FRONTIER = load_preset("frontier", 16)
ONE_OF_A_GPU = tuple(tuple(range(first, 16, 2)) for first in (0, 1))


def experts(
    block: dict[str, Any],
    of_dense: ResolvedConfig,
    groups: Sequence[tuple[int, ...]] = ONE_OF_A_GPU,
    rank: int = 3,
) -> ResolvedConfig:
    config = {"zero_optimization": {"stage": 3}, "zero_topo": block}
    return resolve_experts(config, of_dense, groups, rank)


@pytest.mark.parametrize("block", [{}, {"scheme": "topo"}])
def test_a_named_domain_is_one_of_the_experts_tree(block: dict[str, Any]) -> None:
    """Of a GPU one GCD has these experts, so it stores them whole; also if the scheme is the
    default of all ranks.
    """
    of_dense = resolve(FRONTIER, **block)
    found = experts(block, of_dense)
    assert (of_dense.plan.weights, of_dense.plan.gradients, of_dense.plan.world_size) == (2, 8, 16)
    assert (found.plan.weights, found.plan.gradients, found.plan.world_size) == (1, 4, 8)
    assert found.groups is not None
    assert found.groups.ranks(3) == (1, 3, 5, 7, 9, 11, 13, 15)
    assert found.groups.prefix == "experts_"


def test_a_plan_that_was_chosen_gives_its_domains_to_the_experts() -> None:
    """Degrees of an automatic plan are not searched a second time; INT8 weights need ranks that
    update others.
    """
    chosen = resolve(FRONTIER, scheme="topo-zero2")
    found = experts({"scheme": "auto"}, chosen)
    for role in ("weights", "gradients"):
        name = chosen.topology.domain(chosen.plan.degrees()[role] or 1)
        assert found.plan.degrees()[role] == found.topology.degree(name)
    alone = experts({"scheme": "auto"}, chosen, [(rank,) for rank in range(16)], 5)
    assert alone.plan.degrees() == {"weights": 1, "secondary": None, "gradients": 1, "optimizer": 1}
    assert alone.resident_spec is None


def test_a_degree_that_does_not_divide_the_experts_groups_is_refused_in_a_line() -> None:
    block = {"weights": 16, "gradients": 16, "optimizer": 16}
    with pytest.raises(
        ValueError,
        match=r"expert_parallel: weights degree 16 .* \(experts are sharded over 8 of 16",
    ):
        experts(block, resolve(FRONTIER, **block))


def test_experts_of_tensor_parallel_ranks_have_a_tree_of_the_whole_machine() -> None:
    """Their groups are not parts of a data-parallel group."""
    groups = Groups(FRONTIER, ONE_OF_A_GPU)
    of_dense = replace(resolve(groups.trees[0], scheme="zero3"), groups=groups)
    spread = [(rank, rank + 4, rank + 8, rank + 12) for rank in range(4)]
    found = experts({"scheme": "zero3"}, of_dense, spread, 6)
    assert found.groups is not None
    assert found.groups.machine is FRONTIER
    assert shape(found.topology) == (2, 2, 1)
