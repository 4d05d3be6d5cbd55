# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Train a small model under a DeepSpeed config and return what happened: the yardstick of every
parity test.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_topo
from tests.device import DEVICE
from zero_topo.quant.operands import DTYPES

WORLD = int(os.environ.get("WORLD_SIZE", 8))
EMULATED = {
    "emulated": {
        "nodes": 2,
        "gpus_per_node": max(WORLD // 4, 1),
        "gcds_per_gpu": min(WORLD // 2, 2),
    }
}
PLAIN = {"weights": None, "secondary": None, "gradients": None}
CODES: dict[str, Any] = {
    "weights": "int8",
    "secondary": "int8",
    "gradients": None,
    "resident": "int8",
}
DATA_PARALLEL: dict[str, Any] = {
    "weights": "rank",
    "gradients": "rank",
    "optimizer": "rank",
    "secondary": None,
}
ADAMS: dict[str, Any] = {
    "optimizer": {"type": "AdamS", "params": {"lr": 1e-2, "weight_decay": 0.1}}
}
AGED: dict[str, Any] = {
    "optimizer": {"type": "AgedAdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
}


def block(scheme: str, **more: Any) -> dict[str, Any]:
    """A ``zero_topo`` block on 2 nodes x 2 GPUs x 2 GCDs, or half of it; unquantized unless
    ``quantize`` says else.
    """
    return {"topology": EMULATED, "scheme": scheme, "quantize": PLAIN, "debug_checks": True, **more}


class Net(nn.Module):
    """A residual MLP with a norm, odd sizes and biases smaller than the world."""

    def __init__(self, width: int = 37, depth: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(11, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth)
        )
        self.out = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.blocks:
            x = x + torch.tanh(layer(x))
        return self.out(x)


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        model: builds the model; called under one seed.
        zero_topo: the block, or None for stock ZeRO-3.
        steps: optimizer steps.
        micro_batches: per optimizer step.
        dtype: "fp32" or "bf16" ("fp16" with a patched accelerator).
        ds: keys merged over the default DeepSpeed config (``zero_optimization`` is merged one level
            deeper).
        zero_init: build the model under ``deepspeed.zero.Init``.
        each_step: called with (engine, step) before the step's first micro-batch.
        loss: of (engine, inputs, targets).
        groups: the model -> optimizer parameter groups; None lets DeepSpeed take all trainable
            parameters.
        optimizer: of these parameters, the caller's own; None takes that of the config.
        scheduler: of the optimizer, the caller's own.
        batch: of (step, micro-batch, dtype): this rank's inputs and targets.
        mpu: given to DeepSpeed.
        seen: what its functions note down, to be compared as losses are.
    """

    model: Callable[[], nn.Module] = Net
    zero_topo: dict[str, Any] | None = None
    steps: int = 20
    micro_batches: int = 1
    dtype: str = "fp32"
    ds: dict[str, Any] = field(default_factory=dict)
    zero_init: bool = False
    each_step: Callable[[Any, int], None] | None = None
    after_step: Callable[[Any, int], None] | None = None
    loss: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    batch: Callable[[int, int, torch.dtype], tuple[Tensor, Tensor]] | None = None
    mpu: Any = None
    seen: list[Any] = field(default_factory=list)

    def under(self, zero_topo: dict[str, Any] | None) -> Job:
        """The same run under another block."""
        return replace(self, zero_topo=zero_topo)


def ds_config(job: Job) -> dict[str, Any]:
    """The DeepSpeed JSON of a run."""
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 200,
        "reduce_bucket_size": 2000,
        "overlap_comm": True,
    }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": job.micro_batches,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
        },
    }
    if job.dtype != "fp32":
        config[job.dtype] = {"enabled": True}
    config.update({k: v for k, v in job.ds.items() if k != "zero_optimization"})
    config["zero_optimization"] = {**zero, **job.ds.get("zero_optimization", {})}
    if job.zero_topo is not None:
        config["zero_topo"] = job.zero_topo
    return config


def start(job: Job, seed: int = 0) -> Any:
    """The DeepSpeed engine of a run."""
    torch.manual_seed(seed)
    config = ds_config(job)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=job.zero_init):
        model = job.model()
    parameters = (
        job.groups(model) if job.groups else [p for p in model.parameters() if p.requires_grad]
    )
    own: dict[str, Any] = {
        "model_parameters": parameters,
        "lr_scheduler": job.scheduler,
        "mpu": job.mpu,
    }
    if job.optimizer:
        del config["optimizer"]
        own["optimizer"] = job.optimizer(parameters)
    engine, *_ = deepspeed.initialize(model=model, config=config, **own)
    if job.zero_topo is not None:
        # Raises for a stock engine: else a test could compare stock with itself
        zero_topo.stats(engine)
    return engine


def without_optimizer(job: Job) -> Any:
    """The engine of a run's model alone, as for inference."""
    torch.manual_seed(0)
    config = ds_config(job)
    for key in ("optimizer", "zero_allow_untested_optimizer"):
        config.pop(key, None)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=job.zero_init):
        model = job.model()
    return deepspeed.initialize(model=model, config=config)[0]


def batch(
    step: int, micro: int, dtype: torch.dtype, rank: int | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs ``[4, 11]`` and targets ``[4, 5]`` of one micro-batch of this rank or another."""
    if rank is None:
        rank = dist.get_rank()
    generator = torch.Generator().manual_seed(10007 * step + 101 * micro + rank)
    x = torch.randn(4, 11, dtype=torch.float32, generator=generator)
    y = torch.sin(2 * x[:, :5]) + x[:, 5:10]
    return x.to(dtype), y.to(dtype)


def mse(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of the engine's output."""
    return torch.nn.functional.mse_loss(engine(x).float(), y.float())


def mean(value: Tensor) -> float:
    """Mean over ranks, in FP64."""
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def advance(job: Job, engine: Any, begin: int, end: int) -> list[float]:
    """Train steps ``begin .. end - 1``; losses averaged over ranks and micro-batches, one per
    step.
    """
    return [_step(job, engine, step) for step in range(begin, end)]


def _step(job: Job, engine: Any, step: int) -> float:
    if job.each_step is not None:
        job.each_step(engine, step)
    parts = []
    for micro in range(job.micro_batches):
        x, y = (job.batch or batch)(step, micro, DTYPES[job.dtype])
        loss = (job.loss or mse)(engine, x.to(DEVICE), y.to(DEVICE))
        engine.backward(loss)
        engine.step()
        parts.append(mean(loss))
    if job.after_step is not None:
        job.after_step(engine, step)
    return sum(parts) / len(parts)


def train(job: Job) -> list[float]:
    """Losses of a whole run, averaged over ranks, one per step."""
    with running(job) as engine:
        return advance(job, engine, 0, job.steps)


@contextmanager
def running(job: Job, begin: Callable[[Job], Any] | None = None) -> Iterator[Any]:
    """The engine of a run, or what else begins with it; destroyed at the end."""
    engine = (begin or start)(job)
    try:
        yield engine
    finally:
        close(engine)


def close(engine: Any) -> None:
    """Destroy an engine and let go of its memory, so that runs in one process do not disturb each
    other.
    """
    engine.destroy()
    del engine
    gc.collect()


def weights(engine: Any) -> dict[str, Tensor]:
    """Whole weights by name, FP32, on every rank."""
    result = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(param):
            result[name] = param.detach().float().clone()
    return result


def largest_difference(a: list[float], b: list[float]) -> float:
    """Largest difference of two loss curves, step by step."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Result:
    """Losses of a run, one per step, its final weights by name, and what else its job has seen on
    the way.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    seen: list[Any] = field(default_factory=list)


def run(job: Job) -> Result:
    """Train a job and gather its weights."""
    with running(job) as engine:
        return Result(advance(job, engine, 0, job.steps), weights(engine), job.seen)


def assert_equal(mine: Result, expected: Result, tolerance: float = 1e-5) -> None:
    """Losses, weights and what was seen, each within ``tolerance`` of the expected (relative where
    that is above 1).
    """
    torch.testing.assert_close(vars(mine), vars(expected), rtol=tolerance, atol=tolerance)


def in_plain_torch(job: Job, forward: Callable[[nn.Module, Tensor, int, int], Tensor]) -> Result:
    """The same training by one process that sees every rank's data; a parameter without gradient
    has zero.

    Args:
        job: FP32; its model, steps and micro-batches are used.
        forward: of (model, all ranks' inputs, step, micro-batch): the outputs.
    """
    torch.manual_seed(0)
    model = job.model()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(job.steps):
        parts = []
        for param in params:
            param.grad = torch.zeros_like(param)
        for micro in range(job.micro_batches):
            of_ranks = (batch(step, micro, torch.float32, rank) for rank in range(WORLD))
            x, y = (torch.cat(part) for part in zip(*of_ranks, strict=True))
            loss = nn.functional.mse_loss(forward(model, x, step, micro), y)
            (loss / job.micro_batches).backward()
            parts.append(float(loss))
        nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        losses.append(sum(parts) / len(parts))
    return Result(
        losses, {name: param.detach().clone() for name, param in model.named_parameters()}
    )
