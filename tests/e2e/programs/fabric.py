# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_clients.py`` runs with Lightning Fabric: three trainings, as
``clients.py`` has them.

Fabric's DeepSpeed strategy asks for CUDA devices; here CPUs answer. All else is Fabric's own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.accelerators import CUDAAccelerator
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.strategies import DeepSpeedStrategy
from torch import Tensor, nn

from tests.e2e.programs.shared import BLOCKS, STEPS, steps_of_engine
from zero_topo.leaving import leave


class AsCuda:
    """An accelerator of CPUs that passes for CUDA."""

    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cpu", index) for index in devices]


class OverGloo:
    """A strategy of CPUs."""

    root_device = torch.device("cpu", 0)

    def _get_process_group_backend(self) -> str:
        return "gloo"


class Cpus(AsCuda, CUDAAccelerator):
    """Fabric's."""


class Strategy(OverGloo, DeepSpeedStrategy):
    """Fabric's."""


def ds_config(block: dict[str, Any] | None) -> dict[str, Any]:
    """ZeRO-3 with or without a block, for an optimizer that DeepSpeed does not know."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": False}
    config: dict[str, Any] = {"zero_allow_untested_optimizer": True, "zero_optimization": zero}
    return config | ({} if block is None else {"zero_topo": block})


def network() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))


def mean(loss: Tensor) -> float:
    """Over ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def run(block: dict[str, Any] | None) -> dict[str, Any]:
    """Losses of a training, mean over ranks, and how many of its steps zero_topo took."""
    ranks = int(os.environ["WORLD_SIZE"])
    strategy, started = Strategy(config=ds_config(block)), TorchElasticEnvironment()
    fabric = Fabric(accelerator=Cpus(), devices=ranks, strategy=strategy, plugins=[started])
    fabric.launch()
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    numbers = torch.Generator().manual_seed(fabric.global_rank)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(8, 32, generator=numbers)
        loss = nn.functional.mse_loss(model(x), torch.sin(x[:, :8]))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return {"losses": losses, "topo": steps_of_engine(model._forward_module)}


def main(folder: Path) -> None:
    """The three trainings; rank 0 writes their losses."""
    found = {name: run(block) for name, block in BLOCKS.items()}
    if dist.get_rank() == 0:
        (folder / "fabric.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
