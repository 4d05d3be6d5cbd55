# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Sync of fewer bytes and delta publish under DeepSpeed: with its optimizers, masters, overflows and checkpoints.

What each mode sends and keeps is proved by threads (`tests/ranks/test_sparse_modes.py` and its neighbours).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

import zero_topo
from tests.launcher.checkpoints import SAVED_AT, job, loaded, save
from tests.launcher.training import (
    AGED,
    Job,
    advance,
    block,
    largest_difference,
    running,
    start,
    train,
)
from tests.marks import late
from zero_topo.sync.radius import Radius

NODE: dict[str, Any] = {"optimizer": "node"}
Q8: dict[str, Any] = {"sync": {"mode": "quantized", "bits": 8}, "publish": {"delta": "int8"}}
INTERVAL = 4
RADIUS = {"mode": "radius", "density": 0.25, "interval": INTERVAL}


@pytest.mark.parametrize("plan", [late({}), NODE], ids=["sharded", "replicated"])
def test_sums_of_waiting_gradients_train_with_their_ages(plan: dict[str, Any]) -> None:
    """AgedAdamW: the loss falls, and ages are what the sums say."""
    thin = Job(zero_topo=block("topo", **plan, sync={"mode": "topk_a", "density": 0.1}), steps=20, ds=AGED)
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
    shard = rows * sum(-(-numel // torch.distributed.get_world_size()) for numel in stats.work.numels)
    assert stats.memory["optimizer"] == stats.optimizer_itemsize * shard
    assert losses[-1] < 0.6 * losses[0]


def ages(engine: Any) -> Tensor:
    """Of all elements of this rank's optimizer shard."""
    return torch.cat([state["age"] for state in engine.optimizer.optimizer.state.values()])


def own_row(engine: Any) -> Tensor:
    """The masters of this rank's own row."""
    masters, flats = engine.optimizer.topo.masters, engine.optimizer.fp32_partitioned_groups_flat
    return torch.cat([masters.table(flat)[masters.own_row].detach() for flat in flats])


@pytest.mark.parametrize("where", [late("replicated"), "offloaded"])
def test_the_mask_is_of_the_largest_updates(where: str) -> None:
    """Of several sub-groups, wherever the masters lie: none off the mask moved more than one of its slice on it."""
    rows: dict[int, Tensor] = {}

    def before(engine: Any, step: int) -> None:
        rows[step] = own_row(engine).clone()

    def after(engine: Any, step: int) -> None:
        mode = engine.optimizer.topo.gradients.mode
        assert isinstance(mode, Radius)
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
        run = job(block("topo", sync=RADIUS), "bf16", offload_optimizer={"device": "cpu"})
    else:
        run = job(block("topo", optimizer="node", sync=RADIUS))
    train(replace(run, steps=INTERVAL + 1, each_step=before, after_step=after))


def test_another_optimizer_is_refused_by_the_config() -> None:
    """On every rank, before an engine exists."""
    with pytest.raises(ValueError, match=r'optimizer\.type = "AdamW": sync\.mode = "scape" works with AdamS alone'):
        start(Job(zero_topo=block("topo", optimizer="node", sync={"mode": "scape"})))


def test_others_read_the_checkpoint(shared_path: Path, rank: int) -> None:
    """Stock ZeRO-3 loads it, another plan starts with fresh residuals, and zero_to_fp32 finds the exact masters."""
    saved = save(job(block("topo", **Q8), "bf16"), shared_path)
    for other in (None, block("hsdp"), block("topo")):
        with loaded(job(other, "bf16"), shared_path) as engine:
            losses = advance(saved.job, engine, SAVED_AT, saved.job.steps)
        assert largest_difference(losses, saved.losses) <= 0.02 * saved.losses[0]
    if rank == 0:
        masters = get_fp32_state_dict_from_zero_checkpoint(str(shared_path))
        for name, held in saved.weights.items():
            assert torch.allclose(masters[name].float(), held, rtol=1e-2, atol=1e-2), name


@pytest.mark.parametrize("more", [late(Q8), {"sync": {"mode": "oktopk", "tau": 4, "tau_prime": 4, "density": 0.1}}])
def test_an_overflow_changes_no_state(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """FP16: an Inf on one rank makes all skip, as if the step had never been; the residual knows no loss scale."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    seen: list[tuple[int, dict[str, Tensor]]] = []
    aged = more["sync"]["mode"] == "oktopk"

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        scale = 1e6 if engine.global_steps == 4 and torch.distributed.get_rank() == 3 else 1.0
        return (engine(x).float() - y.float()).square().mean() * scale

    def record(engine: Any, step: int) -> None:
        state = engine.optimizer.topo.gradients.mode.state_dict()
        state |= {"ages": ages(engine)} if aged else {}
        seen.append((engine.skipped_steps, {key: value.clone() for key, value in state.items()}))

    scaling = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}
    ds = {"fp16": scaling, **(AGED if aged else {})}
    run = Job(zero_topo=block("topo", **more), steps=8, dtype="fp16", loss=loss, after_step=record, ds=ds)
    train(run)
    skipped = [step for step in range(1, 8) if seen[step][0] > seen[step - 1][0]]
    assert skipped
    for step in range(1, 8):
        before, after = seen[step - 1][1], seen[step][1]
        assert all(torch.equal(before[key], after[key]) for key in before) == (step in skipped)
    assert max(float(state["residual"].abs().max()) for _, state in seen) < 1.0  # so small are gradients, not scales
