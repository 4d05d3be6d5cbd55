# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A stand-in for GPT-NeoX: it calls DeepSpeed the way NeoX does, in the same order and with the
same arguments.

1. `args` carries the config as a dict in `args.deepspeed_config`; no `config=` is given.
2. The model is built under `zero.Init` of that dict, and then a second time from its
   specifications, by a method that opens no Init of its own; the second one is trained.
3. The optimizer, two groups of it, and the schedule are built by the caller.
4. `deepspeed.initialize` gets both, an `mpu` of Megatron's shape, `model_parameters=None`,
   `dist_init_required=False`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from tests.launcher.training import Net
from zero_topo.sync import AdamS


@dataclass
class Args:
    """What of NeoXArgs reaches DeepSpeed."""

    deepspeed_config: dict[str, Any]
    optimizer_type: str = "adam"
    zero_stage: int = 3
    local_rank: int = 0
    deepspeed: bool = True
    weight_decay: float = 0.1


class Pipe(nn.Module):
    """Layers and how to build them again."""

    def __init__(self, neox_args: Args) -> None:
        super().__init__()
        self.neox_args = neox_args
        self.net = Net()

    def to_sequential(self) -> nn.Module:
        """Everything anew, outside `zero.Init`."""
        return nn.Sequential(Net())


def mpu() -> SimpleNamespace:
    """Megatron's sizes and groups without model parallelism."""
    ranks = range(dist.get_world_size())
    alone = [dist.new_group([rank]) for rank in ranks][dist.get_rank()]
    found = {
        "model_parallel_world_size": 1,
        "model_parallel_rank": 0,
        "model_parallel_group": alone,
    }
    found |= {"data_parallel_world_size": len(ranks), "data_parallel_rank": dist.get_rank()}
    found["data_parallel_group"] = dist.group.WORLD
    return SimpleNamespace(
        **{f"get_{name}": lambda value=value: value for name, value in found.items()}
    )


def optimizer_of(model: nn.Module, args: Args) -> torch.optim.Optimizer:
    """Weights decay; biases and norms do not."""
    named = list(model.named_parameters())
    plain = [p for name, p in named if name.endswith("bias") or ".0." in name.split("blocks")[-1]]
    decayed = [p for _, p in named if not any(p is other for other in plain)]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    kind: Any = AdamS if args.optimizer_type == "adams" else torch.optim.AdamW
    return kind(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=args.weight_decay)


def setup(args: Args, pipe: type[Pipe] = Pipe) -> tuple[Any, nn.Module]:
    """NeoX's setup_model_and_optimizer: the engine, and the model as it was before DeepSpeed got
    it.
    """
    torch.manual_seed(1234)
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        built = pipe(args)
    model = built.to_sequential()
    optimizer = optimizer_of(model, args)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        args=args,
        lr_scheduler=schedule,
        dist_init_required=False,
        model_parameters=None,
        mpu=mpu(),
    )
    return engine, model
