# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Quantized sync: its residual between steps, in checkpoints, and under another plan; what it
shares with the other modes is in ``test_sync_modes.py``.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks.sync_cases import residuals_of
from tests.ranks.worlds import (
    PARAM_INDICES,
    PLAIN,
    World,
    owned,
    synced,
    world,
)
from zero_topo.engine.stage3 import Stage3


def block(**more: Any) -> dict[str, Any]:
    """A block with quantized sync and nothing else quantized."""
    return {"scheme": "topo", "quantize": PLAIN, "sync": {"mode": "quantized"}, **more}


def residual(engine: Stage3) -> Tensor:
    """The residual of the rank between steps, ``[other peers, F]``, a copy."""
    return torch.stack([row for _, row in residuals_of(engine)])


def train(w: World, rank: int) -> Stage3:
    """Sync two steps."""
    engine = w.engine()
    for step in range(2):
        synced(engine, w.grads(rank, step))
        engine.end_step(skipped=False)
        engine.gradients.zero()  # as DeepSpeed does after each step
    return engine


def test_no_block_holds_values_of_two_parameters() -> None:
    """A norm's gradients next to a matrix's a thousand times larger keep their own scale."""
    w = world(block(), numels=(8 * 100, 8 * 100))

    def rank_main(rank: int) -> float:
        engine = w.engine()
        small, large = w.grads(rank, 0)
        synced(engine, [small * 1e-3, large * 1e3])
        wanted = 1e-3 * w.own_mean(rank, 0)[:100]
        return float((owned(engine)[:100] - wanted).abs().max() / wanted.abs().max())

    assert max(w.on_ranks(rank_main)) < 0.1


def test_a_step_skipped_for_a_nan_drops_the_residual() -> None:
    """Gradients were added to it: none of the NaN stays behind."""
    w = world(block())

    def rank_main(rank: int) -> bool:
        engine = train(w, rank)
        factor = torch.nan if rank == 3 else 1.0
        synced(engine, [grad * factor for grad in w.grads(rank, 7)])
        engine.end_step(skipped=True)
        dropped = not engine.gradients.buffer.any()
        synced(engine, w.grads(rank, 3))
        return dropped and bool(owned(engine).isfinite().all())

    assert all(w.on_ranks(rank_main))


def test_zero_grad_drops_the_residual_with_gradients_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before a step it drops the gradients with what they were added to, and one rank warns, once.
    After a step the residual stays, also if the rank's own row was read and written.
    """
    w = world(block())

    def after(rank: int) -> bool:
        engine = train(w, rank)
        before = residual(engine)
        engine.gradients.zero()
        engine.gradients.peek().fill_(1)
        engine.gradients.zero()
        kept = torch.equal(residual(engine), before) and bool(before.any())
        return kept and not owned(engine).any()

    def before(rank: int) -> bool:
        engine = train(w, rank)
        for _ in range(2):
            engine.gradients.scatter(PARAM_INDICES, w.grads(rank, 3), last=True)
            engine.gradients.zero()
        return not engine.gradients.buffer.any()

    assert all(w.on_ranks(after)) and not caplog.records
    assert all(w.on_ranks(before))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_save_between_backward_and_step_leaves_out_the_residual(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Gradients were added to it, and one rank warns. FP16 has it apart."""
    w = world(block())

    def rank_main(rank: int, dtype: torch.dtype) -> dict[str, Any]:
        of = replace(w, dtype=dtype)
        engine = train(of, rank)
        engine.gradients.scatter(PARAM_INDICES, of.grads(rank, 5), last=False)
        return engine.state_dict()

    assert not any(w.on_ranks(rank_main, torch.float32))
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    for saved in w.on_ranks(rank_main, torch.float16):
        assert saved["zero_topo"]["sync"]["residual"].any()


OTHERS: dict[str, tuple[dict[str, Any], torch.dtype, dict[str, Any] | None]] = {
    "another secondary": ({"secondary": None}, torch.float32, None),
    "another optimizer": ({"optimizer": "node"}, torch.float32, None),
    "a loss scaler": ({}, torch.float16, None),
    "gradients over the world": ({"gradients": "world"}, torch.float32, None),
    "one of another shape": ({}, torch.float32, {"residual": torch.zeros(2, 3)}),
    "one that is None": ({}, torch.float32, {"residual": None}),
    "one that is missing": ({}, torch.float32, {}),
}
"""Changes of the plan and the type; what rank 5 loads in place of its residual."""


@pytest.mark.parametrize("other", OTHERS)
def test_a_residual_that_does_not_fit_is_dropped_on_all_ranks(
    other: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that went on with theirs would send what another does not expect; one rank warns, and
    names the rank that has none.
    """
    more, dtype, damaged = OTHERS[other]
    w = world(block())
    to = replace(world(block(**more)), dtype=dtype)

    def rank_main(rank: int) -> bool:
        engine = train(w, rank)
        assert residual(engine).any()
        saved = copy.deepcopy(engine.state_dict())
        if rank == 5 and damaged is not None:
            saved["zero_topo"]["sync"] = damaged
            saved["zero_topo"]["degrees"] = damaged and saved["zero_topo"]["degrees"]
        fresh = train(to, rank)
        fresh.load_state_dict(saved)
        return any(row.any() for _, row in residuals_of(fresh))

    assert not any(w.on_ranks(rank_main))
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert damaged is None or "rank 5" in said
