# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Sparse sync under DeepSpeed: it trains, resumes and skips as everything else does, over real messages."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from tests.launcher.checkpoints import SAVED_AT, assert_same_bits, job, loaded, save
from tests.launcher.training import Job, advance, block, largest_difference, train, weights
from zero_topo.sync.sparse import Sparse

MODES: dict[str, dict[str, Any]] = {
    "topk_a": {"mode": "topk_a"},
    "topk_dsa": {"mode": "topk_dsa"},
    "gtopk": {"mode": "gtopk"},
    "gaussian_k": {"mode": "gaussian_k"},
    "oktopk": {"mode": "oktopk", "tau": 4, "tau_prime": 4},
    "sharded": {"mode": "oktopk", "tau_prime": 4, "sharded": True},
}
PLANS: dict[str, dict[str, Any]] = {
    "hierarchy": {},
    "data parallel": {"weights": "rank", "gradients": "rank", "optimizer": "rank", "secondary": None},
}


def sparse(mode: str, plan: str = "hierarchy", density: float = 0.1) -> dict[str, Any]:
    """A block with a sparse mode, copies compared at every step."""
    return block("topo", **PLANS[plan], sync={**MODES[mode], "density": density})


@pytest.mark.parametrize(
    ("mode", "plan"), [(m, p) for m in MODES for p in PLANS if (m, p) != ("sharded", "data parallel")]
)
def test_a_tenth_of_the_gradient_trains(mode: str, plan: str) -> None:
    """The loss falls, and at density 1 it is that of dense sync."""
    expected = dense()
    assert train(Job(zero_topo=sparse(mode, plan), steps=20))[-1] < 0.6 * expected[0]
    exact = train(Job(zero_topo=sparse(mode, plan, 1.0), steps=len(expected)))
    assert largest_difference(expected, exact) <= 1e-5 * expected[0]


@cache
def dense() -> list[float]:
    """Losses with dense sync."""
    return train(Job(zero_topo=block("topo"), steps=6))


@pytest.mark.parametrize("mode", ["gtopk", "oktopk", "sharded"])
def test_a_resumed_run_repeats_the_unbroken_one(mode: str, shared_path: Path) -> None:
    """Bit for bit, from the middle of an interval."""
    saved = save(job(sparse(mode), "bf16"), shared_path)
    with loaded(saved.job, shared_path) as engine:
        assert_same_bits(weights(engine), saved.weights)
        assert owed(engine).any()
        assert advance(saved.job, engine, SAVED_AT, saved.job.steps) == saved.losses


def owed(engine: Any) -> Tensor:
    """What this rank has not delivered."""
    mode = engine.optimizer.topo.gradients.mode
    assert isinstance(mode, Sparse)
    return mode.residual


def test_an_overflow_changes_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP16: an Inf on one rank makes all skip, and residual and counters stay what they were."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    seen: list[tuple[int, dict[str, Tensor]]] = []

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        scale = 1e6 if engine.global_steps == 4 and torch.distributed.get_rank() == 3 else 1.0
        return (engine(x).float() - y.float()).square().mean() * scale

    def record(engine: Any, step: int) -> None:
        state = engine.optimizer.topo.gradients.mode.state_dict()
        seen.append((engine.skipped_steps, {key: value.clone() for key, value in state.items()}))

    scaling = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}
    train(Job(zero_topo=sparse("oktopk"), steps=8, dtype="fp16", loss=loss, after_step=record, ds={"fp16": scaling}))
    skipped = [step for step in range(1, 8) if seen[step][0] > seen[step - 1][0]]
    assert skipped
    for step in range(1, 8):
        before, after = seen[step - 1][1], seen[step][1]
        assert all(torch.equal(before[key], after[key]) for key in before) == (step in skipped)
