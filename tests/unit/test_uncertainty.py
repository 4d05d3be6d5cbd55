# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How far a step may be off: by hand on two GCDs, where every part of it adds up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plans import resolve
from zero_topo.cost.job import Job
from zero_topo.cost.step import predict_step, step_range
from zero_topo.cost.transformer import Transformer
from zero_topo.topology import Link, Topology
from zero_topo.topology.rates import UNKNOWN_SPREAD, Collective, Rates, Ring, Unknown

PAIR = Topology("pair", 1, 1, 2, links={"gpu": Link(1e6, 0.25)})
MODEL = Transformer("one", 1, 64, 4, 4, 128, 32, 256)
SURE: dict[Unknown, float] = {"compute": 0.0, "memory": 0.0, "links": 0.0, "latency": 0.0}
RATES = Rates(1e9, 1.0, 1e15, 1.0, spread=SURE)
CONFIG, JOB = resolve(PAIR, scheme="zero3"), Job(MODEL, 1, 1, checkpointing=False, overlap=0.0)


@pytest.mark.parametrize("rings", [False, True])
@pytest.mark.parametrize("unknown", SURE)
def test_each_unknown_moves_its_own_part_of_the_step(unknown: Unknown, rings: bool) -> None:
    """Three gathers and scatters for each of three modules: latency, bytes, and FLOPs, each slower
    by its share.
    """
    seconds = {
        "latency": 9 * 0.25,
        "links": 3 * sum(-(-numel // 2) for numel in MODEL.numels()) * 2 / 1e6,
        "compute": 3 * sum(MODEL.module_flops(32)) / 1e9,
        "memory": 0.0,
    }
    found: dict[Collective, dict[str, Ring]] = {"gather": {"gpu": Ring(1e6, 0.25)}} if rings else {}
    rates = replace(RATES, spread={**SURE, unknown: 0.2}, rings=found)
    step, within = (
        predict_step(CONFIG, JOB, rates).seconds,
        step_range(CONFIG, JOB, rates, predict_step),
    )
    assert within.high_s - step == pytest.approx(
        seconds[unknown] * (1 / 0.8 - 1), rel=1e-5, abs=1e-6
    )
    assert step - within.low_s == pytest.approx(
        seconds[unknown] * (1 - 1 / 1.2), rel=1e-5, abs=1e-6
    )
    assert within.depends_on[unknown] == pytest.approx((within.high_s - within.low_s) / step)
    assert (
        "overlap" not in within.depends_on
        and sum(within.depends_on.values()) == within.depends_on[unknown]
    )


def test_overlap_is_part_of_the_range_unless_it_is_stated() -> None:
    """The best case hides all it can, the worst nothing; what is not known counts as a third
    off.
    """
    best, worst = (
        predict_step(CONFIG, replace(JOB, overlap=share), RATES).seconds for share in (1.0, 0.0)
    )
    within, stated = (
        step_range(CONFIG, replace(JOB, overlap=share), RATES, predict_step)
        for share in (None, 0.0)
    )
    assert best < worst and (within.low_s, within.high_s) == pytest.approx((best, worst))
    usual = predict_step(CONFIG, replace(JOB, overlap=None), RATES).seconds
    assert within.depends_on["overlap"] == pytest.approx((worst - best) / usual)
    assert (stated.low_s, stated.high_s) == pytest.approx((worst, worst))
    assert max(stated.depends_on.values()) < 0.01
    unsure = step_range(CONFIG, JOB, replace(RATES, spread={}), predict_step)
    expected = (worst / (1 + UNKNOWN_SPREAD), worst / (1 - UNKNOWN_SPREAD))
    assert (unsure.low_s, unsure.high_s) == pytest.approx(expected)
