# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Process groups: who is in which, at any size, and created alike on every rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from benchmarks.bare import fake_world
from tests.harness import SplittingGroup, bound_world, run_threads
from tests.ranks.worlds import shuffled
from zero_topo.collectives.meter import Meter
from zero_topo.collectives.transport import Group
from zero_topo.mesh import Mesh
from zero_topo.plan import Plan
from zero_topo.topology.groups import Groups
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import emulated, load_preset
from zero_topo.versions import torch_has

SPLIT = "torch.distributed.split_group(backend=)"


EVERY_SECOND = ((0, 2, 4, 6), (1, 3, 5, 7))
"""Ranks of two trees in one world."""
MACHINE = emulated(2, 2, 2)
TURNED = Topology("turned", 2, 2, 2, order=(0, 1, 2, 3, 4, 7, 6, 5), emulated=True)


def gathered(group: Group, rank: int) -> list[int]:
    """Ranks that a group of two brings together."""
    received = torch.empty(2, dtype=torch.int64)
    dist.all_gather_into_tensor(received, torch.tensor([rank]), group=group.group)
    return received.tolist()


@pytest.mark.parametrize("machine", [MACHINE, TURNED])
def test_groups_of_all_trees_are_made_at_once(machine: Topology) -> None:
    """Every rank makes the groups of both trees in one order, whose members may be placed
    differently.
    """
    groups = Groups(machine, EVERY_SECOND)

    def rank_main(rank: int) -> dict[tuple[int, int], list[int]]:
        tree = groups.tree(rank)
        plan = Plan.build(tree, ("rank", None, "node", "world"))
        mesh = Mesh(plan, tree, Meter(), plan.pairs(), groups=groups)
        seen = {}
        for pair in ((1, 2), (2, 4)):
            seen[pair] = gathered(mesh.group(*pair), rank)
        assert mesh.rank == EVERY_SECOND[rank % 2].index(rank)
        return seen

    for rank, seen in enumerate(run_threads(8, rank_main)):
        for pair, ranks in seen.items():
            assert rank in ranks and {other % 2 for other in ranks} == {rank % 2}
            nodes = {machine.coordinates(other)[0] for other in ranks}
            assert len(nodes) == (1 if pair == (1, 2) else 2), "inside the node, then across"


def test_a_destroyed_mesh_lets_go_of_groups_and_works() -> None:
    """Works hold messages, and gloo's connections."""
    groups = Groups(MACHINE, EVERY_SECOND)
    plan = Plan.build(groups.trees[0], ("rank", None, "node", "world"))
    with fake_world(8, 3):
        before = len(dist.distributed_c10d._world.pg_map)
        mesh = Mesh(plan, groups.trees[1], Meter(), plan.pairs(), groups=groups)
        assert len(dist.distributed_c10d._world.pg_map) > before
        done = mesh.group(1, 2).done
        done.append(dist.barrier(async_op=True))
        mesh.destroy()
        assert not done and len(dist.distributed_c10d._world.pg_map) == before


def test_ranks_that_are_in_unequally_many_groups_of_their_own_do_not_hang_ours() -> None:
    """Torch names a locally synchronized group by how many the rank is in: ours must not depend on
    that.
    """
    machine = shuffled(emulated(2, 2, 2))
    plan = Plan.build(machine, ("gpu", "node", "node", "world"))

    def rank_main(rank: int) -> list[int]:
        dist.new_group([0, 1, 5])
        dist.new_group([2, 5])
        made = Mesh(plan, machine, Meter(), plan.pairs()).group(1, 2)
        return gathered(made, rank)

    seen = run_threads(8, rank_main)
    assert all(seen[rank] == sorted(plan.group(rank, 1, 2)) for rank in range(8))


def test_a_group_that_was_not_asked_for_is_an_error_not_a_new_group() -> None:
    machine = emulated(1, 2, 2)
    with fake_world(4), pytest.raises(KeyError):
        Mesh(Plan(4, 2, None, 4, 4), machine, Meter(), [(1, 2)]).group(2, 4)


@pytest.mark.skipif(
    not torch_has(SPLIT, torch.__version__), reason="this torch makes groups one by one"
)
@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
def test_all_groups_of_a_group_are_one_split_of_the_world() -> None:
    """On a bound device each ``new_group`` is a collective of the world: 65,864 of them at
    Frontier's size. Each waits as long as the world (see :class:`SplittingGroup`).
    """
    machine = load_preset("frontier", 9408 * 8)
    plan = Plan.build(machine, ("gpu", "gpu", "node", "world"))
    rank = 40_003
    with (
        bound_world(machine.world_size, rank) as world,
        patch.object(dist, "new_group", side_effect=AssertionError),
    ):
        mesh = Mesh(plan, machine, Meter(), plan.pairs())
        all_groups = [mesh.group(*pair) for whole in plan.pairs() for pair in plan.stages(*whole)]
        travelled = {
            (made.lo, made.hi): made.group for made in all_groups if made.group not in (None, world)
        }
        assert mesh.calls == len(world.splits) == len(travelled) == 4
        for ranks, (pair, group) in zip(world.splits, travelled.items(), strict=True):
            assert ranks == dist.get_process_group_ranks(group) == sorted(plan.group(rank, *pair))


@pytest.mark.parametrize(("unequal", "version"), [(True, torch.__version__), (False, "2.12.1")])
def test_ranks_that_know_unequally_many_groups_do_not_split(
    unequal: bool, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's name of a split group holds the number of a rank's groups: members would know it by
    different names.

    Nor does an older torch split, whose groups may collide or whose ``split_group`` takes no
    backend. Groups wait as long as the world; torch's own default is ten minutes.
    """
    monkeypatch.setattr(torch, "__version__", version)
    plan = Plan.build(MACHINE, ("gpu", "node", "node", "world"))
    made: list[list[int]] = []

    def new_group(ranks: list[int], group_desc: str, timeout: timedelta) -> Any:
        assert timeout == world.options._timeout
        assert dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is None
        made.append(ranks)
        return SplittingGroup(0, len(ranks)) if 3 in ranks else None

    with bound_world(8, 3, unequal=unequal) as world, patch.object(dist, "new_group", new_group):
        mesh = Mesh(plan, MACHINE, Meter(), plan.pairs())
        assert world.bound_device_id == torch.device("cpu", 0)
        assert world.splits == [] and mesh.calls == len(made) == sum(
            len(plan.groups(*pair)) for pair in mesh._groups if 1 < pair[1] // pair[0] < 8
        )
