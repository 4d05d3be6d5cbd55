# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Train a small model under accelerate's FSDP2 plugin: as accelerate shards it, and sharded by
zero_topo before ``prepare``; save and load by accelerate. torchrun starts it on two nodes of ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

import zero_topo.fsdp as topo
from zero_topo.examples.gpt import GPT


def accelerator(policy: str) -> Accelerator:
    """Return an accelerator with the plugin, which accelerate leaves out on CPUs."""
    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy=policy, transformer_cls_names_to_wrap=["Block"]
    )
    made = Accelerator(fsdp_plugin=plugin, cpu=True, gradient_accumulation_steps=2)
    for state in (PartialState(), made.state):
        state.distributed_type = DistributedType.FSDP
    made.state.fsdp_plugin = plugin
    return made


def trained(ours: bool, folder: Path) -> tuple[list[float], list[float], list[float]]:
    """Return losses and norms of three steps of two micro-batches, and the sums of the weights."""
    accelerate = accelerator("no_wrap" if ours else "transformer_based_wrap")
    torch.manual_seed(0)
    model: Any = GPT(2, 32, 2, 16)
    optimizer: Any
    if ours:
        machine = {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": dist.get_world_size() // 2}
        exact = {"weights": None, "gradients": None}
        block = {"topology": {"emulated": machine}, "scheme": "paper", "quantize": exact}
        topo.fully_shard(model, block)
        optimizer = topo.shard_optimizer(torch.optim.AdamW, model, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerate.prepare(model, optimizer)
    assert accelerate.is_fsdp2
    losses, norms = [], []
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, 256, (2, 17), generator=generator)
    for _ in range(6):
        with accelerate.accumulate(model):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            accelerate.backward(loss)
            if accelerate.sync_gradients:
                norm = accelerate.clip_grad_norm_(model.parameters(), 0.5)
                norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerate.reduce(loss.detach(), "mean")))
    sums = weight_sums(model)
    accelerate.save_state(str(folder))
    with torch.no_grad():
        for param in model.parameters():
            nn.init.zeros_(param)
    accelerate.load_state(str(folder))
    assert weight_sums(model) == sums
    return losses, norms, sums


def weight_sums(model: Any) -> list[float]:
    """Return the sum of each parameter."""
    return [float(param.detach().full_tensor().sum()) for param in model.parameters()]


def main() -> None:
    """Compare both trainings."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    expected = trained(False, folder / "plain")
    found = trained(True, folder / "ours")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    losses, norms, _ = found
    assert losses[-1] < losses[0] - 0.1 and max(norms) > 0.5
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
