# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_plain_deepspeed.py`` runs: ZeRO-1, 2 and 3 without a block, without the
hook and with it.

Started as ``plain_deepspeed.py FILE``. It imports zero_topo, and with it the hook, after the first
runs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

STEPS, MICRO_BATCHES = 5, 2
STAGES = (1, 2, 3)


def train(stage: int) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of this rank and whole weights after the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(11, 37), nn.Tanh(), nn.LayerNorm(37), nn.Linear(37, 5))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    losses, generator = [], torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(STEPS * MICRO_BATCHES):
        x = torch.randn(4, 11, generator=generator)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    weights = []
    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters(parameter, enabled=stage == 3):
            weights.append(parameter.detach().clone())
    engine.destroy()
    return losses, weights


def runs() -> dict[str, Any]:
    """What the stages compute, and whether the hook is installed."""
    return {
        "hook": getattr(DeepSpeedEngine, "_zero_topo_hook", False),
        "runs": {s: train(s) for s in STAGES},
    }


def main(path: str) -> None:
    """Every run without the hook, then with it; rank 0 writes."""
    deepspeed.init_distributed(dist_backend="gloo")
    found = [runs()]
    import zero_topo  # noqa: F401 (installs the hook)

    found.append(runs())
    if dist.get_rank() == 0:
        torch.save(found, path)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as zero_topo.examples.process.leave, without zero_topo


if __name__ == "__main__":
    main(sys.argv[1])
