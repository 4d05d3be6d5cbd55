# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Compare a whole run, losses and final weights, with the same run under stock ZeRO-3 or in plain
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.launcher.training import Job, advance, batch, running, weights


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
    torch.testing.assert_close(mine.losses, expected.losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine.weights, expected.weights, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine.seen, expected.seen, rtol=tolerance, atol=tolerance)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The harness's default optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def in_plain_torch(
    job: Job,
    forward: Callable[[nn.Module, Tensor, int, int], Tensor],
    build: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    clip: float = 0.5,
) -> Result:
    """The same training by one process that sees every rank's data; a parameter without gradient
    has zero.

    Args:
        job: FP32; its model, steps and micro-batches are used.
        forward: of (model, all ranks' inputs, step, micro-batch): the outputs.
        build: of the model: its optimizer.
        clip: norm that gradients are clipped to.
    """
    torch.manual_seed(0)
    model = job.model()
    params = list(model.parameters())
    optimizer = build(model)
    losses = []
    for step in range(job.steps):
        parts = []
        for param in params:
            param.grad = torch.zeros_like(param)
        for micro in range(job.micro_batches):
            x, y = (everyones(part) for part in batch(step, micro, torch.float32))
            loss = nn.functional.mse_loss(forward(model, x, step, micro), y)
            (loss / job.micro_batches).backward()
            parts.append(float(loss))
        nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        losses.append(sum(parts) / len(parts))
    return Result(
        losses, {name: param.detach().clone() for name, param in model.named_parameters()}
    )


def everyones(own: Tensor) -> Tensor:
    """All ranks' tensors, one after the other."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts)
