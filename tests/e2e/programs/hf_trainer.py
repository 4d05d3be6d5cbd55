# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_hugging_face.py`` runs: the Trainer example plain, with zero_topo, resumed.

Started as ``hf_trainer.py FOLDER``, which takes the checkpoints and ``trainer.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import Trainer

import zero_topo
from zero_topo.examples.hf_model import deepspeed_config, join
from zero_topo.examples.hf_trainer import Settings, losses, train
from zero_topo.examples.process import leave

STEPS, SAVED = 20, 10


def trained(settings: Settings) -> dict[str, Any]:
    """A run's losses, and how many of its steps zero_topo took; its engine is gone afterwards."""
    trainer = train(settings)
    result = {"losses": losses(trainer), "topo": steps_of(trainer)}
    trainer.accelerator.free_memory()
    return result


def steps_of(trainer: Trainer) -> int | None:
    """Steps of zero_topo's engine; None if it is a stock one."""
    try:
        return zero_topo.stats(trainer.model_wrapped).steps
    except ValueError:
        return None


def main(folder: Path) -> None:
    """Three runs; rank 0 writes what came of them."""
    join()
    topo = deepspeed_config(None)
    found = {
        "plain": trained(Settings(deepspeed_config(None, plain=True), folder / "plain", STEPS)),
        "topo": trained(Settings(topo, folder / "topo", STEPS, save_every=SAVED)),
        "resumed": trained(Settings(topo, folder / "again", STEPS, resume=folder / "topo" / f"checkpoint-{SAVED}")),
    }
    if dist.get_rank() == 0:
        (folder / "trainer.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
