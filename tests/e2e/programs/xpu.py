# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_xpu.py`` runs: a training on the CPU, or on the XPU of ``tests/xpu``.

Started as ``xpu.py FILE SCHEME``; rank 0 writes losses, weights, and what served the device.
"""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import zero_topo  # installs the hook
from tests.e2e.programs import loop
from zero_topo.quant import spec

spec.BLOCK = 64  # layers are small
BLOCKS = {
    "topo": {"scheme": "topo", "quantize": {"weights": "int8", "secondary": "int8"}},
    "codes": {"scheme": "topo", "quantize": {"resident": "int8"}},
}
TREE = {"emulated": {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 1}}


def main(path: str, scheme: str) -> None:
    """Train and offload."""
    backend = "gloo"
    if get_accelerator().device_name() == "xpu":
        from tests.xpu.transport import BACKEND as backend
    deepspeed.init_distributed(dist_backend=backend)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": True}
    block = {"topology": TREE, **BLOCKS[scheme]}
    engine = loop.engine(loop.config(zero_optimization=zero, zero_topo=block))
    losses = loop.train(engine, 0, 1)
    engine.optimizer.offload_states()
    engine.optimizer.reload_states()
    losses += loop.train(engine, 1, 3)
    queues = engine.optimizer.topo.queues
    found = {
        "losses": [float(loss) for loss in losses],
        "weights": loop.weights(engine),
        "device": engine.device.type,
        "streams": [queue._stream is not None for queue in (queues.gathers, queues.updates)],
    }
    if dist.get_rank() == 0:
        torch.save(found, path)
    engine.destroy()
    zero_topo.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
