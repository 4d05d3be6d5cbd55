# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A function of whole matrices gives every rank its part of the result, and each matrix is computed
by one owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bare import bare_engine, fake_world, matrices
from benchmarks.counting import Launches
from tests.plans import resolve
from tests.ranks.worlds import PLAIN, World, shards, shuffled, world
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import emulated

SHAPES: dict[int, tuple[int, ...]] = {
    0: (8, 6),
    2: (3, 5),
    3: (8, 6),
    4: (5, 3),
    5: (1, 2),
    6: (8, 6),
    7: (2, 3, 2, 2),
}
MACHINE = emulated(2, 2, 2)
NUMELS = (48, 7, 15, 48, 15, 2, 48, 24)


def doubled(owned: Sequence[int], found: Tensor) -> Tensor:
    """A function that needs the whole matrix, and its own shape."""
    return found / found.norm(dim=(-2, -1), keepdim=True) + torch.tensor(owned).view(
        -1, *[1] * (found.dim() - 1)
    )


def applied(
    w: World, rank: int, limit: int
) -> tuple[dict[int, Tensor], list[int], dict[tuple[str, str], int]]:
    """The parts of a rank after one call, what it computed, and what it sent."""
    parameters = [
        replace(p, whole=param_index in SHAPES) for param_index, p in enumerate(matrices(w.numels))
    ]
    engine = bare_engine(w.config, parameters, torch.float32, limit)
    params, plan = w.params(), w.config.plan
    rows = plan.rows(rank, plan.optimizer)
    parts = {param_index: shards(plan, params[param_index])[rows] for param_index in SHAPES}
    computed: list[int] = []

    def update(owned: Sequence[int], found: Tensor) -> Tensor:
        computed.extend(owned)
        assert {tuple(matrix.shape) for matrix in found} == {
            SHAPES[param_index] for param_index in owned
        }
        return doubled(owned, found)

    engine.matrices.apply(parts, SHAPES, update)
    engine.end_step(skipped=False)
    return parts, computed, dict(engine.meter.last_step)


@pytest.mark.parametrize("machine", [MACHINE, shuffled(MACHINE)], ids=["block", "shuffled"])
@pytest.mark.parametrize("limit", [1, 100, 1 << 20])
@pytest.mark.parametrize("optimizer", ["rank", "gpu", "node", "world"])
def test_every_rank_gets_its_part_of_the_result(
    machine: Topology, limit: int, optimizer: str
) -> None:
    """Wherever the optimizer is sharded, and however many matrices are exchanged at once, with
    padding and without.

    Each copy of the optimizer computes every matrix once, spread over its ranks.
    """
    degrees: dict[str, Any] = {"weights": "rank", "gradients": "rank", "optimizer": optimizer}
    w = world({**degrees, "quantize": PLAIN}, machine, NUMELS)
    plan, params = w.config.plan, w.params()
    wanted = {
        param_index: doubled([param_index], params[param_index].view(1, *shape)).flatten()
        for param_index, shape in SHAPES.items()
    }
    found = w.on_ranks(lambda rank: applied(w, rank, limit))
    for rank, (parts, _, _) in enumerate(found):
        for param_index, part in parts.items():
            torch.testing.assert_close(
                part, shards(plan, wanted[param_index])[plan.rows(rank, plan.optimizer)]
            )
    copies = plan.world_size // plan.optimizer
    assert Counter(
        param_index for _, computed, _ in found for param_index in computed
    ) == dict.fromkeys(SHAPES, copies)
    sent = sum(
        nbytes for *_, step in found for (phase, _), nbytes in step.items() if phase == "matrices"
    )
    padded = sum(plan.world_size * plan.shard_numel(NUMELS[param_index]) for param_index in SHAPES)
    assert sent == 4 * 2 * padded * copies * (plan.optimizer - 1) // plan.optimizer
    assert all(len(computed) <= -(-len(SHAPES) // plan.optimizer) for _, computed, _ in found)


@pytest.mark.parametrize("optimizer", ["node", "world"])
def test_equal_matrices_are_packed_together(optimizer: str) -> None:
    """Each further matrix takes one launch, the copy of its update; with many owners of few, one
    more to be sent.
    """

    def launches(nodes: int, count: int) -> int:
        config = resolve(emulated(nodes, 4, 2), scheme="topo", optimizer=optimizer, quantize=PLAIN)
        shapes = dict.fromkeys(range(count), (8 * nodes, 8))
        found = Launches()
        with fake_world(8 * nodes):
            parameters = [replace(p, whole=True) for p in matrices([64 * nodes] * count)]
            engine = bare_engine(config, parameters, torch.float32)
            rows = torch.zeros(config.plan.world_size // config.plan.optimizer, 8 * count)
            parts = {
                param_index: engine.layout.parameter(rows, param_index) for param_index in shapes
            }
            with found.phase("matrices"):
                engine.matrices.apply(parts, shapes, lambda owned, stack: stack * 2)
        return found.phases["matrices"].launches

    few, many, nodes = launches(2, 64), launches(2, 128), launches(48, 128)
    assert many - few == 64 and nodes <= 2 * 128 + 16, (few, many, nodes)
