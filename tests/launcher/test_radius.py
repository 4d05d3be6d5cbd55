# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Radius under DeepSpeed takes its mask from the optimizer's own update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launcher.checkpoints import job
from tests.launcher.training import block, train
from zero_topo.sync.radius import Radius

INTERVAL = 4
SYNC = {"mode": "radius", "density": 0.25, "interval": INTERVAL}


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


@pytest.mark.parametrize("where", ["replicated", "offloaded"])
def test_the_mask_is_of_the_largest_updates(where: str) -> None:
    """Of several sub-groups, wherever the masters lie: none off the mask moved more than one of its slice on it."""
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

    if where == "offloaded":
        run = job(block("topo", sync=SYNC), "bf16", offload_optimizer={"device": "cpu"})
    else:
        run = job(block("topo", optimizer="node", sync=SYNC))
    train(replace(run, steps=INTERVAL + 1, each_step=before, after_step=after))
