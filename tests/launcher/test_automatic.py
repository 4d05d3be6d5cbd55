# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`"scheme": "auto"`: every rank chooses the same plan for the model it has, says why, and trains as ZeRO-3 does."""

from __future__ import annotations

import pytest

import zero_topo
from tests.launcher.training import Job, advance, block, largest_difference, running, train
from zero_topo.engine import hook

STEPS = 5


@pytest.mark.parametrize("zero_init", [False, True])
def test_auto_chooses_explains_and_trains_as_zero3(rank: int, zero_init: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unquantized: within 1e-5 of stock ZeRO-3, also where the model is partitioned before there is an engine."""
    lines: list[str] = []
    monkeypatch.setattr(hook, "log_dist", lambda line, ranks: lines.append(line))
    job = Job(zero_topo=block("auto", sync={"mode": "dense"}, publish={}), steps=STEPS, zero_init=zero_init)
    with running(job) as engine:
        found = zero_topo.stats(engine)
        losses = advance(job, engine, 0, STEPS)
        numel = sum(parameter.ds_numel for parameter in engine.module.parameters())
    said = [line.removeprefix("zero_topo: scheme auto: ") for line in lines if "scheme auto: " in line]
    assert said[0].startswith(f"{numel:,} parameters, counted as a transformer of ")
    wins = next(line for line in said if " wins with " in line)
    assert "int4" not in wins and "bits" not in wins  # what the block says stays
    assert (found.config.sync.MODE, found.config.publish.delta, found.config.weights_spec) == ("dense", None, None)
    assert largest_difference(losses, train(job.under(None))) <= 1e-5
