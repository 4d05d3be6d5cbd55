# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Secondary copies in host memory: keys, refusals, prices, and where the planner takes one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plans import resolve
from zero_topo.config import ZeroTopoConfig
from zero_topo.cost.explain import explain, planned
from zero_topo.cost.job import Job
from zero_topo.cost.memory import HOST
from zero_topo.cost.planner import Request, rank_plans
from zero_topo.cost.transformer import scaled
from zero_topo.topology.presets import load_preset

LARGE = Request(load_preset("frontier", 384), Job(scaled(175 * 10**9), 1, 1))
PARAMS = sum(LARGE.work.numels)
NODE: dict[str, Any] = {"scheme": "zero3", "secondary": "node", "secondary_on": "host"}


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (
            {"scheme": "zero3", "secondary_on": "host"},
            'secondary_on = "host": the plan has no secondary copy; set',
        ),
        (
            {"scheme": "topo", "secondary_on": "host"},
            'secondary_on = "host": weights stored as INT8 have no secondary',
        ),
        (
            {"scheme": "topo", "frozen": {"secondary_on": "host"}},
            "frozen.secondary_on = .*: weights stored as INT8",
        ),
        (
            {"scheme": "zero3", "weights": "rank", "secondary_on": "host"},
            "every rank stores all weights",
        ),
        (
            {"scheme": "zero3", "frozen": {"secondary_on": "host", "secondary": None}},
            "frozen.secondary_on.*no secondary",
        ),
        ({"scheme": "zero3", "frozen": {"secondary": 3}}, "secondary degree 3 does not divide"),
        ({"secondary_on": "hots"}, "secondary_on"),
    ],
)
def test_a_copy_that_the_plan_does_not_have_is_refused(block: dict[str, Any], why: str) -> None:
    """In one line with the key, the reason and a way out."""
    with pytest.raises(ValueError, match=why) as caught:
        resolve(**block)
    assert "\n" not in str(caught.value)


def test_frozen_weights_have_the_copy_of_the_block_unless_they_have_keys() -> None:
    """With ``secondary_on`` alone it is shared by a node; notes and the JSON say so."""
    assert resolve(**NODE).of_frozen().plan.secondary == 4
    alone = resolve(scheme="zero3", frozen={"secondary_on": "host"})
    still = alone.of_frozen()
    assert (alone.plan.secondary, still.plan.secondary, alone.secondary_on, still.secondary_on) == (
        None,
        4,
        "device",
        "host",
    )
    assert alone.to_json()["frozen"] == {"secondary": 4, "on": "host"}
    assert "the secondary copy of frozen weights is in host memory" in alone.notes
    small = resolve(**NODE, frozen={"secondary": 2, "secondary_on": "device"}).of_frozen()
    assert (small.plan.secondary, small.secondary_on) == (2, "device")
    own = resolve(
        scheme="hsdp", secondary="node", secondary_on="host", quantize={"secondary": "int8"}
    )
    assert (
        "the secondary copy is not stored: the backward pass sends this rank's own weights"
        in own.notes
    )


def test_175_billion_parameters_on_384_gcds_take_a_copy_in_host_memory() -> None:
    """It is the fastest lossless plan: 2% less time than ZeRO-3, whose copy on the device does not
    fit.
    """
    ranking = rank_plans(ZeroTopoConfig.parse({"scheme": "auto"}), LARGE)
    best = ranking.best
    assert best.candidate.settings == {
        "weights": "world",
        "secondary": "node",
        "gradients": "world",
        "optimizer": "world",
        "secondary_on": "host",
    }
    plans = {plan.candidate.name: plan for plan in (*ranking.timed, *ranking.refused)}
    zero3, there = plans["zero3"], plans["weights 384, secondary 8, gradients 384, optimizer 384"]
    assert not there.fits and there.stored > best.stored + 43 * 10**9
    assert best.on_host == pytest.approx(2 * PARAMS / 8, rel=1e-3)
    assert 1.02 < zero3.seconds / best.seconds < 1.03
    # Twice over the host's link: after the forward pass, and before the backward pass.
    assert best.step.breakdown[HOST] == pytest.approx(2 * best.on_host / 36e9, rel=1e-3)
    assert best.seconds == pytest.approx(there.seconds + best.step.breakdown[HOST])
    assert any("and 43.75 GB of 57.60 GB of host memory" in line for line in explain(ranking))


def test_without_room_on_the_host_no_plan_has_a_copy_there() -> None:
    """Nor where it is not known how much the host has; a block that asks for one is refused in a
    line.
    """
    for memory in (40 * 10**9, None):
        less = replace(LARGE, topology=replace(LARGE.topology, host_memory_per_rank=memory))
        assert not rank_plans(ZeroTopoConfig.parse({"scheme": "auto"}), less).best.on_host
    little = replace(LARGE, topology=replace(LARGE.topology, host_memory_per_rank=40 * 10**9))
    with pytest.raises(
        ValueError, match=r"secondary copies take 43.75 GB of each rank's 36.00 GB of host memory"
    ):
        planned(ZeroTopoConfig.parse(NODE), little)
    assert planned(ZeroTopoConfig.parse(NODE), LARGE).secondary_on == "host"


def test_an_offloaded_optimizer_counts_on_the_host() -> None:
    """Twelve bytes for each parameter that a rank updates, in addition to the copy."""
    offloaded = replace(LARGE, job=replace(LARGE.job, offload=True))
    plain, more = (
        request.price(resolve(request.topology, **NODE)) for request in (LARGE, offloaded)
    )
    assert more.on_host - plain.on_host == pytest.approx(12 * PARAMS / 384, rel=1e-3)
