# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_xpu.py`` runs: a training on the CPU, or on the XPU of ``tests/xpu``.

Started as ``xpu.py FILE SCHEME``; rank 0 writes losses, weights, and what served the device.
"""

from __future__ import annotations

import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

import zero_topo  # noqa: F401 (installs the hook)
from zero_topo.quant import spec

spec.BLOCK = 64  # layers are small
STEPS, MICRO_BATCHES = 3, 2
BLOCKS = {
    "topo": {
        "scheme": "topo",
        "quantize": {"weights": "int8", "secondary": "int8"},
    },
    "codes": {"scheme": "topo", "quantize": {"resident": "int8"}},
}


def main(path: str, scheme: str) -> None:
    """Train, save, load and offload."""
    backend = "gloo"
    if get_accelerator().device_name() == "xpu":
        from tests.xpu.transport import BACKEND as backend
    deepspeed.init_distributed(dist_backend=backend)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.LayerNorm(96), nn.Linear(96, 5))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "overlap_comm": True,
        },
        "zero_topo": {
            "topology": {"emulated": {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 1}},
            **BLOCKS[scheme],
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    losses, generator = [], torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        for _ in range(MICRO_BATCHES):
            x = torch.randn(4, 64, generator=generator).to(engine.device)
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        if step == 0:
            engine.optimizer.offload_states()
            engine.optimizer.reload_states()
    weights = []
    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            weights.append(parameter.detach().float().to("cpu", copy=True))
    topo = engine.optimizer.topo
    streams = [queue._stream is not None for queue in (topo.queues.gathers, topo.queues.updates)]
    if dist.get_rank() == 0:
        found = {
            "losses": losses,
            "weights": weights,
            "device": engine.device.type,
            "streams": streams,
        }
        torch.save(found, path)
    engine.destroy()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
