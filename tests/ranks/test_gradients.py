# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Gradient shards: sums by the backend, staged scatters, and the end of an engine in the middle of
a step. What scatter and sync give is tested in ``test_phases.py``.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks.worlds import BLOCKS, PARAM_INDICES, PLAIN, World, mean, shards, shuffled, world
from zero_topo.collectives.meter import Meter
from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Group, Op
from zero_topo.engine.stage3 import Stage3
from zero_topo.topology.presets import emulated


def error(engine: Stage3, w: World) -> float:
    """After one micro-batch: the largest difference of the optimizer's rows from the mean of all
    ranks' gradients.
    """
    plan = w.config.plan
    rows = plan.rows(engine.layout.rank, plan.optimizer)
    wanted = torch.cat([shards(plan, grad)[rows] for grad in mean(w.numels, w.size, 0)], dim=1)
    return float((engine.gradients.optimizer_rows() - wanted).abs().max())


Begun = defaultdict[Meter, list[tuple[str, str]]]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    """The operation and the domain of each exchange of an engine, by its meter."""
    found: Begun = defaultdict(list)
    begin = Group.begin

    def recording(group: Group, op: Op, x: Tensor, *counts: Any) -> Handle[Tensor]:
        found[group.meter].append((op, group.domain))
        return begin(group, op, x, *counts)

    monkeypatch.setattr(Group, "begin", recording)
    return found


STAGED = BLOCKS["ring"] | {"weights": 2, "gradients": 4}


@pytest.mark.parametrize("block", [BLOCKS["ring"], BLOCKS["two groups, ring"], STAGED])
def test_the_backend_sums_between_nodes_in_the_type_that_is_sent(
    block: dict[str, Any], begun: Begun
) -> None:
    """By reduce-scatters of the backend between nodes, and only by them; a second gradient right
    behind the first is in the sum.
    """
    w = world(block, shuffled(emulated(4, 1, 2)))

    def rank_main(rank: int) -> tuple[float, set[tuple[str, str]]]:
        engine = w.engine(torch.bfloat16, chunk=600)
        halves = [grad / 2 for grad in w.grads(rank, 0, torch.bfloat16)]
        engine.gradients.scatter(PARAM_INDICES, halves, True)
        engine.gradients.scatter(PARAM_INDICES, halves, True)
        engine.gradients.sync()
        return error(engine, w), set(begun[engine.meter])

    for difference, ops in w.on_ranks(rank_main):
        assert difference < 0.05
        assert ("reduce_scatter", "world") in ops
        assert ("all_to_all", "world") not in ops


def test_the_second_exchange_of_a_bucket_runs_under_the_first_of_the_next(begun: Begun) -> None:
    w = world(STAGED, emulated(4, 1, 2))

    def rank_main(rank: int) -> list[tuple[str, str]]:
        engine = w.engine()
        grads = w.grads(rank, 0)
        begun[engine.meter].clear()
        for bucket in ((4, 1), (0,), (2, 3)):
            engine.gradients.scatter(bucket, [grads[index] for index in bucket], False)
        engine.gradients.finish_scatter()
        return begun[engine.meter]

    first = ("reduce_scatter", "gpu")
    second = ("reduce_scatter", "world")
    for seen in w.on_ranks(rank_main):
        assert seen == [first, first, second, first, second, second]


@pytest.mark.parametrize("scheme", ["topo", "hsdp"])
def test_what_a_backward_pass_has_begun_ends_before_its_groups_do(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine destroyed before its step (an exception in between) does not leave collectives to
    dead groups.
    """
    # Groups of threads cannot be
    monkeypatch.setattr("zero_topo.mesh.Mesh.destroy", lambda mesh: None)
    w = world({"scheme": scheme, "quantize": PLAIN})

    def rank_main(rank: int) -> float:
        engine = w.engine()
        engine.gradients.scatter(PARAM_INDICES, w.grads(rank), last=True)
        engine.destroy()
        return error(engine, w)

    assert max(w.on_ranks(rank_main)) < 1e-6
