# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Quantized sync and delta publish under DeepSpeed: they train, skip and overlap as everything else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

from tests.launcher.checkpoints import SAVED_AT, assert_same_bits, job, loaded, save
from tests.launcher.training import Job, Net, advance, block, largest_difference, running, train, weights

Q8: dict[str, Any] = {"sync": {"mode": "quantized", "bits": 8}, "publish": {"delta": "int8"}}
Q4: dict[str, Any] = {"sync": {"mode": "quantized", "bits": 4}, "publish": {"delta": "int4"}}


@pytest.mark.parametrize(("micro_batches", "dtype"), [(1, "fp32"), (2, "bf16")])
def test_fewer_bits_between_nodes_train_as_dense_does(micro_batches: int, dtype: str) -> None:
    """INT8 both ways: the loss follows the unquantized scheme's closely, with all copies compared every step."""
    run = Job(dtype=dtype, micro_batches=micro_batches, steps=12)
    dense, fewer = train(run.under(block("topo"))), train(run.under(block("topo", **Q8)))
    assert 0 < largest_difference(dense, fewer) <= 0.02 * dense[0]
    assert fewer[-1] < 0.7 * fewer[0]


@pytest.mark.parametrize("more", [{}, Q4, {"scheme": "zero++", **Q4}], ids=["topo", "topo-q4", "zero++"])
def test_overlap_gives_the_same_bits(more: dict[str, Any]) -> None:
    """Sync under the last backward pass and publish under the next forward pass change no weight."""
    results = []
    for overlap in (True, False):
        settings = {"scheme": "topo", "quantize": {}, **more, "overlap": overlap}
        run = Job(zero_topo=block(**settings), dtype="bf16", steps=6, micro_batches=2)
        with running(run) as engine:
            results.append((advance(run, engine, 0, run.steps), weights(engine)))
    (losses, mine), (losses_without, theirs) = results
    assert losses == losses_without
    assert_same_bits(mine, theirs)


def test_copies_stay_alike_for_hundreds_of_steps() -> None:
    """Every replica of every weight shard is bit-identical after each of 200 steps (compared each step)."""
    losses = train(Job(zero_topo=block("topo", quantize={}, **Q4), dtype="bf16", steps=200, model=lambda: Net(19, 1)))
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])


def test_others_read_the_checkpoint(shared_path: Path, rank: int) -> None:
    """Stock ZeRO-3 loads it, another plan starts with fresh residuals, and zero_to_fp32 finds the exact masters."""
    saved = save(job(block("topo", **Q8), "bf16"), shared_path)
    for zero_topo in (None, block("hsdp"), block("topo")):
        with loaded(job(zero_topo, "bf16"), shared_path) as engine:
            losses = advance(saved.job, engine, SAVED_AT, saved.job.steps)
        assert largest_difference(losses, saved.losses) <= 0.02 * saved.losses[0]
    if rank == 0:
        masters = get_fp32_state_dict_from_zero_checkpoint(str(shared_path))
        for name, held in saved.weights.items():
            assert torch.allclose(masters[name].float(), held, rtol=1e-2, atol=1e-2), name


@pytest.mark.parametrize("more", [Q8, {"sync": {"mode": "oktopk", "tau": 4, "tau_prime": 4, "density": 0.1}}])
def test_an_overflow_changes_no_state(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """FP16: an Inf on one rank makes all skip, as if the step had never been; the residual knows no loss scale."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    seen: list[tuple[int, dict[str, Tensor]]] = []

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        scale = 1e6 if engine.global_steps == 4 and torch.distributed.get_rank() == 3 else 1.0
        return (engine(x).float() - y.float()).square().mean() * scale

    def record(engine: Any, step: int) -> None:
        state = engine.optimizer.topo.gradients.mode.state_dict()
        seen.append((engine.skipped_steps, {key: value.clone() for key, value in state.items()}))

    scaling = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}
    run = Job(
        zero_topo=block("topo", **more), steps=8, dtype="fp16", loss=loss, after_step=record, ds={"fp16": scaling}
    )
    train(run)
    skipped = [step for step in range(1, 8) if seen[step][0] > seen[step - 1][0]]
    assert skipped
    for step in range(1, 8):
        before, after = seen[step - 1][1], seen[step][1]
        assert all(torch.equal(before[key], after[key]) for key in before) == (step in skipped)
    assert max(float(state["residual"].abs().max()) for _, state in seen) < 1.0  # so small are gradients, not scales
