# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Trainings that each use one feature of ZeRO-3, under any block or none: the rows of
`tests.launcher.features`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import utils
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor, nn

from tests.device import DEVICE
from tests.launcher import checkpoints
from tests.launcher.models import SMALL, Branching, Nested, Tiny, TwiceUsed
from tests.launcher.parity import Result, in_plain_torch, run
from tests.launcher.training import Job, Net, advance, batch, ds_config, mse, running, weights
from zero_topo.quant.operands import DTYPES

Block = dict[str, Any] | None
STEPS = 5
OVERFLOWS = (1, 4)


def zero(**keys: Any) -> dict[str, Any]:
    """A DeepSpeed config's ``zero_optimization``."""
    return {"zero_optimization": keys}


def small(**more: Any) -> Job:
    """The usual run of the small network."""
    return Job(model=SMALL, steps=STEPS, **more)


# -- where stock ZeRO-3 is wrong, and plain torch says what is right -------------------------------


def twice_used(zero_topo: Block) -> Result:
    """A reentrant backward pass delivers such a gradient in two parts, before or after its bucket
    went out.

    Stock ZeRO-3 keeps the last part only if the bucket went out in between, and raises
    AssertionError if not.
    """
    job = Job(model=partial(TwiceUsed, True), steps=STEPS, zero_topo=zero_topo)
    before, after = (run(replace(job, ds=zero(reduce_bucket_size=size))) for size in (2000, 60))
    return replace(before, seen=[after.losses, after.weights])


def twice_used_in_torch() -> Result:
    """The same without recomputation, by one process."""
    job = Job(model=partial(TwiceUsed, False), steps=STEPS)
    found = in_plain_torch(job, lambda model, x, step, micro: model(x))
    return replace(found, seen=[found.losses, found.weights])


def branch(step: int, micro: int) -> str:
    """Which branches a micro-batch takes, on every rank."""
    return ("left right", "left", "right")[(step + micro) % 3]


def branching(micro_batches: int) -> Job:
    """A parameter has no gradient in some steps or micro-batches."""

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        output = engine(x, branch(*divmod(engine.micro_steps, micro_batches)))
        return torch.nn.functional.mse_loss(output.float(), y.float())

    return Job(model=Branching, steps=STEPS, micro_batches=micro_batches, loss=loss)


def branching_in_torch(micro_batches: int) -> Result:
    """Such a gradient is zero. Stock's buffer is overwritten, never zeroed: it takes the last
    step's once more.
    """
    return in_plain_torch(
        branching(micro_batches), lambda model, x, step, micro: model(x, branch(step, micro))
    )


# -- the caller between passes ---------------------------------------------------------------------


def edit(engine: Any, step: int) -> None:
    """Before step 3 rank 0 doubles a weight, an odd-sized bias and the first layer; the others'
    edits are ignored.
    """
    if step != 3:
        return
    model = engine.module
    edited = [model.blocks[0][1].weight, model.out.bias, *model.inp.parameters()]
    with deepspeed.zero.GatheredParameters(edited, modifier_rank=0):
        for param in edited:
            param.data.mul_(2.0 if dist.get_rank() == 0 else -5.0)


def edited() -> Job:
    """An edit reaches every copy of the weights; the step after it returns to the masters'
    values.
    """
    return small(each_step=edit)


def edited_masters(zero_topo: Block) -> Result:
    """The weights are the masters, as DeepSpeed has it for an FP32 model's where their device
    equals the accelerator's.

    The latter is mostly a string, and the edit does not last.
    """
    with patch.object(get_accelerator(), "current_device_name", lambda: torch.device("cpu")):
        return run(edited().under(zero_topo))


def edited_before_backward() -> Job:
    """Backward reads the edited weights, not copies of what forward read."""

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        value = mse(engine, x, y)
        edit(engine, engine.global_steps)
        return value

    # a parameter fetched ahead for the backward pass cannot be gathered by the user, in stock
    # neither
    return small(loss=loss, ds=zero(stage3_prefetch_bucket_size=0))


def read() -> Job:
    """Every parameter, whole, before every step."""
    seen: list[Any] = []
    return small(seen=seen, each_step=lambda engine, step: seen.append(weights(engine)))


def discarding() -> Job:
    """In odd steps the first of two micro-batches is thrown away; in even ones only the parameters'
    `.grad` are.
    """

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        if engine.micro_steps % 2:
            engine.zero_grad()
            if engine.global_steps % 2:
                engine.optimizer.zero_grad()
        return mse(engine, x, y)

    return small(micro_batches=2, loss=loss)


