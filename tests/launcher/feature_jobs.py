# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What models and callers do: odd parameters, recomputation, edits, groups, offload. As under stock ZeRO-3, in FP32.

Where stock ZeRO-3 itself is wrong the yardstick is plain torch, and the test says so.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from tests.launcher.models import (
    SMALL,
    Branching,
    Checkpointed,
    Tied,
    Tiny,
    TwiceUsed,
    adapted,
    partly_frozen,
    tied_and_adapted,
)
from tests.launcher.parity import Case, Result, assert_equal, assert_parity, in_plain_torch, run, stock
from tests.launcher.training import Job, block, largest_difference, mse, train

STEPS = 6
CAPTURED = ("topo", "zero++")
"""zero++ keeps in the secondary what forward gathers brought: also where forward and backward gathers do not pair."""
MASTERS = ("topo", "hsdp")
"""hsdp has masters of its own."""
ALL = ("topo", "hsdp", "zero++")


def zero(**keys: Any) -> dict[str, Any]:
    """A DeepSpeed config's ``zero_optimization``."""
    return {"zero_optimization": keys}


@cache
def twice_used_in_torch() -> Result:
    return in_plain_torch(Job(model=partial(TwiceUsed, False), steps=STEPS), lambda model, x, step, micro: model(x))


@pytest.mark.parametrize(
    ("reentrant", "bucket", "scheme"),
    [(True, 60, "topo"), (True, 60, "zero++"), (True, 2000, "topo"), (True, 2000, "hsdp"), (False, 2000, "zero++")],
)
def test_parameter_used_inside_and_outside_a_checkpointed_region(reentrant: bool, bucket: int, scheme: str) -> None:
    """A reentrant backward pass delivers such a gradient in two parts, which must be added.

    Stock ZeRO-3 fails here: it keeps the last part only if the bucket went out in between, and raises AssertionError
    if not. Compared with plain torch.
    """
    ds = {"zero_optimization": {"reduce_bucket_size": bucket}}
    mine = run(Job(model=partial(TwiceUsed, reentrant), steps=STEPS, ds=ds, zero_topo=block(scheme)))
    assert_equal(mine, twice_used_in_torch())


def branch(step: int, micro: int) -> str:
    return ("left right", "left", "right")[(step + micro) % 3]


def branching(micro_batches: int) -> Job:
    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        output = engine(x, branch(*divmod(engine.micro_steps, micro_batches)))
        return torch.nn.functional.mse_loss(output, y)

    return Job(model=Branching, steps=STEPS, micro_batches=micro_batches, loss=loss)


@cache
def branching_in_torch(micro_batches: int) -> Result:
    return in_plain_torch(branching(micro_batches), lambda model, x, step, micro: model(x, branch(step, micro)))


@pytest.mark.parametrize(("scheme", "micro_batches"), [("topo", 1), ("hsdp", 2), ("topo", 2)])
def test_parameter_unused_in_some_steps(micro_batches: int, scheme: str) -> None:
    """Its gradient is zero in those steps.

    Stock ZeRO-3 is wrong here: its gradient buffer is overwritten, never zeroed, so a parameter without a gradient in
    the (first micro-batch of the) step takes the last step's once more. Compared with plain torch, one process that
    sees every rank's data and gives such a parameter a zero gradient.
    """
    assert_equal(run(branching(micro_batches).under(block(scheme))), branching_in_torch(micro_batches))


def edit(engine: Any, step: int) -> None:
    """Before step 3 rank 0 doubles a weight, an odd-sized bias and the first layer; the others' edits are ignored."""
    if step != 3:
        return
    model = engine.module
    edited = [model.blocks[0][1].weight, model.out.bias, *model.inp.parameters()]
    with deepspeed.zero.GatheredParameters(edited, modifier_rank=0):
        for param in edited:
            param.data.mul_(2.0 if dist.get_rank() == 0 else -5.0)


def edited(dtype: str = "fp32") -> Job:
    return Job(model=SMALL, steps=STEPS, each_step=edit, dtype=dtype)


def sharded_from_the_start() -> Job:
    return Job(model=SMALL, steps=STEPS, zero_init=True)


def edited_before_backward() -> Job:
    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        value = mse(engine, x, y)
        edit(engine, engine.global_steps)
        return value

    # a parameter fetched ahead for the backward pass cannot be gathered by the user, in stock neither
    return Job(model=SMALL, steps=5, loss=loss, ds=zero(stage3_prefetch_bucket_size=0))


def discarding() -> Job:
    """In odd steps the first of two micro-batches is thrown away; in even ones only the parameters' `.grad` are."""

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        if engine.micro_steps % 2:
            engine.zero_grad()
            if engine.global_steps % 2:
                engine.optimizer.zero_grad()
        return mse(engine, x, y)

    return Job(model=SMALL, steps=STEPS, micro_batches=2, loss=loss)


def matrices_and_vectors(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "lr": 1e-2, "weight_decay": 0.3},
        {"params": [p for p in params if p.dim() <= 1], "lr": 3e-3, "weight_decay": 0.0},
    ]


def grouped(**ds: Any) -> Job:
    return Job(model=SMALL, steps=STEPS, groups=matrices_and_vectors, ds=ds)


def evaluate(engine: Any, step: int) -> None:
    """A forward pass between steps."""
    engine.eval()
    with torch.no_grad():
        engine(torch.full((4, 11), step / 10))
    engine.train()


