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
from torch import Tensor

from tests.e2e.programs import loop


def train(stage: int) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of this rank and whole weights after the last step."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = loop.engine(loop.config(zero_optimization=zero))
    losses = loop.train(engine, 0, 5)
    weights = loop.weights(engine, stage == 3)
    engine.destroy()
    return losses, weights


def runs() -> dict[str, Any]:
    """What the stages compute, and whether the hook is installed."""
    return {
        "hook": getattr(DeepSpeedEngine, "_zero_topo_hook", False),
        "runs": {stage: train(stage) for stage in (1, 2, 3)},
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
    os._exit(0)  # as zero_topo.leave, without zero_topo


if __name__ == "__main__":
    main(sys.argv[1])
