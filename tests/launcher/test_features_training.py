# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What training set-ups do: groups, schedules, offload, loss scaling, access to states. All as under stock ZeRO-3."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from torch import Tensor, nn

from tests.launcher.models import SMALL
from tests.launcher.parity import Result, assert_equal, assert_parity, run
from tests.launcher.training import EMULATED, Job, Net, batch, block, mse, running, weights

STEPS = 8
TWO = pytest.mark.parametrize("scheme", ["topo", "hsdp"])
WITH_CAPTURE = pytest.mark.parametrize("scheme", ["topo", "hsdp", "zero++"])


# -- parameter groups --------------------------------------------------------------------------------------------------


def matrices_and_vectors(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "lr": 1e-2, "weight_decay": 0.3},
        {"params": [p for p in params if p.dim() <= 1], "lr": 3e-3, "weight_decay": 0.0},
    ]


def grouped_and_scheduled() -> Job:
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": [1e-2, 2e-3], "warmup_num_steps": 4, "warmup_type": "linear"}
    scheduler = {"type": "WarmupLR", "params": warmup}
    return Job(model=SMALL, steps=STEPS, groups=matrices_and_vectors, ds={"scheduler": scheduler})


@TWO
def test_parameter_groups_with_a_scheduler(scheme: str) -> None:
    """Each group keeps its own weight decay, and the learning rate that the scheduler gives it."""
    assert_parity(grouped_and_scheduled, scheme)


def in_sub_groups() -> Job:
    return Job(model=SMALL, steps=STEPS, groups=matrices_and_vectors, ds={"zero_optimization": {"sub_group_size": 20}})


@TWO
def test_several_sub_groups(scheme: str) -> None:
    """The optimizer steps through slices of the shard, one after the other."""
    assert_parity(in_sub_groups, scheme)


# -- gathering ahead and keeping ---------------------------------------------------------------------------------------


def resident() -> Job:
    return Job(model=SMALL, steps=STEPS, ds={"zero_optimization": {"stage3_param_persistence_threshold": 10**6}})


@WITH_CAPTURE
def test_resident_parameters(scheme: str) -> None:
    """Parameters below the persistence threshold are never partitioned, and are whole and new after each step."""
    assert_parity(resident, scheme)


def some_resident_gathered_far_ahead() -> Job:
    zero = {
        "stage3_param_persistence_threshold": 20,
        "stage3_prefetch_bucket_size": 10**6,
        "stage3_max_reuse_distance": 10**9,
        "stage3_max_live_parameters": 10**9,
    }
    return Job(model=SMALL, steps=STEPS, micro_batches=2, ds={"zero_optimization": zero})


@pytest.mark.parametrize("scheme", ["topo", "zero++"])
def test_gathers_far_ahead_and_parameters_kept_for_reuse(scheme: str) -> None:
    """Large prefetch buckets and reuse distances, as by default: a kept parameter is not a stale one."""
    assert_parity(some_resident_gathered_far_ahead, scheme)


def quantized(scheme: str, **more: Any) -> Job:
    """BF16 with the scheme's own quantization."""
    block = {"topology": EMULATED, "scheme": scheme, "debug_checks": True}
    return Job(zero_topo=block, steps=5, dtype="bf16", micro_batches=2, **more)


@pytest.mark.parametrize("scheme", ["topo", "zero++"])
def test_quantized_training_repeats_bit_by_bit(scheme: str) -> None:
    """The same seed gives the same bits, however far ahead weights are gathered."""
    first = run(quantized(scheme))
    assert_equal(run(quantized(scheme)), first, tolerance=0.0)
    ahead = {"zero_optimization": {"stage3_prefetch_bucket_size": 10**6}}
    assert_equal(run(quantized(scheme, ds=ahead)), first, tolerance=0.0)


def with_padding(value: float) -> nn.Module:
    """A model whose shards end in `value`: DeepSpeed leaves there what it finds in memory."""
    model = Net()
    params: list[Any] = list(model.parameters())
    for param in params:
        local = param.ds_tensor
        held = max(0, param.ds_numel - dist.get_rank() * local.numel())
        local[held:] = value
    return model


@pytest.mark.parametrize("scheme", ["topo", "zero++"])
def test_padding_reaches_no_quantized_block(scheme: str) -> None:
    """What lies beyond the end of a parameter is not quantized together with it."""
    clean, soiled = (
        run(quantized(scheme, zero_init=True, model=partial(with_padding, value))) for value in (0.0, float("nan"))
    )
    assert_equal(soiled, clean, tolerance=0.0)


# -- accumulation ------------------------------------------------------------------------------------------------------


def discarding() -> Job:
    """In odd steps the first of two micro-batches is thrown away; in even ones only the parameters' `.grad` are."""

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        if engine.micro_steps % 2:
            engine.zero_grad()
            if engine.global_steps % 2:
                engine.optimizer.zero_grad()
        return mse(engine, x, y)

    return Job(model=SMALL, steps=STEPS, micro_batches=2, loss=loss)


@TWO
def test_discarded_micro_batch(scheme: str) -> None:
    """`zero_grad` of the optimizer forgets what was accumulated, that of the engine does not: as in stock."""
    assert_parity(discarding, scheme)


# -- offload -----------------------------------------------------------------------------------------------------------


def offloaded(micro_batches: int = 2) -> Job:
    ds = {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 20},
        "zero_force_ds_cpu_optimizer": False,
    }
    return Job(model=SMALL, steps=STEPS, micro_batches=micro_batches, ds=ds)


@TWO
def test_optimizer_offload_to_the_cpu(scheme: str) -> None:
    """Masters and states on the host, the gradient shard on the accelerator."""
    assert_parity(offloaded, scheme)


