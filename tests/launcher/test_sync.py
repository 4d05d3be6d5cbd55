# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Sync of fewer bytes and delta publish under DeepSpeed: with its optimizers, masters, overflows
and checkpoints.

What each mode sends and keeps is proved by threads (`tests/ranks/test_sync_modes.py` and its
neighbours).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

import zero_topo
from tests.launcher.checkpoints import SAVED_AT, job, loaded, save
from tests.launcher.training import AGED, Job, advance, block, largest_difference, running

Q8: dict[str, Any] = {"sync": {"mode": "quantized", "bits": 8}}


@pytest.mark.parametrize("plan", [{}, {"optimizer": "node"}], ids=["sharded", "replicated"])
def test_sums_of_waiting_gradients_train_with_their_ages(plan: dict[str, Any]) -> None:
    """AgedAdamW: the loss falls, and ages are what the sums say."""
    thin = Job(
        zero_topo=block("topo", **plan, sync={"mode": "oktopk", "density": 0.1}), steps=20, ds=AGED
    )
    losses = []
    with running(thin) as engine:
        for step in range(thin.steps):
            before = ages(engine) if step else None
            losses += advance(thin, engine, step, step + 1)
            waited = ages(engine)
            assert before is None or torch.equal(waited[waited > 0], before[waited > 0] + 1)
        assert waited.max() > 3
        stats = zero_topo.stats(engine)
        rows = torch.distributed.get_world_size() // stats.config.plan.optimizer
    shard = rows * sum(
        -(-numel // torch.distributed.get_world_size()) for numel in stats.work.numels
    )
    assert stats.memory["optimizer"] == stats.optimizer_itemsize * shard
    assert losses[-1] < 0.6 * losses[0]


def ages(engine: Any) -> Tensor:
    """Of all elements of this rank's optimizer shard."""
    return torch.cat([state["age"] for state in engine.optimizer.optimizer.state.values()])


def test_others_read_the_checkpoint(shared_path: Path, rank: int) -> None:
    """Stock ZeRO-3 loads it, another plan starts with fresh residuals, and zero_to_fp32 finds the
    exact masters.
    """
    saved = save(job(block("topo", **Q8), "bf16"), shared_path)
    for other in (None, block("hsdp"), block("topo")):
        with loaded(job(other, "bf16"), shared_path) as engine:
            losses = advance(saved.job, engine, SAVED_AT, saved.job.steps)
        assert largest_difference(losses, saved.losses) <= 0.02 * saved.losses[0]
    if rank == 0:
        masters = get_fp32_state_dict_from_zero_checkpoint(str(shared_path))
        for name, stored in saved.weights.items():
            assert torch.allclose(masters[name].float(), stored, rtol=1e-2, atol=1e-2), name
