# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_trainers.py`` runs: a Hugging Face example plain, with zero_topo, and resumed; see there.

Started as ``hugging_face.py trainer|lora|accelerate FOLDER``, which takes the states, the weights and ``<verb>.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Trainer

import zero_topo
from zero_topo.examples.hf_accelerate import Run, start
from zero_topo.examples.hf_model import deepspeed_config, join
from zero_topo.examples.hf_trainer import Settings, losses, train
from zero_topo.examples.process import leave

STEPS, SAVED = 20, 10


def with_trainer(folder: Path, lora: int = 0) -> dict[str, Any]:
    """Three runs, the last from the second's checkpoint."""
    topo, saved = deepspeed_config(None), folder / "topo" / f"checkpoint-{SAVED}"
    return {
        "plain": trained(Settings(deepspeed_config(None, plain=True), folder / "plain", STEPS, lora=lora)),
        "topo": trained(Settings(topo, folder / "topo", STEPS, save_every=SAVED, lora=lora)),
        "resumed": trained(Settings(topo, folder / "again", STEPS, resume=saved, lora=lora)),
    }


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


def with_accelerate(folder: Path) -> dict[str, Any]:
    """Twenty steps plain; twenty with the state saved in the middle, and the last ten from there in a new engine."""
    run = start(deepspeed_config(None, plain=True))
    plain = run.train(0, STEPS)
    run.accelerator.free_memory()
    run = start(deepspeed_config(None))
    losses = run.train(0, SAVED)
    run.accelerator.save_state(str(folder / "state"))
    losses += run.train(SAVED, STEPS)
    steps, saved = zero_topo.stats(run.model).steps, saved_differs(run, folder)
    run.accelerator.free_memory()
    run = start(deepspeed_config(None))
    torch.manual_seed(1)
    run.accelerator.load_state(str(folder / "state"))
    resumed = run.train(SAVED, STEPS)
    run.accelerator.free_memory()
    return {"plain": plain, "losses": losses, "topo": steps, "saved": saved, "resumed": resumed}


def saved_differs(run: Run, folder: Path) -> float:
    """Largest difference between the engine's weights and those that ``save_model`` writes."""
    run.accelerator.save_model(run.model, str(folder))
    run.accelerator.wait_for_everyone()
    saved, worst = load_file(folder / "model.safetensors"), 0.0
    for name, parameter in run.accelerator.unwrap_model(run.model).named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            worst = max(worst, float((saved[name] - parameter.detach()).abs().max()))
    return worst


def main(verb: str, folder: Path) -> None:
    """The runs; rank 0 writes what came of them."""
    join()
    programs: dict[str, Callable[[Path], dict[str, Any]]] = {
        "trainer": with_trainer,
        "lora": partial(with_trainer, lora=8),
        "accelerate": with_accelerate,
    }
    found = programs[verb](folder)
    if dist.get_rank() == 0:
        (folder / f"{verb}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
