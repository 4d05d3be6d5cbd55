# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Quantized sync: its residual in every precision, from one step to the next, and under another
plan; what it shares with the other modes is tested with them.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.ranks.sync_cases import HIERARCHY, residuals_of, summed
from tests.ranks.worlds import (
    PARAM_INDICES,
    PLAIN,
    World,
    assert_changes_nothing,
    either_placement,
    owned,
    synced,
    world,
)
from zero_topo.engine.stage3 import Stage3
from zero_topo.topology.model import Topology


def block(place: str = "topo", **more: Any) -> dict[str, Any]:
    """A block with quantized sync and nothing else quantized."""
    return {**HIERARCHY[place], "quantize": PLAIN, "sync": {"mode": "quantized"}, **more}


def residual(engine: Stage3) -> Tensor:
    """The residual of the rank between steps, ``[other peers, F]``, a copy."""
    return torch.stack([row for _, row in residuals_of(engine)])


def train(w: World, rank: int, steps: int) -> tuple[Stage3, Tensor]:
    """Sync `steps` times; the engine and the sum of what arrived in the rank's own row."""
    engine = w.engine()
    arrived = torch.zeros(engine.layout.columns)
    for step in range(steps):
        synced(engine, w.grads(rank, step))
        arrived += owned(engine).float()
        engine.end_step(skipped=False)
        engine.gradients.zero()  # as DeepSpeed does after each step
    return engine, arrived


PRECISIONS: dict[str, tuple[torch.dtype, dict[str, str], float]] = {
    "bf16": (torch.bfloat16, {}, 0.15),
    "bf16, accumulated in fp32": (torch.bfloat16, {"accumulation_dtype": "fp32"}, 0.15),
    "fp16": (torch.float16, {}, 0.02),
    "fp16, accumulated in fp32": (torch.float16, {"accumulation_dtype": "fp32"}, 0.02),
}
"""Of the model and the gradient shard; and the part of the residual that roundings of gradients may
amount to.
"""


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("place", HIERARCHY)
@either_placement
def test_what_has_not_arrived_is_in_the_residual(
    place: str, machine: Topology, precision: str
) -> None:
    """The gradients' sum = what arrived + the residuals of all ranks, up to the roundings of 16
    bits, which are far less than the residual.
    """
    dtype, more, rounding = PRECISIONS[precision]
    w = replace(world(block(place, **more), machine), dtype=dtype)
    steps = 6

    def rank_main(rank: int) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        engine, arrived = train(w, rank, steps)
        return arrived, residuals_of(engine)

    results = run_threads(w.size, rank_main)
    every = [w.grads(rank, step) for rank in range(w.size) for step in range(steps)]
    totals = [torch.stack(of).float().sum(0) / w.size for of in zip(*every, strict=True)]
    missing = summed(w, [found for _, found in results])
    for rank, (arrived, _) in enumerate(results):
        assert missing[rank].abs().max() > 1e-3
        wanted = w.own_columns(rank, totals)
        assert (arrived + missing[rank] - wanted).norm() < rounding * missing[rank].norm()


@pytest.mark.parametrize("place", HIERARCHY)
def test_overlap_changes_no_bit(place: str) -> None:
    """Runs synced under the backward pass give what one sync at the step gives, residuals
    included.
    """

    def rank_main(rank: int, overlap: bool) -> Tensor:
        w = world(block(place, overlap=overlap))
        engine = w.engine(chunk=600)
        for step in range(3):
            grads = w.grads(rank, step)
            for param_indices in [(4,), (3, 2), (1, 0)]:
                engine.gradients.scatter(
                    param_indices, [grads[i] for i in param_indices], last=True
                )
            engine.gradients.sync()
            rows = engine.gradients.optimizer_rows().clone()
            engine.end_step(skipped=False)
        return torch.cat([rows, residual(engine)])

    assert_changes_nothing(world(block(place)), rank_main)


