# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The residual of quantized sync from one step to the next: skips, loss scales, zero_grad,
checkpoints, other plans.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.ranks.test_quantized_sync import block, residual, residuals, summed_residuals, train
from tests.ranks.test_sparse_modes import HIERARCHY
from tests.ranks.worlds import PARAM_INDICES, assert_changes_nothing, owned, synced, world

SCALED = {"accumulation_dtype": "fp32"}
"""FP16 models with an exact gradient shard."""


def test_a_skipped_step_leaves_the_residual_as_it_was() -> None:
    """FP16: an overflow throws a step away, its residual too; NaN reaches the optimizer's row so
    that it is noticed.
    """
    w = world({**block(), **SCALED})

    def rank_main(rank: int) -> tuple[bool, bool]:
        engine, _ = train(w, rank, 2, dtype=torch.float16)
        before = residual(engine)
        grads = [g * (torch.nan if rank == 3 else 1.0) for g in w.grads(rank, 7, torch.float16)]
        synced(engine, grads)
        seen = bool(owned(engine).isnan().any())
        engine.end_step(skipped=True)
        return torch.equal(residual(engine), before) and bool(before.any()), seen

    assert run_threads(w.size, rank_main) == [(True, True)] * 8


@pytest.mark.parametrize("setting", HIERARCHY)
def test_dropped_gradients_drop_their_residual_and_one_line_says_so(
    setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A step skipped for a NaN leaves none of it behind; zero_grad before a step too; the line
    comes once.
    """
    w = world(block(setting))

    def rank_main(rank: int) -> list[bool]:
        engine, _ = train(w, rank, 2)
        owing = bool(residual(engine).any())
        synced(engine, [g * (torch.nan if rank == 3 else 1.0) for g in w.grads(rank, 7)])
        engine.end_step(skipped=True)
        clean = [not engine.gradients.buffer.any()]
        for _ in range(2):
            engine.gradients.scatter(PARAM_INDICES, w.grads(rank, 3), last=True)
            engine.gradients.zero()
            clean.append(not engine.gradients.buffer.any())
        synced(engine, w.grads(rank, 3))
        return [owing, *clean, bool(torch.isfinite(owned(engine)).all())]

    assert run_threads(w.size, rank_main) == [[True] * 5] * 8
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert said.startswith(
        "zero_topo: gradients were dropped (a skipped step, or zero_grad before the step)"
    )


def test_zero_grad_after_the_step_keeps_the_residual(caplog: pytest.LogCaptureFixture) -> None:
    """Also after somebody has looked at the rank's own row, and written to it; nothing is said."""
    w = world(block())

    def rank_main(rank: int) -> bool:
        engine, _ = train(w, rank, 2)
        before = residual(engine)
        engine.gradients.zero()
        engine.gradients.peek().fill_(1)
        engine.gradients.zero()
        return (
            torch.equal(residual(engine), before) and bool(before.any()) and not owned(engine).any()
        )

    assert all(run_threads(w.size, rank_main)) and not caplog.records


def test_residuals_are_kept_without_the_loss_scale() -> None:
    """FP16: a loss scale that changes between steps (a power of two) does not change the
    residual.
    """
    w = world({**block(), **SCALED})

    def rank_main(rank: int, scaled: bool) -> Tensor:
        scale = 1.0
        engine = w.engine(torch.float16, loss_scale=lambda: scale)
        for step in range(3):
            scale = (16.0, 64.0, 4.0)[step] if scaled else 1.0
            # Few bits: exact when scaled
            synced(engine, [g * scale for g in w.grads(rank, step, torch.bfloat16)])
            row = owned(engine) / scale
            engine.end_step(skipped=False)
        return torch.cat([row[None], residual(engine)])

    assert_changes_nothing(w, rank_main)


def test_a_save_between_backward_and_step_leaves_out_the_residual(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Gradients were added to it; one line says so. FP16 has it apart."""
    w = world(block())

    def rank_main(rank: int, dtype: torch.dtype) -> dict[str, Any]:
        engine, _ = train(w, rank, 2, dtype=dtype)
        engine.gradients.scatter(PARAM_INDICES, w.grads(rank, 5, dtype), last=False)
        return engine.state_dict()

    assert not any(run_threads(w.size, rank_main, torch.float32))
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert said.endswith("save after a step to keep it")
    assert all(
        saved["zero_topo"]["sync"]["residual"].any()
        for saved in run_threads(w.size, rank_main, torch.float16)
    )


OTHER_PLANS: dict[str, tuple[str, dict[str, Any], torch.dtype, int]] = {
    "another secondary": ("topo", {"secondary": None}, torch.float32, 0),
    "another optimizer": ("topo", {"optimizer": "node"}, torch.float32, 0),
    "a loss scaler": ("topo", {}, torch.float16, 0),
    "gradients over a GPU": (
        "topo",
        {"weights": 1, "secondary": None, "gradients": "gpu"},
        torch.float32,
        0,
    ),
    "gradients over the world": ("topo", {"gradients": "world"}, torch.float32, 1),
}
"""A plan to go on with; and rows of a rank's residual that have no place there."""


@pytest.mark.parametrize("other", OTHER_PLANS)
def test_another_plan_takes_over_what_fits(other: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever is a peer in both gets its residual; what cannot be taken along is said, not dropped
    silently.
    """
    setting, more, dtype, lost = OTHER_PLANS[other]
    w, to = world(block(setting)), world({**block(setting), **more})

    def rank_main(rank: int) -> tuple[list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
        engine, _ = train(w, rank, 2)
        saved = copy.deepcopy(engine.state_dict())
        fresh = to.engine(dtype)
        fresh.load_state_dict(saved)
        return residuals(w, rank, engine), [] if lost else residuals(to, rank, fresh)

    results = run_threads(w.size, rank_main)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if lost:
        (line,) = said
        assert "gradients over 4 and optimizer over 8 ranks, this run has gradients over 8" in line
        assert (
            "1 rows of a rank's residual of sync are dropped" in line and "zero-topo carry" in line
        )
        return
    assert not said
    before, after = (summed_residuals(w, [of[i] for of in results]) for i in range(2))
    assert all(torch.equal(a, b) and bool(a.any()) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("damaged", [{"residual": torch.zeros(2, 3)}, {"residual": None}, {}])
def test_one_damaged_residual_starts_all_ranks_afresh(
    damaged: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that went on with theirs would send what another does not expect; one line says so,
    with the rank.
    """
    w = world(block())

    def rank_main(rank: int) -> bool:
        engine, _ = train(w, rank, 2)
        saved = copy.deepcopy(engine.state_dict())
        if rank == 5:
            saved["zero_topo"]["sync"] = damaged
            saved["zero_topo"]["degrees"] = damaged and saved["zero_topo"]["degrees"]
        fresh, _ = train(w, rank, 1)
        fresh.load_state_dict(saved)
        return bool(residual(fresh).any())

    assert not any(run_threads(w.size, rank_main))
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert said.startswith(
        "zero_topo: sync starts without the checkpoint's state on all ranks: ranks do not agree "
        "with "
    )
    assert "rank 5 of host" in said and said.endswith("look at their files of this checkpoint")
