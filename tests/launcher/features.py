# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Features of ZeRO-3 by schemes: what each cell of the matrix in `docs/works-with.md` trains, under
any block or none, and what it must equal.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed import utils
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor, nn

from tests.device import DEVICE
from tests.launcher import checkpoints
from tests.launcher.models import (
    SMALL,
    Branching,
    Checkpointed,
    External,
    Nested,
    Routed,
    Scalar,
    Tied,
    Tiny,
    TwiceUsed,
    adapted,
    hooked,
    partly_frozen,
    tied_and_adapted,
    with_leaves,
)
from tests.launcher.training import (
    EMULATED,
    Job,
    Net,
    Result,
    advance,
    assert_equal,
    batch,
    block,
    ds_config,
    in_plain_torch,
    largest_difference,
    mse,
    run,
    running,
    weights,
)
from zero_topo.quant.operands import DTYPES

Block = dict[str, Any] | None
STEPS = 5
OVERFLOWS = (1, 4)
MOMENTUM = {
    "optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    "zero_allow_untested_optimizer": True,
}


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


def weights_are_masters() -> Any:
    """Engines in FP32 whose weights are the masters, as DeepSpeed has it where their device equals
    the accelerator's. The latter is mostly a string.
    """
    return patch.object(get_accelerator(), "current_device_name", lambda: torch.device("cpu"))


def edited_masters(zero_topo: Block) -> Result:
    """The edit lasts."""
    with weights_are_masters():
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


def read_alone(engine: Any, step: int) -> None:
    """After each step, skipped ones too, persistent parameters are whole: no collective is left
    that the other ranks would miss.
    """
    if dist.get_rank() == 1:
        kept = engine.optimizer.persistent_parameters
        assert kept and all(param.detach().isfinite().all() for param in kept)
        assert all(param.shape == param.ds_shape for param in kept)


def persistent() -> Job:
    """One rank alone reads the parameters between steps."""
    whole = zero(stage3_param_persistence_threshold=10**6)
    return small(ds=whole, after_step=read_alone)


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


def inside(context: Callable[[Any], AbstractContextManager[Any]], **more: Any) -> Job:
    """Forward passes inside a context manager that is made of the engine."""

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        with context(engine):
            return mse(engine, x, y)

    return small(loss=loss, **more)


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
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    with lower_dtypes():
        return run(small(ds=MOMENTUM | autocast, zero_topo=zero_topo))


# -- optimizers and precisions ---------------------------------------------------------------------


def clients() -> Job:
    """Optimizer and scheduler are objects of the caller's."""

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    optimizer = partial(torch.optim.RMSprop, lr=5e-3)
    return small(
        optimizer=optimizer, scheduler=scheduler, ds={"zero_allow_untested_optimizer": True}
    )


SCALING = {
    "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
}


