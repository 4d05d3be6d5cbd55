# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Several trees of ranks in one world: meshes of data-parallel groups. Engines of experts are
tested in ``tests/launcher/test_expert_parallel.py``.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.bare import fake_world
from tests.harness import run_threads
from zero_topo.collectives.meter import Meter
from zero_topo.mesh import Mesh
from zero_topo.plan import Plan
from zero_topo.topology.groups import Groups
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import emulated

EVERY_SECOND = ((0, 2, 4, 6), (1, 3, 5, 7))
MACHINE = emulated(2, 2, 2)
TURNED = Topology("turned", 2, 2, 2, order=(0, 1, 2, 3, 4, 7, 6, 5), emulated=True)


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
            group = mesh.group(*pair)
            received = torch.empty(2, dtype=torch.int64)
            dist.all_gather_into_tensor(received, torch.tensor([rank]), group=group.group)
            seen[pair] = received.tolist()
        assert mesh.rank == EVERY_SECOND[rank % 2].index(rank)
        return seen

    for rank, seen in enumerate(run_threads(8, rank_main)):
        for pair, ranks in seen.items():
            assert rank in ranks and {other % 2 for other in ranks} == {rank % 2}
            nodes = {machine.coordinates(other)[0] for other in ranks}
            assert len(nodes) == (1 if pair == (1, 2) else 2), "inside the node, then across"


def test_a_mesh_of_several_trees_destroys_its_groups() -> None:
    groups = Groups(MACHINE, EVERY_SECOND)
    plan = Plan.build(groups.trees[0], ("rank", None, "node", "world"))
    with fake_world(8, 3):
        before = len(dist.distributed_c10d._world.pg_map)
        mesh = Mesh(plan, groups.trees[1], Meter(), plan.pairs(), groups=groups)
        assert len(dist.distributed_c10d._world.pg_map) > before
        mesh.destroy()
        assert len(dist.distributed_c10d._world.pg_map) == before
