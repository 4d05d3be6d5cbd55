# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Training the way GPT-NeoX calls DeepSpeed, in the same order and with the same arguments, with
zero_topo put around it as `python -m zero_topo.neox` does.

1. `args` carries the config as a dict in `args.deepspeed_config`; no `config=` is given.
2. The model is built under `zero.Init` of that dict, and then a second time from its
   specifications, by a method that opens no Init of its own; the second one is trained.
3. The optimizer, two groups of it, and the schedule are built by the caller.
4. `deepspeed.initialize` gets both, an `mpu` of Megatron's shape, `model_parameters=None`,
   `dist_init_required=False`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import zero_topo
from tests.launcher.checkpoints import assert_same_bits
from tests.launcher.parallel_models import Mpu
from tests.launcher.training import EMULATED, Job, Net, advance, close, ds_config, weights
from tests.marks import core
from zero_topo.neox.adapt import partitioned
from zero_topo.sync import AdamS

TOPO = {"topology": EMULATED, "scheme": "topo"}
SCAPE = TOPO | {"optimizer": "node", "sync": {"mode": "scape", "density": 0.5}}
JOB = Job(dtype="bf16", micro_batches=2)


@dataclass
class Args:
    """What of NeoXArgs reaches DeepSpeed. Its config names the optimizer that the caller builds."""

    deepspeed_config: dict[str, Any]
    local_rank: int
    zero_stage: int = 3
    deepspeed: bool = True


class Pipe(nn.Module):
    """Layers and how to build them again."""

    def __init__(self, neox_args: Args) -> None:
        super().__init__()
        self.neox_args = neox_args
        self.net = Net()

    def to_sequential(self) -> nn.Module:
        """Everything anew, outside `zero.Init`."""
        return nn.Sequential(Net())


class Adapted(Pipe):
    """NeoX's pipe as zero_topo.neox wraps it."""

    to_sequential = partitioned(Pipe.to_sequential)


def setup(block: dict[str, Any], kind: Any) -> Any:
    """NeoX's setup_model_and_optimizer: the engine of a model that is partitioned as it is built.

    Weights decay; biases and norms do not.
    """
    config = ds_config(JOB.under(block))
    config["optimizer"] = {"type": kind.__name__.removesuffix("W"), "params": {"lr": 1e-2}}
    args = Args(config, int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(1234)
    with deepspeed.zero.Init(config_dict_or_path=config):
        built = Adapted(args)
    model = built.to_sequential()
    assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
    params = [*model.parameters()]
    decayed = [param for param in params if len(param.ds_shape) > 1]
    plain = [param for param in params if len(param.ds_shape) < 2]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = kind(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        args=args,
        lr_scheduler=schedule,
        dist_init_required=False,
        model_parameters=None,
        mpu=Mpu(1),
    )
    return engine


@pytest.mark.parametrize(
    ("block", "kind"), [(TOPO, torch.optim.AdamW), core(SCAPE, AdamS)], ids=["topo", "scape"]
)
def test_a_resumed_run_goes_on_as_if_never_stopped(
    block: dict[str, Any], kind: Any, shared_path: Path
) -> None:
    """Weights after 2 steps, save, 2 more equal those after load and the same 2, bit for bit."""
    engine = setup(block, kind)
    advance(JOB, engine, 0, 2)
    engine.save_checkpoint(str(shared_path), tag="global_step2", client_state={"iteration": 2})
    losses = advance(JOB, engine, 2, 4)
    expected = weights(engine)
    close(engine)
    engine = setup(block, kind)
    stats = zero_topo.stats(engine)
    assert stats.config.plan.weights == 2
    assert stats.config.weights_spec is not None and stats.config.gradients_spec is not None
    _, client = engine.load_checkpoint(str(shared_path))
    assert client["iteration"] == 2
    assert advance(JOB, engine, 2, 4) == losses
    assert_same_bits(weights(engine), expected)
    close(engine)
