# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The dependency rule and the nested index arithmetic, for any degrees and any rank order."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from zero_topo.plan import Plan, coded_params, divisors, packed_runs
from zero_topo.topology.model import Topology


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any valid plan over up to 48 ranks, in any rank order."""
    world = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 48]))
    optimizer = draw(st.sampled_from(divisors(world)))
    gradients = draw(st.sampled_from(divisors(optimizer)))
    weights = draw(st.sampled_from(divisors(gradients)))
    candidates = [s for s in divisors(world) if s % weights == 0 or weights % s == 0]
    secondary = draw(st.none() | st.sampled_from(candidates))
    order = draw(st.none() | st.permutations(range(world)))
    return Plan(
        world, weights, secondary, gradients, optimizer, None if order is None else tuple(order)
    )


@given(plans())
def test_each_shard_nests_in_the_next_smaller_degree_and_holds_the_ranks_own_row(
    plan: Plan,
) -> None:
    for rank in range(plan.world_size):
        nested = [set(plan.rows(rank, d)) for d in (plan.optimizer, plan.gradients, plan.weights)]
        assert nested[0] <= nested[1] <= nested[2]
        for degree in (plan.weights, plan.gradients, plan.optimizer):
            assert plan.rows(rank, degree)[plan.row(rank, degree)] == rank


@given(plans())
def test_a_group_is_the_transpose_its_note_says(plan: Plan) -> None:
    for lo, hi in (
        (1, plan.weights),
        (plan.weights, plan.optimizer),
        (plan.gradients, plan.world_size),
    ):
        for rank in range(plan.world_size):
            group = plan.group(rank, lo, hi)
            assert len(group) == hi // lo and rank in group
            assert group in plan.groups(lo, hi)
            for j, shard in enumerate(plan.rows(rank, lo)):
                member = group[j % len(group)]
                assert plan.rows(member, hi)[j // len(group)] == shard


def test_two_groups_go_through_the_node() -> None:
    """Unless they are turned off, what spans nodes goes through the node, if its members nest in
    it.
    """
    machine = Topology("m", nodes=4, gpus_per_node=2, ranks_per_gpu=2)
    plan = Plan.build(machine, ("world", "node", "world", "world"))
    assert [plan.stages(lo, 16) for lo in (1, 2, 4, 8)] == [
        [(1, 4), (4, 16)],
        [(2, 4), (4, 16)],
        [(4, 16)],
        [(8, 16)],
    ]
    assert Plan.build(machine, ("gpu", "node", "node", "world")).stages(1, 4) == [(1, 4)]
    through = Plan(24, 1, None, 1, 24, inner=6)
    assert [through.stages(lo, hi) for lo, hi in ((4, 24), (3, 8), (1, 8))] == [
        [(4, 24)],
        [(3, 8)],
        [(1, 8)],
    ]


@given(st.lists(st.integers(0, 9), max_size=12), st.none() | st.integers(1, 12))
def test_runs_are_as_long_as_the_limit_allows(sizes: list[int], limit: int | None) -> None:
    """They hold all items in order; no item that begins a run had still fit into the run before."""
    runs = packed_runs(sizes, limit)
    assert [index for run in runs for index in run] == list(range(len(sizes))) and all(runs)
    totals = [sum(sizes[index] for index in run) for run in runs]
    assert limit is not None or len(runs) <= 1
    for run, total in zip(runs, totals, strict=True):
        assert limit is None or total <= limit or len(run) == 1
    for (_, run), total in zip(pairwise(runs), totals, strict=False):
        assert limit is not None and total + sizes[run.start] > limit


def test_codes_are_stored_of_large_matrices_alone() -> None:
    """Vectors, what every rank keeps whole, and what whole blocks would make larger by over an
    eighth stay.
    """
    plan, block = Plan(8, 2, None, 4, 8), 256
    rows = {
        8 * 256: True,  # a block for each rank
        8 * 256 - 227: True,  # 1821 elements: 2048 are 12.5% more
        8 * 256 - 228: False,
        8 * 257: False,  # two blocks for each rank
        8 * 2048 + 1: True,
        0: False,
    }
    numels, flags = tuple(rows), (False,) * len(rows)
    assert coded_params(plan, numels, (2,) * len(rows), flags, block) == tuple(rows.values())
    assert coded_params(plan, numels, (3,) * len(rows), flags, block) == tuple(rows.values())
    assert not any(coded_params(plan, numels, (1,) * len(rows), flags, block))
    assert not any(coded_params(plan, numels, (3,) * len(rows), (True,) * len(rows), block))
