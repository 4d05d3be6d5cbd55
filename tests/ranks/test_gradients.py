# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Gradient shards: the ring between nodes, and the end of an engine in the middle of a step. What
scatter and sync give is tested in ``test_phases.py``.
"""

from __future__ import annotations

import pytest
import torch

from tests.harness import run_threads
from tests.ranks.worlds import BLOCKS, PARAM_INDICES, PLAIN, World, mean, shards, shuffled, world
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


@pytest.mark.parametrize("scheme", ["ring", "two groups, ring"])
def test_a_ring_sums_between_nodes_in_the_type_that_is_sent(scheme: str) -> None:
    """One reduce-scatter of the backend for each run, between nodes alone; the bytes are those
    without it.
    """
    Sent = dict[str, int]

    def trained(**sync: str) -> list[tuple[float, Sent, set[tuple[str, str]]]]:
        block = {**BLOCKS[scheme], "sync": {"mode": "dense", **sync}}
        w = world(block, shuffled(emulated(4, 1, 2)))

        def rank_main(rank: int) -> tuple[float, Sent, set[tuple[str, str]]]:
            engine = w.engine(torch.bfloat16, chunk=600)
            seen = set[tuple[str, str]]()
            engine.meter.listener = lambda group, op, nbytes, even: seen.add((op, group.domain))
            engine.gradients.scatter(PARAM_INDICES, w.grads(rank, 0, torch.bfloat16), True)
            engine.gradients.sync()
            engine.meter.end_step()
            total = engine.meter.last_step.items()
            sent = {domain: n for (phase, domain), n in total if phase == "sync"}
            return error(engine, w), sent, seen

        return run_threads(w.size, rank_main)

    for ring, direct in zip(trained(reduce="ring"), trained(), strict=True):
        assert ring[1] == direct[1]
        assert ring[0] < 0.05 and direct[0] < 0.05
        assert ("reduce_scatter", "world") in ring[2]
        assert not any(op == "reduce_scatter" for op, _ in direct[2])


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

    assert max(run_threads(w.size, rank_main)) < 1e-6
