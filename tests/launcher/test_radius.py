# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Radius under DeepSpeed: it trains, resumes, and takes its mask from the optimizer's own update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launcher.checkpoints import SAVED_AT, assert_same_bits, job, loaded, save
from tests.launcher.training import Job, block, train, weights
from tests.launcher.training import advance as go_on
from zero_topo.sync.radius import Radius

INTERVAL = 4
PLANS: dict[str, dict[str, Any]] = {
    "hierarchy": {},
    "replicated optimizer": {"optimizer": "node"},
    "data parallel": {"weights": "rank", "gradients": "rank", "optimizer": "rank", "secondary": None},
}


def radius(plan: str = "hierarchy", **more: Any) -> dict[str, Any]:
    """A block with the mode, copies compared at every step."""
    return block("topo", **PLANS[plan], sync={"mode": "radius", "density": 0.25, "interval": INTERVAL, **more})


def mode_of(engine: Any) -> Radius:
    """The mode of sync."""
    mode = engine.optimizer.topo.gradients.mode
    assert isinstance(mode, Radius)
    return mode


def own_row(engine: Any) -> Tensor:
    """The masters of this rank's own row."""
    masters, flats = engine.optimizer.topo.masters, engine.optimizer.fp32_partitioned_groups_flat
    rows = [masters.table(flat)[masters.own_row] for flat in flats]
    return torch.cat([row.detach() for row in rows])


@pytest.mark.parametrize("plan", PLANS)
def test_a_quarter_of_the_gradient_trains(plan: str) -> None:
    """The loss falls."""
    losses = train(Job(zero_topo=radius(plan, start=2), steps=12))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("plan", PLANS)
def test_a_resumed_run_repeats_the_unbroken_one(plan: str, shared_path: Path) -> None:
    """Bit for bit, from the middle of an interval to the middle of the next."""
    saved = save(replace(job(radius(plan), "bf16"), steps=INTERVAL + 2), shared_path)
    with loaded(saved.job, shared_path) as engine:
        assert_same_bits(weights(engine), saved.weights)
        assert mode_of(engine).residual.any()
        assert go_on(saved.job, engine, SAVED_AT, saved.job.steps) == saved.losses


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("plan", [*PLANS, "offloaded"])
def test_the_mask_is_of_the_largest_updates(plan: str, dtype: str) -> None:
    """Of several sub-groups, wherever the masters lie: none off the mask moved more than one of its slice on it."""
    more = {"offload_optimizer": {"device": "cpu"}} if plan == "offloaded" else {}
    rows: dict[int, Tensor] = {}

    def before(engine: Any, step: int) -> None:
        rows[step] = own_row(engine).clone()

    def after(engine: Any, step: int) -> None:
        mode = mode_of(engine)
        assert mode.report()["resampled"] == (step % INTERVAL == 0)
        if step % INTERVAL:
            return
        mask, moved = mode.mask(mode._state)[mode.peers.index], (own_row(engine) - rows[step]).abs()
        first = 0
        for parameter in mode.context.parameters:
            begin, end = parameter.span
            if parameter.dims < 2:
                continue
            kept = mask[first : first + end - begin]
            assert int(kept.sum()) == max(1, int(0.25 * (end - begin)))
            assert moved[begin:end][kept].min() >= moved[begin:end][~kept].max()
            first += end - begin
        assert first == mask.numel()

    run = job(radius("hierarchy" if plan == "offloaded" else plan), dtype, **more)
    train(replace(run, steps=INTERVAL + 1, each_step=before, after_step=after))
