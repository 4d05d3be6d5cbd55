# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A small training by DeepSpeed without zero_topo, which its caller may import or not."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

MICRO_BATCHES = 2


def config(**keys: Any) -> dict[str, Any]:
    """A DeepSpeed config with these keys."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **keys,
    }


def engine(keys: dict[str, Any]) -> Any:
    """The engine of a small network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.LayerNorm(96), nn.Linear(96, 5))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=keys)[0]


def train(engine: Any, begin: int, end: int) -> list[Tensor]:
    """This rank's losses of the micro-batches of some steps."""
    losses = []
    for micro in range(MICRO_BATCHES * begin, MICRO_BATCHES * end):
        generator = torch.Generator().manual_seed(1000 * micro + dist.get_rank())
        x = torch.randn(4, 64, generator=generator).to(engine.device)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def weights(engine: Any, partitioned: bool = True) -> list[Tensor]:
    """Whole weights on the host."""
    found = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters(parameter, enabled=partitioned):
            found.append(parameter.detach().float().to("cpu", copy=True))
    return found
