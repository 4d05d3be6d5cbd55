# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_trainers.py`` runs: a Lightning module plain, with zero_topo, and resumed; see there.

Started as ``lightning.py FOLDER``, which takes the checkpoints and ``lightning.json``.

Lightning's DeepSpeed strategy asks for CUDA devices; here CPUs answer. All else is Lightning's own.
"""

from __future__ import annotations

import json
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
from tests.e2e.programs.fabric import AsCuda, OverGloo
from zero_topo.hook.leaving import leave

EPOCHS, STEPS, MICRO_BATCHES, BATCH = 2, 10, 2, 4  # steps of an epoch
BLOCK = {
    "topology": {"emulated": {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 2}},
    "scheme": "topo",
    "quantize": {"weights": None, "secondary": None, "gradients": None},
}


class Cpus(AsCuda, CUDAAccelerator):
    """Lightning's."""

    def setup(self, trainer: pl.Trainer) -> None: ...


class Strategy(OverGloo, DeepSpeedStrategy):
    """Lightning's."""


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
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.losses.append(float(mean) / dist.get_world_size())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(block: dict[str, Any] | None, epochs: int, resume: Path | None = None) -> tuple[pl.Trainer, Net]:
    """A trainer after so many epochs."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": False}
    config: dict[str, Any] = {"zero_allow_untested_optimizer": True, "zero_optimization": zero}
    config |= {} if block is None else {"zero_topo": block}
    ranks = int(os.environ["WORLD_SIZE"])
    x = torch.randn(STEPS * MICRO_BATCHES * BATCH * ranks, 32, generator=torch.Generator().manual_seed(1))
    batches = DataLoader(TensorDataset(x, torch.sin(x[:, :8])), batch_size=BATCH)
    trainer = pl.Trainer(
        accelerator=Cpus(),
        devices=ranks,
        strategy=Strategy(config=config),
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
    trainer.fit(model, batches, ckpt_path=None if resume is None else str(resume), weights_only=False)
    return trainer, model


def main(folder: Path) -> None:
    """Four runs; rank 0 writes what came of them."""
    _, plain = fit(None, EPOCHS)
    trainer, whole = fit(BLOCK, EPOCHS)
    sent = zero_topo.stats(trainer.strategy.deepspeed_engine).step_bytes
    first, half = fit(BLOCK, 1)
    first.save_checkpoint(folder / "checkpoint")
    _, rest = fit(BLOCK, EPOCHS, folder / "checkpoint")
    found: dict[str, Any] = {"plain": plain.losses, "topo": whole.losses, "resumed": half.losses + rest.losses}
    found["sent"] = sorted({f"{phase} {domain}" for phase, domain in sent})
    if dist.get_rank() == 0:
        (folder / "lightning.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
