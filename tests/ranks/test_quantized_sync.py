# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Quantized sync: nothing is lost, only late, in whatever precision and however often a step
syncs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.ranks.test_sparse_modes import HIERARCHY
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
from zero_topo.cost import memory_bytes, step_bytes
from zero_topo.engine.stage3 import Stage3
from zero_topo.sync.quantized import Quantized
from zero_topo.topology.model import Topology

Q4 = {"mode": "quantized"}


def block(setting: str = "topo", **sync: Any) -> dict[str, Any]:
    """A block with quantized sync and nothing else quantized."""
    return {**HIERARCHY[setting], "quantize": PLAIN, "sync": {**Q4, **sync}}


def mode(engine: Stage3) -> Quantized:
    """The mode of an engine."""
    assert isinstance(engine.gradients.mode, Quantized)
    return engine.gradients.mode


def residual(engine: Stage3) -> Tensor:
    """The residual of the rank between steps, ``[other peers, F]``, a copy."""
    stored, own = mode(engine).state_dict()["residual"].float(), mode(engine).peers.index
    return (
        stored.clone()
        if mode(engine).residual is not None
        else torch.cat([stored[:own], stored[own + 1 :]])
    )


def train(
    w: World,
    rank: int,
    steps: int,
    each: Callable[[Stage3, int], None] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Stage3, Tensor]:
    """Sync `steps` times; the engine and the sum of what arrived in the rank's own row."""
    engine = w.engine(dtype)
    arrived = torch.zeros(engine.layout.columns)
    for step in range(steps):
        engine.gradients.scatter(PARAM_INDICES, w.grads(rank, step, dtype), last=True)
        if each is not None:
            each(engine, step)
        engine.gradients.sync()
        arrived += owned(engine).float()
        engine.end_step(skipped=False)
        engine.gradients.zero()  # as DeepSpeed does after each step
    return engine, arrived


def residuals(w: World, rank: int, engine: Stage3) -> list[tuple[int, Tensor]]:
    """The members that lack something of a rank, and its residual for each."""
    across = mode(engine).peers
    others = [
        member for member in w.config.plan.group(rank, across.lo, across.hi) if member != rank
    ]
    return list(zip(others, residual(engine), strict=True))


def summed_residuals(w: World, found: Sequence[list[tuple[int, Tensor]]]) -> list[Tensor]:
    """By rank: the residuals of all others for it."""
    summed = [torch.zeros(w.columns) for _ in range(w.size)]
    for member, part in (one for of in found for one in of):
        summed[member] += part
    return summed


PRECISIONS: dict[str, tuple[torch.dtype, dict[str, str], float]] = {
    "fp32": (torch.float32, {}, 1e-4),
    "bf16": (torch.bfloat16, {}, 0.15),
    "bf16, accumulated in fp32": (torch.bfloat16, {"accumulation_dtype": "fp32"}, 0.15),
    "fp16": (torch.float16, {}, 0.02),
    "fp16, accumulated in fp32": (torch.float16, {"accumulation_dtype": "fp32"}, 0.02),
}
"""Of the model and the gradient shard; and the part of the residual that roundings of gradients may
amount to.
"""


@pytest.mark.parametrize(
    ("precision", "how", "steps"),
    [
        ("fp32", "late", 3),
        ("fp32", "peek", 3),
        *((precision, "once", 6) for precision in PRECISIONS),
    ],
)
@pytest.mark.parametrize("setting", HIERARCHY)
@either_placement
def test_what_has_not_arrived_is_in_the_residual(
    setting: str, machine: Topology, precision: str, how: str, steps: int
) -> None:
    """Over any number of steps: the gradients' sum = what arrived + the residuals of all ranks.

    Up to the roundings of 16 bits, which are far less than the residual. Also where a step syncs
    twice: for a gradient that comes after its run was synced, or peeks before the step.
    """
    dtype, more, rounding = PRECISIONS[precision]
    w, late = world({**block(setting), **more}, machine), 0.5 * (how == "late")

    def before_sync(engine: Stage3, step: int) -> None:
        if late:
            engine.gradients.scatter((4,), [w.grads(engine.layout.rank, step)[4] * late], last=True)
        for _ in range(2 * (how == "peek")):
            engine.gradients.peek()

    def rank_main(rank: int) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        engine, arrived = train(w, rank, steps, before_sync, dtype)
        assert (mode(engine).residual is None) == (dtype in (torch.bfloat16, torch.float32))
        return arrived, residuals(w, rank, engine)

    results = run_threads(w.size, rank_main)
    summed = summed_residuals(w, [found for _, found in results])
    every = [w.grads(rank, step, dtype) for rank in range(w.size) for step in range(steps)]
    totals = [torch.stack(of).float().sum(0) / w.size for of in zip(*every, strict=True)]
    totals[4] *= 1 + late
    for rank, (arrived, _) in enumerate(results):
        assert summed[rank].abs().max() > 1e-3
        wanted = w.own_columns(rank, totals)
        assert (arrived + summed[rank] - wanted).norm() < rounding * summed[rank].norm()


@pytest.mark.parametrize("setting", HIERARCHY)
def test_overlap_changes_no_bit(setting: str) -> None:
    """Runs synced under the backward pass give what one sync at the step gives, residuals
    included.
    """

    def rank_main(rank: int, overlap: bool) -> Tensor:
        w = world({**block(setting), "overlap": overlap})
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

    assert_changes_nothing(world(block(setting)), rank_main)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_memory_and_bytes_are_the_formulas(dtype: torch.dtype) -> None:
    """A residual is counted where there is one, and the meter's sync bytes are the formula's."""
    w = world(block())

    def rank_main(rank: int) -> dict[str, int]:
        engine, _ = train(w, rank, 1, dtype=dtype)
        work = engine.workload(1)
        expected = {
            key: n for key, n in step_bytes(w.config, work).items() if key[0] in ("sync", "scatter")
        }
        assert {
            k: n for k, n in engine.meter.last_step.items() if k[0] in ("sync", "scatter")
        } == expected
        stored = memory_bytes(w.config, work, 2)
        assert engine.memory().get("residual", 0) == stored.get("residual", 0)
        assert engine.memory()["gradients"] == stored["gradients"]
        return stored

    stored = run_threads(w.size, rank_main)[0]
    assert ("residual" in stored) == (dtype == torch.float16)