FAR_AHEAD = {"stage3_prefetch_bucket_size": 10**6, "stage3_max_reuse_distance": 10**9}
WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": [1e-2, 2e-3], "warmup_num_steps": 4, "warmup_type": "linear"}
LIKE_STOCK: dict[str, tuple[Case, tuple[str, ...]]] = {
    # embedding and head share one parameter: gathered for either, one gradient
    "tied": (lambda: Job(model=Tied, steps=STEPS), CAPTURED),
    # a whole module, a bias only, a weight only: they stay as they are and the others learn
    "frozen": (lambda: Job(model=partly_frozen, steps=STEPS), ALL),
    # all but adapters; an embedding that is the head too
    "adapters": (lambda: Job(model=adapted, steps=STEPS, micro_batches=2, each_step=evaluate), ALL),
    "tied and frozen": (lambda: Job(model=tied_and_adapted, steps=STEPS, each_step=evaluate), CAPTURED),
    # 1, 3, 5, 7 and 9 elements: ranks that hold only padding take part in everything
    "tiny": (lambda: Job(model=Tiny, steps=STEPS), ALL),
    # the backward pass is many small ones; recomputation gathers from the copy that backward reads
    "recomputed": (lambda: Job(model=partial(Checkpointed, True), steps=STEPS), CAPTURED),
    "recomputed without reentry": (lambda: Job(model=partial(Checkpointed, False), steps=STEPS), CAPTURED),
    # parameters partitioned as they are built are adopted as they are
    "sharded from the start": (sharded_from_the_start, MASTERS),
    # an edit reaches every copy of the weights; the step after it returns to the masters' values
    "edited": (edited, ALL),
    # backward reads the edited weights, not copies of what forward read
    "edited before backward": (edited_before_backward, ALL),
    # each group keeps its own weight decay, and the learning rate that the scheduler gives it
    "grouped and scheduled": (lambda: grouped(scheduler={"type": "WarmupLR", "params": WARMUP}), MASTERS),
    # the optimizer steps through slices of the shard, one after the other; and with everything on one stream
    "in sub-groups": (lambda: grouped(**zero(sub_group_size=20, overlap_comm=False)), MASTERS),
    # below the persistence threshold: never partitioned, whole and new after each step
    "resident": (lambda: Job(model=SMALL, steps=STEPS, ds=zero(stage3_param_persistence_threshold=10**6)), ALL),
    # large prefetch buckets and reuse distances, as by default: a kept parameter is not a stale one
    "far ahead": (
        lambda: Job(
            model=SMALL,
            steps=STEPS,
            micro_batches=2,
            ds=zero(stage3_param_persistence_threshold=20, stage3_max_live_parameters=10**9, **FAR_AHEAD),
        ),
        CAPTURED,
    ),
    # `zero_grad` of the optimizer forgets what was accumulated, that of the engine does not
    "discarded": (discarding, MASTERS),
    # masters and states on the host, the gradient shard on the accelerator
    "offloaded": (
        lambda: Job(
            model=SMALL,
            steps=STEPS,
            micro_batches=2,
            ds={
                **zero(offload_optimizer={"device": "cpu"}, sub_group_size=20),
                "zero_force_ds_cpu_optimizer": False,
            },
        ),
        MASTERS,
    ),
}


@pytest.mark.parametrize(("case", "scheme"), [(case, s) for case, (_, schemes) in LIKE_STOCK.items() for s in schemes])
def test_it_trains_as_under_stock_zero3(case: str, scheme: str) -> None:
    """Losses and weights, whatever the model or the caller does."""
    assert_parity(LIKE_STOCK[case][0], scheme)


def test_an_edit_changes_the_run() -> None:
    """Else its parity would say nothing."""
    assert largest_difference(stock(edited).losses, stock(sharded_from_the_start).losses) > 0.01


def edited_with_masters() -> Job:
    return edited()


@pytest.mark.parametrize("scheme", ALL)
def test_edit_of_gathered_parameters_that_are_the_masters(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of such weights stays, as in stock; where ours are separate (several rows per rank), they follow.

    DeepSpeed makes an FP32 model's weights its masters where their device equals the accelerator's, mostly a string.
    """
    with monkeypatch.context() as patch:
        patch.setattr(get_accelerator(), "current_device_name", lambda: torch.device("cpu"))
        assert_parity(edited_with_masters, scheme)
    assert largest_difference(stock(edited_with_masters).losses, stock(edited).losses) > 0.01


@cache
def edited_in_bf16() -> list[float]:
    return train(edited("bf16"))


@pytest.mark.eight_ranks  # with half the samples BF16 parts from stock by more
@pytest.mark.parametrize("scheme", ALL)
def test_edit_of_gathered_parameters_in_bf16(scheme: str) -> None:
    """The same where the masters have another precision."""
    mine = train(edited("bf16").under(block(scheme)))
    assert largest_difference(mine, edited_in_bf16()) <= 3e-3


def evaluating(seen: list[float]) -> Job:
    """Evaluates before every step, and before the second micro-batch of every step."""

    def evaluate(engine: Any, step: int) -> None:
        engine.eval()
        with torch.no_grad():
            seen.append(float(mse(engine, torch.full((4, 11), step / 10), torch.zeros(4, 5))))
        engine.train()

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        if engine.micro_steps % 2:
            evaluate(engine, engine.global_steps)
        return mse(engine, x, y)

    return Job(model=SMALL, steps=5, micro_batches=2, loss=loss, each_step=evaluate)


@cache
def stock_evaluating() -> tuple[Result, list[float]]:
    seen: list[float] = []
    return run(evaluating(seen)), seen


@pytest.mark.parametrize("scheme", CAPTURED)
def test_evaluation_within_training(scheme: str) -> None:
    """Forward passes without gradients see the new weights and leave nothing behind."""
    seen: list[float] = []
    mine = run(evaluating(seen).under(block(scheme)))
    expected, expected_seen = stock_evaluating()
    assert_equal(mine, expected)
    assert largest_difference(seen, expected_seen) <= 1e-5
