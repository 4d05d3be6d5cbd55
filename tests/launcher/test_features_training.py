# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Quantized training repeats; loss scaling and access to states are as under stock ZeRO-3."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
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

from tests.device import DEVICE
from tests.launcher.checkpoints import poison
from tests.launcher.models import SMALL
from tests.launcher.parity import Result, assert_equal, run
from tests.launcher.training import EMULATED, Job, Net, batch, block, ds_config, mse, running, train, weights


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


def poisoned_groups(model: nn.Module) -> list[dict[str, Any]]:
    """All parameters, their padding poisoned before DeepSpeed builds an engine: stock neither sets nor reads it."""
    for param in model.parameters():
        poison(param.ds_tensor.data, param.ds_numel)  # type: ignore[attr-defined]
    return [{"params": list(model.parameters())}]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("scheme", ["topo", "zero++"])
def test_garbage_at_the_start_does_no_harm(scheme: str, dtype: str) -> None:
    """What memory held beyond the end of a parameter that `zero.Init` partitioned is not quantized together with it."""
    clean = replace(quantized(scheme, zero_init=True), dtype=dtype)
    assert_equal(run(replace(clean, groups=poisoned_groups)), run(clean), tolerance=0.0)


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


@pytest.mark.parametrize("scheme", ["topo", "hsdp", "zero++"])
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
def stock_with_states(dtype: str, masters_are_weights: bool) -> tuple[Result, list[Tensor]]:
    return with_states(dtype, None, {})


@pytest.mark.parametrize(
    ("scheme", "dtype", "masters_are_weights"),
    [
        ("topo", "fp32", False),
        ("hsdp", "fp32", False),
        ("topo", "bf16", False),
        ("hsdp", "bf16", False),
        ("topo", "fp32", True),
    ],
)
def test_access_to_gradients_masters_and_states(
    scheme: str, dtype: str, masters_are_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`safe_get_*` and `safe_set_*` show and change what stock's do, after every micro-batch and between steps."""
    with monkeypatch.context() as patch:
        if masters_are_weights:  # as `test_edit_of_gathered_parameters_that_are_the_masters` says
            patch.setattr(get_accelerator(), "current_device_name", lambda: torch.device("cpu"))
        expected, theirs = stock_with_states(dtype, masters_are_weights)
        mine, seen = with_states(dtype, block(scheme), {})
    tolerance = 1e-5 if dtype == "fp32" else 3e-2
    torch.testing.assert_close(seen, theirs, rtol=tolerance, atol=tolerance)
    assert_equal(mine, expected, tolerance)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_publish_goes_on_after_the_step(overlap: bool) -> None:
    """The step does not end it by gathering resident parameters: the forward pass does, where it needs them."""
    seen = []

    def after(engine: Any, step: int) -> None:
        statuses = {param.ds_status for param in engine.optimizer.persistent_parameters}
        seen.append((engine.optimizer.topo.weights.publishing, statuses))

    resident = {"zero_optimization": {"stage3_param_persistence_threshold": 10**6}}
    job = Job(model=SMALL, steps=2, ds=resident, after_step=after)
    run(job.under(block("topo", overlap=overlap, debug_checks=False)))
    wanted = ZeroParamStatus.NOT_AVAILABLE if overlap else ZeroParamStatus.AVAILABLE
    assert seen == [(overlap, {wanted})] * 2


def test_stocks_ways_to_gather_and_reduce_change_nothing() -> None:
    """Both are left out with a line: with reduce_scatter off DeepSpeed would all-reduce past our scatter."""
    less = {"reduce_scatter": False, "stage3_use_all_reduce_for_fetch_params": True}
    usual = Job(zero_topo=block("topo"), steps=4)
    assert train(replace(usual, ds={"zero_optimization": less})) == train(usual)


@pytest.mark.parametrize("zero_init", [False, True])
def test_an_engine_without_an_optimizer_may_hold_its_parameters_on_the_host(zero_init: bool) -> None:
    """Stock's gathers serve it; with an optimizer, in whichever way it comes, the same config is refused."""
    job = Job(zero_topo=block("topo"), ds={"zero_optimization": {"offload_param": {"device": "cpu"}}})
    x, _ = batch(0, 0, torch.float32)
    config = {key: value for key, value in ds_config(job).items() if key != "optimizer"}
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=zero_init):
        model = Net()
    optimizer = torch.optim.SGD([torch.zeros(1)])
    for refused in ({"config": config, "optimizer": optimizer}, {"config": ds_config(job)}):
        with pytest.raises(ValueError, match="with an optimizer: parameter offload is not supported in training"):
            deepspeed.initialize(model=model, **refused)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert {param.ds_tensor.device.type for param in engine.parameters()} == {"cpu"}
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(engine(x.to(DEVICE)), Net().to(DEVICE)(x.to(DEVICE)))
    engine.destroy()
