# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_trainers.py`` runs: a Lightning module plain, with zero_topo, and
resumed; see there.

Started as ``lightning.py FOLDER``, which takes the checkpoints and ``lightning.json``.

Lightning's DeepSpeed strategy asks for CUDA devices; here CPUs answer. All else is Lightning's own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.accelerators import CUDAAccelerator
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero_topo
from tests.e2e.programs.shared import BLOCKS, finish

EPOCHS, STEPS, MICRO_BATCHES, BATCH = 2, 10, 2, 4  # steps of an epoch


class Cpus(CUDAAccelerator):
    """An accelerator of CPUs that passes for CUDA."""

    def setup_device(self, device: torch.device) -> None: ...

    def setup(self, trainer: pl.Trainer) -> None: ...

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


class Strategy(DeepSpeedStrategy):
    """A strategy of CPUs."""

    root_device = torch.device("cpu", 0)

    def _get_process_group_backend(self) -> str:
        return "gloo"


def ds_config(block: dict[str, Any] | None) -> dict[str, Any]:
    """ZeRO-3 with or without a block, for an optimizer that DeepSpeed does not know."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": False}
    config: dict[str, Any] = {"zero_allow_untested_optimizer": True, "zero_optimization": zero}
    return config | ({} if block is None else {"zero_topo": block})


class Net(pl.LightningModule):
    """A small network that keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        total = loss.detach().clone()
        dist.all_reduce(total)
        self.losses.append(float(total) / dist.get_world_size())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    block: dict[str, Any] | None, epochs: int, resume: Path | None = None
) -> tuple[pl.Trainer, Net]:
    """A trainer after so many epochs."""
    ranks = int(os.environ["WORLD_SIZE"])
    x = torch.randn(
        STEPS * MICRO_BATCHES * BATCH * ranks, 32, generator=torch.Generator().manual_seed(1)
    )
    batches = DataLoader(TensorDataset(x, torch.sin(x[:, :8])), batch_size=BATCH)
    trainer = pl.Trainer(
        accelerator=Cpus(),
        devices=ranks,
        strategy=Strategy(config=ds_config(block)),
        plugins=[TorchElasticEnvironment()],
        max_epochs=epochs,
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Net()
    trainer.fit(
        model, batches, ckpt_path=None if resume is None else str(resume), weights_only=False
    )
    return trainer, model


def main(folder: Path) -> None:
    """Four runs; rank 0 writes what came of them."""
    _, plain = fit(None, EPOCHS)
    trainer, whole = fit(BLOCKS["topo"], EPOCHS)
    sent = zero_topo.stats(trainer.strategy.deepspeed_engine).step_bytes
    first, half = fit(BLOCKS["topo"], 1)
    first.save_checkpoint(folder / "checkpoint")
    _, rest = fit(BLOCKS["topo"], EPOCHS, folder / "checkpoint")
    found = {
        "plain": plain.losses,
        "topo": whole.losses,
        "resumed": half.losses + rest.losses,
        "sent": sorted({f"{phase} {domain}" for phase, domain in sent}),
    }
    finish(folder / "lightning.json", found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