# -- loss scaling ------------------------------------------------------------------------------------------------------

OVERFLOWS = (3, 6)


@pytest.fixture
def fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU accelerator claims FP16, which torch computes on any processor, if slowly."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)


def overflowing(seen: list[Any]) -> Job:
    """FP16; in two steps one rank's gradients overflow. Records loss scale, skipped steps, a weight and its states."""

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        output = engine(x)
        if engine.global_steps in OVERFLOWS and engine.micro_steps % 2 == 0 and dist.get_rank() == 3:
            output.register_hook(lambda grad: grad * float("inf"))
        return nn.functional.mse_loss(output.float(), y.float())

    def record(engine: Any, step: int) -> None:
        param = engine.module.blocks[0][1].weight
        states = [safe_get_full_optimizer_state(param, key).clone() for key in ("exp_avg", "exp_avg_sq")]
        seen.append((engine.optimizer.cur_scale, engine.skipped_steps, safe_get_full_fp32_param(param), *states))

    scaling = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    return Job(model=SMALL, steps=10, micro_batches=2, dtype="fp16", loss=loss, after_step=record, ds={"fp16": scaling})


@cache
def stock_overflowing() -> tuple[Result, list[Any]]:
    seen: list[Any] = []
    return run(overflowing(seen)), seen


@WITH_CAPTURE
@pytest.mark.usefixtures("fp16")
def test_fp16_overflow(scheme: str) -> None:
    """A step with an overflow is skipped on every rank, and nothing of its gradients reaches the next."""
    expected, theirs = stock_overflowing()
    seen: list[Any] = []
    mine = run(overflowing(seen).under(block(scheme)))
    assert [entry[:2] for entry in seen] == [entry[:2] for entry in theirs]
    assert seen[-1][1] == len(OVERFLOWS)
    for step in OVERFLOWS:
        assert all(torch.equal(after, before) for after, before in zip(seen[step][2:], seen[step - 1][2:], strict=True))
    assert_equal(mine, expected, tolerance=3e-3)


# -- states seen and changed by the user -------------------------------------------------------------------------------


def edit_states(engine: Any, step: int) -> None:
    """Between backward and step: one kind of edit per step."""
    weight, bias = engine.module.blocks[0][1].weight, engine.module.blocks[0][1].bias
    own = torch.ones(bias.ds_numel // dist.get_world_size())
    if step == 0:
        safe_update_full_grad_vectorized([weight, bias], lambda grad, param: grad * 3 - 0.1)
    elif step == 1:
        safe_set_full_grad(weight, torch.linspace(-1, 1, weight.ds_numel))
        safe_set_local_grad(bias, own * 0.1 * dist.get_rank())
    elif step == 2:
        safe_set_full_fp32_param(weight, 2 * safe_get_full_fp32_param(weight))
        safe_set_local_fp32_param(bias, own * 0.01 * dist.get_rank())
    elif step == 3:
        safe_set_full_optimizer_state(weight, torch.full((weight.ds_numel,), 0.5), "exp_avg_sq")
        safe_set_local_optimizer_state(bias, own * 0.01 * dist.get_rank(), "exp_avg")


def see_states(engine: Any, step: int) -> list[Tensor]:
    """Copies of gradients, masters and states, whole and local, of a matrix, a norm and an odd-sized bias."""
    seen = []
    for param in (engine.module.blocks[0][1].weight, engine.module.blocks[1][0].weight, engine.module.out.bias):
        local = [safe_get_local_grad(param), safe_get_local_fp32_param(param)]
        seen += [safe_get_full_grad(param), safe_get_full_fp32_param(param)]
        if step:
            local += [safe_get_local_optimizer_state(param, "exp_avg_sq")]
            seen += [safe_get_full_optimizer_state(param, "exp_avg")]
        width = local[0].numel()
        held = max(0, param.ds_numel - dist.get_rank() * width)  # beyond it, stock leaves what was in memory
        seen += [tensor[:held] for tensor in local]
    return [tensor.detach().float().clone() for tensor in seen]


def with_states(dtype: str, zero_topo: dict[str, Any] | None, ds: dict[str, Any]) -> tuple[Result, list[Tensor]]:
    """Two micro-batches per step, looking after each; edits after the second, and one between steps."""
    job = Job(model=partial(Net, width=16, depth=2), zero_topo=zero_topo, micro_batches=2, dtype=dtype, ds=ds)
    seen, losses = [], []
    with running(job) as engine:
        for step in range(6):
            for micro in range(2):
                x, y = batch(step, micro, torch.float32 if dtype == "fp32" else torch.bfloat16)
                loss = mse(engine, x, y)
                engine.backward(loss)
                seen += see_states(engine, step)
                if micro:
                    edit_states(engine, step)
                    seen += see_states(engine, step)
                engine.step()
                losses.append(float(loss))
            if step == 4:
                bias = engine.module.out.bias
                safe_set_local_fp32_param(bias, torch.ones_like(safe_get_local_fp32_param(bias)))
        return Result(losses, weights(engine)), seen


@cache
def stock_with_states(dtype: str) -> tuple[Result, list[Tensor]]:
    return with_states(dtype, None, {})


@TWO
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_access_to_gradients_masters_and_states(dtype: str, scheme: str) -> None:
    """`safe_get_*` and `safe_set_*` show and change what stock's do, after every micro-batch and between steps."""
    expected, theirs = stock_with_states(dtype)
    mine, seen = with_states(dtype, block(scheme), {})
    tolerance = 1e-5 if dtype == "fp32" else 3e-2
    torch.testing.assert_close(seen, theirs, rtol=tolerance, atol=tolerance)
    assert_equal(mine, expected, tolerance)
