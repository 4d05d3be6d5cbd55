# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Several trees of ranks in one world: meshes of data-parallel groups, and an engine of experts
next to another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bare import bare_engine, fake_world, matrices
from tests.harness import run_threads
from tests.ranks.worlds import BLOCKS, drawn, shards
from zero_topo.collectives.meter import Meter
from zero_topo.config import ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.engine.stage3 import Stage3
from zero_topo.mesh import Mesh
from zero_topo.plan import Plan
from zero_topo.topology.groups import Groups
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import emulated

EVERY_SECOND = ((0, 2, 4, 6), (1, 3, 5, 7))
MACHINE = emulated(2, 2, 2)
TURNED = Topology("turned", 2, 2, 2, order=(0, 1, 2, 3, 4, 7, 6, 5), emulated=True)
DENSE, EXPERT = (7, 501, 4096), (1280, 64, 4096)
EXACT = ("topo", "zero3", "hsdp")


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


def configs(block: dict[str, Any], rank: int) -> tuple[ResolvedConfig, ResolvedConfig]:
    """The plans of dense parameters over all ranks and of experts over every second one."""
    groups, parsed = Groups(MACHINE, EVERY_SECOND, "experts"), ZeroTopoConfig.parse(block)
    return resolve_config(parsed, MACHINE), replace(
        resolve_config(parsed, groups.tree(rank)), groups=groups
    )


def fill(stage: Stage3, params: list[Tensor]) -> None:
    """Give each rank its own shard, as DeepSpeed would."""
    plan, rank = stage.config.plan, stage.layout.rank
    stage.weights.own_row.copy_(torch.cat([shards(plan, param)[rank] for param in params]))
    stage.restart()


def rows_of(stage: Stage3, params: list[Tensor]) -> Tensor:
    """The rows of a rank's optimizer shard."""
    plan = stage.config.plan
    rows = plan.rows(stage.layout.rank, plan.optimizer)
    return torch.cat([shards(plan, param)[rows] for param in params], 1)


@pytest.mark.parametrize("name", ["topo", "zero3", "hsdp", "q4", "quantized", "codes"])
def test_an_engine_of_experts_works_next_to_that_of_all_ranks(name: str) -> None:
    """Weights of both arrive before and after an update; gradients are means over all ranks, as
    AutoEP's are.
    """

    def rank_main(rank: int) -> tuple[float, float, dict[tuple[str, str], int]]:
        of_dense, of_experts = configs(BLOCKS[name], rank)
        dense = bare_engine(of_dense, matrices(DENSE))
        experts = dense.alongside(of_experts, matrices(EXPERT), (), list)
        model = [
            (dense, drawn(DENSE, 7), range(8)),
            (experts, drawn(EXPERT, 50 + rank % 2), EVERY_SECOND[rank % 2]),
        ]
        weight_error = gradient_error = 0.0
        for stage, params, _ in model:
            fill(stage, params)
        for stage, params, _ in model:
            for param_index, param in enumerate(params):
                found = stage.weights.gather([param_index], "gather_forward").wait()[0]
                weight_error = max(weight_error, float((found - param).abs().max()))
            stage.gradients.scatter(range(3), drawn(stage.layout.numels, 100 + rank), last=True)
        for stage, params, members in model:
            stage.gradients.sync()
            every = [drawn(stage.layout.numels, 100 + member) for member in members]
            mean = [sum(parts) / 8 for parts in zip(*every, strict=True)]
            difference = stage.gradients.optimizer_rows() - rows_of(stage, mean)
            gradient_error = max(gradient_error, float(difference.abs().max()))
            masters = rows_of(stage, [param + 0.01 for param in params])
            stage.weights.update(masters)
        for stage, _, _ in reversed(model):
            stage.end_step(skipped=False)
        for stage, params, _ in model:
            for param_index, param in enumerate(params):
                found = stage.weights.gather([param_index], "gather_forward").wait()[0]
                weight_error = max(weight_error, float((found - param - 0.01).abs().max()))
        assert dense.meter is experts.meter
        assert dense.meter.steps == 1
        return weight_error, gradient_error, dict(dense.meter.last_step)

    limits = (1e-6, 1e-6) if name in EXACT else (0.05, 0.7)
    for weight_error, gradient_error, sent in run_threads(8, rank_main):
        assert weight_error < limits[0] and gradient_error < limits[1]
        assert any(domain.startswith("experts_") for _, domain in sent)