def evaluating() -> Job:
    """Forward passes without gradients, before every step and inside it, see the new weights and
    leave nothing.
    """
    seen: list[Any] = []

    def evaluate(engine: Any, step: int) -> None:
        engine.eval()
        with torch.no_grad():
            dtype = next(engine.module.parameters()).dtype
            seen.append(
                float(mse(engine, torch.full((4, 11), step / 10, dtype=dtype), torch.zeros(4, 5)))
            )
        engine.train()

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        if engine.micro_steps % 2:
            evaluate(engine, engine.global_steps)
        return mse(engine, x, y)

    return small(micro_batches=2, loss=loss, each_step=evaluate, seen=seen)


def generating() -> Job:
    """Between steps the model's outputs become its inputs, four times."""
    seen: list[Any] = []

    def generate(engine: Any, step: int) -> None:
        engine.eval()
        x, _ = batch(step, 7, torch.float32)
        with torch.no_grad():
            for _ in range(4):
                x = torch.cat([x[:, 5:], engine(x.to(DEVICE)).cpu()], 1)
        engine.train()
        seen.append(x)

    return small(each_step=generate, seen=seen)


def edit_states(engine: Any, step: int) -> None:
    """Between backward and step: one kind of edit per step."""
    weight, bias = engine.module.blocks[0][1].weight, engine.module.blocks[0][1].bias
    own = torch.ones(bias.ds_numel // dist.get_world_size())
    if step == 0:
        utils.safe_update_full_grad_vectorized([weight, bias], lambda grad, param: grad * 3 - 0.1)
    elif step == 1:
        utils.safe_set_full_grad(weight, torch.linspace(-1, 1, weight.ds_numel))
        utils.safe_set_local_grad(bias, own * 0.1 * dist.get_rank())
    elif step == 2:
        utils.safe_set_full_fp32_param(weight, 2 * utils.safe_get_full_fp32_param(weight))
        utils.safe_set_local_fp32_param(bias, own * 0.01 * dist.get_rank())
    elif step == 3:
        utils.safe_set_full_optimizer_state(
            weight, torch.full((weight.ds_numel,), 0.5), "exp_avg_sq"
        )
        utils.safe_set_local_optimizer_state(bias, own * 0.01 * dist.get_rank(), "exp_avg")


def see_states(engine: Any, step: int) -> list[Tensor]:
    """Copies of gradients, masters and states, whole and local, of a matrix, a norm and an
    odd-sized bias.
    """
    seen = []
    for param in (
        engine.module.blocks[0][1].weight,
        engine.module.blocks[1][0].weight,
        engine.module.out.bias,
    ):
        local = [utils.safe_get_local_grad(param), utils.safe_get_local_fp32_param(param)]
        seen += [utils.safe_get_full_grad(param), utils.safe_get_full_fp32_param(param)]
        if step:
            local += [utils.safe_get_local_optimizer_state(param, "exp_avg_sq")]
            seen += [utils.safe_get_full_optimizer_state(param, "exp_avg")]
        width = local[0].numel()
        # Beyond it, stock leaves what was in memory
        stored = max(0, param.ds_numel - dist.get_rank() * width)
        seen += [tensor[:stored] for tensor in local]
    return [tensor.detach().float().clone() for tensor in seen]


def with_states(zero_topo: Block, dtype: str = "fp32") -> Result:
    """Two micro-batches per step, looking after each; edits after the second, and one between
    steps.
    """
    job = Job(
        model=partial(Net, width=16, depth=2), zero_topo=zero_topo, micro_batches=2, dtype=dtype
    )
    seen, losses = [], []
    with running(job) as engine:
        for step in range(6):
            for micro in range(2):
                x, y = batch(step, micro, DTYPES[dtype])
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
                utils.safe_set_local_fp32_param(
                    bias, torch.ones_like(utils.safe_get_local_fp32_param(bias))
                )
        return Result(losses, weights(engine), seen)


def with_no_sync() -> Job:
    """Accumulates under ``engine.no_sync()``."""

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        with engine.no_sync():
            return mse(engine, x, y)

    return small(micro_batches=2, loss=loss)


def autocast() -> Job:
    """The forward pass inside the caller's ``torch.autocast``."""

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return mse(engine, x, y)

    return small(loss=loss)


@contextmanager
def lower_dtypes() -> Iterator[None]:
    """Engines of ``torch_autocast``: DeepSpeed stores their dtype in its module, for all later
    ones.
    """
    with patch.multiple(
        torch_autocast, TORCH_AUTOCAST_INITIALIZED=False, TORCH_AUTOCAST_DTYPE=None
    ):
        yield


def autocast_of_the_config(zero_topo: Block) -> Result:
    """DeepSpeed itself runs the forward pass in ``torch.autocast``, and sends weights and gradients
    in BF16.
    """
    sgd = {
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
    }
    with lower_dtypes():
        return run(
            small(ds={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, **sgd}).under(
                zero_topo
            )
        )


# -- optimizers and precisions ---------------------------------------------------------------------


def matrices_and_vectors(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with a learning rate and a weight decay of their own."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "lr": 1e-2, "weight_decay": 0.3},
        {"params": [p for p in params if p.dim() <= 1], "lr": 3e-3, "weight_decay": 0.0},
    ]


def clients() -> Job:
    """Optimizer and scheduler are objects of the caller's."""

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    optimizer = partial(torch.optim.RMSprop, lr=5e-3)
    return small(
        optimizer=optimizer, scheduler=scheduler, ds={"zero_allow_untested_optimizer": True}
    )


def overflowing(zero_topo: Block) -> Result:
    """FP16, which torch computes on any CPU, if slowly; in two steps one rank's gradients overflow.

    Such a step is skipped on every rank: seen are loss scale, skipped steps, and after each step a
    master.
    """
    seen: list[Any] = []

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        output = engine(x)
        if (
            engine.global_steps in OVERFLOWS
            and engine.micro_steps % 2 == 0
            and dist.get_rank() == 3
        ):
            output.register_hook(lambda grad: grad * float("inf"))
        return nn.functional.mse_loss(output.float(), y.float())

    def record(engine: Any, step: int) -> None:
        seen.append([float(engine.optimizer.cur_scale), engine.skipped_steps])
        seen.append(utils.safe_get_full_fp32_param(engine.module.blocks[0][1].weight))

    scaling = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    with patch.object(get_accelerator(), "is_fp16_supported", lambda: True):
        job = small(
            micro_batches=2,
            dtype="fp16",
            loss=loss,
            after_step=record,
            ds={"fp16": scaling},
            seen=seen,
        )
        found = run(job.under(zero_topo))
    for step in OVERFLOWS:
        assert torch.equal(seen[2 * step + 1], seen[2 * step - 1]), (
            "a skipped step changed a weight"
        )
    assert seen[-2][1] == len(OVERFLOWS)
    return found


# -- engines: how they begin and end ---------------------------------------------------------------


def nested(zero_topo: Block) -> Result:
    """A model built under ``zero.Init``, part of it under one more."""
    job = Job(steps=STEPS, zero_topo=zero_topo, zero_init=True)
    return run(replace(job, model=partial(Nested, ds_config(job))))


def two_engines(zero_topo: Block) -> Result:
    """Two models train in turns."""
    one, two = small(zero_topo=zero_topo), Job(model=Tiny, zero_topo=zero_topo)
    with running(one) as first, running(two) as second:
        losses = [
            loss
            for step in range(STEPS)
            for job, engine in ((one, first), (two, second))
            for loss in advance(job, engine, step, step + 1)
        ]
        return Result(losses, weights(first), [weights(second)])


def started_again(zero_topo: Block) -> Result:
    """An engine destroyed after three steps, another one made of the weights it had."""

    def model() -> nn.Module:
        net = SMALL()
        net.load_state_dict(kept)
        return net

    job = small(zero_topo=zero_topo)
    with running(job) as engine:
        losses, kept = advance(job, engine, 0, 3), weights(engine)
    with running(replace(job, model=model)) as engine:
        return Result(losses + advance(job, engine, 3, STEPS), weights(engine))


def resumed(zero_topo: Block) -> Result:
    """Saved half-way, loaded by an engine of other weights."""
    job = checkpoints.job(zero_topo)
    with tempfile.TemporaryDirectory() as own:
        path = checkpoints.common_directory(Path(own))
        saved = checkpoints.save(job, path)
        with checkpoints.loaded(job, path) as engine:
            losses = advance(job, engine, checkpoints.SAVED_AT, job.steps)
            return Result([*saved.losses, *losses], weights(engine))


def offloading_states(zero_topo: Block) -> Result:
    """To the host and back before each step: the masters alone, all but the weights, which are read
    then, or all.

    Stock only reads: DeepSpeed moves masters of its own CUDA optimizer alone.
    """

    kinds = [
        OffloadStateTypeEnum.optim_states,
        OffloadStateTypeEnum.hp_params,
        OffloadStateTypeEnum.lp_grads,
    ]
    seen: list[float] = []

    def away(engine: Any, step: int) -> None:
        if zero_topo is not None:
            engine.offload_states(include=None if step % 3 == 0 else kinds[: step % 3 + 1])
        if step % 3:
            with torch.no_grad():
                seen.append(mse(engine, *batch(step, 0, torch.float32)).item())
        if zero_topo is not None:
            engine.reload_states()

    return replace(run(small(each_step=away, micro_batches=2, zero_topo=zero_topo)), seen=seen)
