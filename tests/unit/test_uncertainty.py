# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How far a step may be off: by hand on two dies, where every part of it adds up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plans import resolve
from zero_topo.cost.simulator import Job, simulate
from zero_topo.cost.transformer import Transformer
from zero_topo.cost.uncertainty import Overlap, bounds, overlapping, step_range
from zero_topo.topology import Link, Topology
from zero_topo.topology.rates import UNKNOWN_SPREAD, Collective, Rates, Ring, Unknown

PAIR = Topology("pair", 1, 1, 2, links={"gpu": Link(1e6, 0.25)})
MODEL = Transformer("one", 1, 64, 4, 4, 128, 32, 256)
SURE: dict[Unknown, float] = {"compute": 0.0, "memory": 0.0, "links": 0.0, "latency": 0.0}
RATES = Rates(1e9, 1.0, 1e15, 1.0, spread=SURE)
CONFIG, JOB = overlapping(resolve(PAIR, scheme="zero3"), Job(MODEL, 1, 1, checkpointing=False), "none")


@pytest.mark.parametrize("rings", [False, True])
@pytest.mark.parametrize("unknown", SURE)
def test_each_unknown_moves_its_own_part_of_the_step(unknown: Unknown, rings: bool) -> None:
    """Three gathers and scatters for each of three modules: latency, bytes, and FLOPs, each slower by its share."""
    seconds = {
        "latency": 9 * 0.25,
        "links": 3 * sum(-(-numel // 2) for numel in MODEL.numels()) * 2 / 1e6,
        "compute": 3 * sum(MODEL.module_flops(32)) / 1e9,
        "memory": 0.0,
    }
    found: dict[Collective, dict[str, Ring]] = {"gather": {"gpu": Ring(1e6, 0.25)}} if rings else {}
    rates = replace(RATES, spread={**SURE, unknown: 0.2}, rings=found)
    step = simulate(CONFIG, JOB, rates).step_s
    within = step_range(CONFIG, JOB, rates, overlap_known=True)
    assert within.high_s - step == pytest.approx(seconds[unknown] * (1 / 0.8 - 1), rel=1e-5, abs=1e-6)
    assert step - within.low_s == pytest.approx(seconds[unknown] * (1 - 1 / 1.2), rel=1e-5, abs=1e-6)
    assert within.hangs_on[unknown] == pytest.approx(within.high_s / step - 1)
    assert "overlap" not in within.hangs_on and sum(within.hangs_on.values()) == pytest.approx(within.high_s / step - 1)


def test_what_may_not_overlap_is_part_of_the_range_unless_it_is_known() -> None:
    """The best case hides all it can, the worst nothing; what is not told counts as a third off."""
    config, job = resolve(PAIR, scheme="zero3"), replace(JOB, prefetch=1, overlap_scatter=True)
    best, worst = simulate(config, job, RATES).step_s, simulate(CONFIG, JOB, RATES).step_s
    assert best < worst and bounds(config, job, RATES) == pytest.approx((best, worst))
    assert bounds(config, job, RATES, overlap_known=True) == pytest.approx((best, best))
    assert step_range(config, job, RATES).sentence() == f"overlap ({worst / best - 1:+.0%})"
    assert step_range(CONFIG, JOB, RATES, overlap_known=True).sentence() == "nothing that is unknown"
    unsure = bounds(CONFIG, JOB, replace(RATES, spread={}), overlap_known=True)
    assert unsure == pytest.approx((worst / (1 + UNKNOWN_SPREAD), worst / (1 - UNKNOWN_SPREAD)))


def test_prefetch_alone_is_between_none_and_all() -> None:
    config, job = resolve(PAIR, scheme="zero3"), Job(MODEL, 1, 1)
    words: tuple[Overlap, ...] = ("full", "prefetch", "none")
    times = [simulate(*overlapping(config, job, how), RATES).step_s for how in words]
    assert times == sorted(times) and len(set(times)) == 3