def test_no_block_holds_values_of_two_parameters() -> None:
    """A norm's gradients next to a matrix's a thousand times larger keep their own scale."""
    w = world(block(), numels=(8 * 100, 8 * 100))

    def rank_main(rank: int) -> float:
        engine = w.engine()
        small, large = w.grads(rank, 0)
        synced(engine, [small * 1e-3, large * 1e3])
        wanted = 1e-3 * w.own_mean(rank, 0)[:100]
        return float((owned(engine)[:100] - wanted).abs().max() / wanted.abs().max())

    assert max(run_threads(w.size, rank_main)) < 0.1


def test_dropped_gradients_drop_their_residual(caplog: pytest.LogCaptureFixture) -> None:
    """A step skipped for a NaN leaves none of it behind; zero_grad before a step too. One rank
    warns, once.
    """
    w = world(block())

    def rank_main(rank: int) -> list[bool]:
        engine, _ = train(w, rank, 2)
        had = bool(residual(engine).any())
        synced(engine, [g * (torch.nan if rank == 3 else 1.0) for g in w.grads(rank, 7)])
        engine.end_step(skipped=True)
        clean = [not engine.gradients.buffer.any()]
        for _ in range(2):
            engine.gradients.scatter(PARAM_INDICES, w.grads(rank, 3), last=True)
            engine.gradients.zero()
            clean.append(not engine.gradients.buffer.any())
        synced(engine, w.grads(rank, 3))
        return [had, *clean, bool(torch.isfinite(owned(engine)).all())]

    assert run_threads(w.size, rank_main) == [[True] * 5] * 8
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


def test_zero_grad_after_the_step_keeps_the_residual(caplog: pytest.LogCaptureFixture) -> None:
    """Also after the rank's own row was read and written; no line is logged."""
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


def test_a_save_between_backward_and_step_leaves_out_the_residual(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Gradients were added to it, and one rank warns. FP16 has it apart."""
    w = world(block())

    def rank_main(rank: int, dtype: torch.dtype) -> dict[str, Any]:
        of = replace(w, dtype=dtype)
        engine, _ = train(of, rank, 2)
        engine.gradients.scatter(PARAM_INDICES, of.grads(rank, 5), last=False)
        return engine.state_dict()

    assert not any(run_threads(w.size, rank_main, torch.float32))
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    for saved in run_threads(w.size, rank_main, torch.float16):
        assert saved["zero_topo"]["sync"]["residual"].any()


OTHER_PLANS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "another secondary": ({"secondary": None}, torch.float32),
    "another optimizer": ({"optimizer": "node"}, torch.float32),
    "a loss scaler": ({}, torch.float16),
    "gradients over a GPU": ({"weights": 1, "secondary": None, "gradients": "gpu"}, torch.float32),
    "gradients over the world": ({"gradients": "world"}, torch.float32),
}
"""A plan to go on with."""


@pytest.mark.parametrize("other", OTHER_PLANS)
def test_a_residual_stays_with_its_plan(other: str, caplog: pytest.LogCaptureFixture) -> None:
    """Under another one it is dropped on all ranks, and one rank warns."""
    more, dtype = OTHER_PLANS[other]
    w, to = world(block()), replace(world(block(**more)), dtype=dtype)

    def rank_main(rank: int) -> bool:
        engine, _ = train(w, rank, 2)
        assert any(row.any() for _, row in residuals_of(engine))
        fresh = to.engine()
        fresh.load_state_dict(engine.state_dict())
        return any(row.any() for _, row in residuals_of(fresh))

    assert not any(run_threads(w.size, rank_main))
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


@pytest.mark.parametrize("damaged", [{"residual": torch.zeros(2, 3)}, {"residual": None}, {}])
def test_one_damaged_residual_starts_all_ranks_afresh(
    damaged: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that went on with theirs would send what another does not expect; one rank warns, and
    names the rank.
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
    assert "rank 5" in said