def overflow(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    """In two steps the gradients of one rank overflow, in the first of two micro-batches."""
    output = engine(x)
    if engine.global_steps in OVERFLOWS and engine.micro_steps % 2 == 0 and dist.get_rank() == 3:
        output.register_hook(lambda grad: grad * float("inf"))
    return nn.functional.mse_loss(output.float(), y.float())


def overflowing(zero_topo: Block) -> Result:
    """FP16, which torch computes on any CPU, if slowly; in two steps one rank's gradients overflow.

    Such a step is skipped on every rank: seen are loss scale, skipped steps, and after each step a
    master.
    """
    seen: list[Any] = []

    def record(engine: Any, step: int) -> None:
        seen.append([float(engine.optimizer.cur_scale), engine.skipped_steps])
        seen.append(utils.safe_get_full_fp32_param(engine.module.blocks[0][1].weight))
        if zero_topo is not None:  # stock leaves them partitioned after a skipped step
            read_alone(engine, step)

    with patch.object(get_accelerator(), "is_fp16_supported", lambda: True):
        job = small(
            micro_batches=2,
            dtype="fp16",
            loss=overflow,
            after_step=record,
            ds={**SCALING, **zero(stage3_param_persistence_threshold=40)},
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
        losses = []
        for step in range(STEPS):
            losses += advance(one, first, step, step + 1)
            losses += advance(two, second, step, step + 1)
        return Result(losses, weights(first), [weights(second)])


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


Way = tuple[dict[str, Any], float | None]
"""A block, and the tolerance of losses; None for a run without quantization, whose weights and all
else are compared too.
"""


def unquantized_and_quantized(scheme: str) -> list[Way]:
    """Without quantization, and as the scheme comes."""
    as_it_comes = {"topology": EMULATED, "debug_checks": True, "scheme": scheme}
    return [(block(scheme), None), (as_it_comes, 0.1)]


SCHEMES: dict[str, list[Way]] = {
    "zero3": [(block("zero3"), None)],
    "zero++": unquantized_and_quantized("zero++"),
    "hsdp": [(block("hsdp"), None)],
    "paper": unquantized_and_quantized("paper"),
    "topo": unquantized_and_quantized("topo"),
    "oktopk": [(block("topo", sync={"mode": "oktopk", "density": 0.2}), 0.25)],
}


@dataclass(frozen=True)
class Feature:
    """A row.

    Attributes:
        run: of a block or, for stock ZeRO-3, None: a training that uses the feature.
        like: what the training must equal where stock ZeRO-3 itself is wrong.
        tolerance: without quantization, of losses, weights and what else was seen.
        unlike: another row, from whose losses its own must differ by a hundred times what parity
            allows: else equal losses would say nothing.
        refused: the part that matters of the sentence with which every scheme refuses it.
    """

    run: Callable[[Block], Result]
    like: Callable[[], Result] | None = None
    tolerance: float = 1e-5
    unlike: str = ""
    refused: str = ""


def of(case: Callable[[], Job], **more: Any) -> Feature:
    """A feature that one job uses."""
    return Feature(lambda zero_topo: run(case().under(zero_topo)), **more)


def of_model(model: Callable[[], nn.Module], micro_batches: int = 1, **more: Any) -> Feature:
    """A feature that a model has."""
    return of(lambda: Job(model=model, steps=STEPS, micro_batches=micro_batches), **more)


WARMUP = {
    "warmup_min_lr": 0.0,
    "warmup_max_lr": [1e-2, 2e-3],
    "warmup_num_steps": 4,
    "warmup_type": "linear",
}
FAR_AHEAD = zero(
    stage3_param_persistence_threshold=20,
    stage3_max_live_parameters=10**9,
    stage3_prefetch_bucket_size=10**6,
    stage3_max_reuse_distance=10**9,
)
ON_HOST = zero(offload_optimizer={"device": "cpu"}, sub_group_size=20)

UNDISTURBED = "`zero.Init`"
FEATURES: dict[str, Feature] = {
    "parameter groups, a scheduler": of(
        lambda: small(
            groups=checkpoints.groups,
            ds={"scheduler": {"type": "WarmupLR", "params": WARMUP}},
        ),
        unlike=UNDISTURBED,
    ),
    "the caller's optimizer and scheduler": of(clients, unlike=UNDISTURBED),
    "another optimizer of the config": of(lambda: small(ds=MOMENTUM), unlike=UNDISTURBED),
    # the optimizer steps through slices of the shard, one after the other; and with everything on
    # one stream
    "sub-groups, no overlap": of(
        lambda: small(groups=checkpoints.groups, ds=zero(sub_group_size=20, overlap_comm=False))
    ),
    # a whole module, a bias only, a weight only
    "frozen parameters": of_model(partly_frozen),
    "frozen parameters with adapters": of_model(adapted, micro_batches=2),
    # the embedding, which is the head too, is frozen
    "frozen parameters, tied": of_model(tied_and_adapted),
    "parameters unused in some steps": of(lambda: branching(1), like=lambda: branching_in_torch(1)),
    "parameters unused in some micro-batches": of(
        lambda: branching(2), like=lambda: branching_in_torch(2)
    ),
    # embedding and head share one parameter: gathered for either, one gradient
    "tied weights": of_model(Tied),
    # ranks that hold only padding take part in everything
    "parameters of 1 to 9 elements": of_model(Tiny),
    # DeepSpeed's own: it broadcasts parameters as bytes, under `zero.Init` too
    "parameters of 0 dimensions": of_model(Scalar, refused="self.dim() cannot be 0"),
    "leaf modules": of_model(with_leaves),
    "experts that get no token": of_model(Routed),
    "external parameters": of_model(External),
    "hooks of modules and parameters": of_model(hooked, unlike=UNDISTURBED),
    # the backward pass is many small ones; recomputation gathers from the copy that backward reads
    "activation checkpointing, reentrant": of_model(partial(Checkpointed, True)),
    "activation checkpointing, not reentrant": of_model(partial(Checkpointed, False)),
    "a parameter inside and outside a checkpoint": Feature(twice_used, like=twice_used_in_torch),
    # parameters partitioned as they are built are adopted as they are
    UNDISTURBED: of(lambda: small(zero_init=True)),
    "`zero.Init`, nested": Feature(nested),
    "`GatheredParameters`, read": of(read),
    "`GatheredParameters`, written": of(edited, unlike=UNDISTURBED),
    "`GatheredParameters`, written before backward": of(edited_before_backward, unlike=UNDISTURBED),
    "`GatheredParameters`, written where weights are masters": Feature(
        edited_masters, unlike="`GatheredParameters`, written"
    ),
    "`safe_get_*`, `safe_set_*`": Feature(with_states),
    "gradient accumulation": of(lambda: small(micro_batches=3)),
    "gradient accumulation under `no_sync`": of(
        lambda: inside(lambda engine: engine.no_sync(), micro_batches=2),
        refused="no_sync context manager is incompatible",
    ),
    # `zero_grad` of the optimizer forgets what was accumulated, that of the engine does not
    "`zero_grad` between micro-batches": of(discarding),
    "evaluation inside steps": of(evaluating),
    # below the threshold: never partitioned, whole and new after each step
    "persistent parameters": of(persistent),
    # large prefetch buckets and reuse distances, as by default: a kept parameter is not a stale one
    "prefetch, reuse": of(lambda: small(micro_batches=2, ds=FAR_AHEAD)),
    "BF16": of(lambda: small(dtype="bf16"), tolerance=1e-2),
    "FP16, overflows": Feature(overflowing, tolerance=3e-3),
    "`torch.autocast` of the caller": of(
        lambda: inside(lambda _: torch.autocast(DEVICE.type, dtype=torch.bfloat16))
    ),
    # stock sums gradients in BF16
    "`torch_autocast` of the config": Feature(autocast_of_the_config, tolerance=1e-3),
    # masters and states on the host, the gradient shard on the accelerator
    "`offload_optimizer` to the CPU": of(lambda: small(micro_batches=2, ds=ON_HOST)),
    "`offload_optimizer` to NVMe": of(
        lambda: small(ds=zero(offload_optimizer={"device": "nvme", "nvme_path": "/tmp"})),
        refused="NVMe offload",
    ),
    "`offload_param` in training": of(lambda: small(ds=zero(offload_param={"device": "cpu"}))),
    "`offload_states`": Feature(offloading_states),
    "several engines": Feature(two_engines),
    "saved and resumed": Feature(resumed),
}


@cache
def expected(name: str) -> Result:
    """What a feature must equal; trained once, on every rank alike."""
    feature = FEATURES[name]
    return feature.like() if feature.like else feature.run(None)


def verdict(name: str, ways: Sequence[Way]) -> str:
    """A cell: "pass", or the sentence of the refusal.

    Raises:
        AssertionError: if it trains something else, or is not refused as it should be.
    """
    feature = FEATURES[name]
    if feature.refused:
        with pytest.raises(
            (ValueError, RuntimeError, AssertionError), match=re.escape(feature.refused)
        ) as error:
            feature.run(ways[-1][0])
        lines = str(error.value).splitlines()
        return next(line.strip(" -") for line in lines if feature.refused in line)
    stock = expected(name)
    if feature.unlike:
        assert largest_difference(stock.losses, expected(feature.unlike).losses) > 1e-3
    for zero_topo, tolerance in ways:
        mine = feature.run(zero_topo)
        if tolerance is None:
            assert_equal(mine, stock, feature.tolerance)
        else:
            torch.testing.assert_close(mine.losses, stock.losses, rtol=tolerance, atol=tolerance)
    return "pass"
