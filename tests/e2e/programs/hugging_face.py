# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_trainers.py`` runs: a Hugging Face example plain, with zero_topo, and
resumed; see there.

Started as ``hugging_face.py VERB FOLDER``, which takes the states, the weights and ``<verb>.json``.
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
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import (
    DeepSpeedSequenceParallelConfig,
    DummyOptim,
    ParallelismConfig,
    set_seed,
)
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import Trainer

import zero_topo
from tests.e2e.programs.shared import steps_of_engine
from zero_topo.examples.hf_accelerate import Run, start
from zero_topo.examples.hf_model import CONTEXT, Windows, deepspeed_config, join, llama
from zero_topo.examples.hf_trainer import losses, train
from zero_topo.leaving import leave

STEPS, SAVED = 20, 10


def with_trainer(folder: Path, lora: int = 0) -> dict[str, Any]:
    """Three runs, the last from the second's checkpoint."""
    topo, saved = deepspeed_config(None), folder / "topo" / f"checkpoint-{SAVED}"
    return {
        "plain": trained(
            train(deepspeed_config(None, plain=True), folder / "plain", STEPS, lora=lora)
        ),
        "topo": trained(train(topo, folder / "topo", STEPS, save_every=SAVED, lora=lora)),
        "resumed": trained(train(topo, folder / "again", STEPS, resume=saved, lora=lora)),
    }


def trained(trainer: Trainer) -> dict[str, Any]:
    """A run's losses, and how many of its steps zero_topo took; its engine is gone afterwards."""
    result = {"losses": losses(trainer), "topo": steps_of(trainer)}
    trainer.accelerator.free_memory()
    return result


def steps_of(trainer: Trainer) -> int | None:
    """Steps that zero_topo took of a Trainer's."""
    return steps_of_engine(trainer.model_wrapped)


def with_accelerate(folder: Path) -> dict[str, Any]:
    """Twenty steps plain; twenty with the state saved in the middle, and the last ten from there in
    a new engine.
    """
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


def with_ulysses(folder: Path, plain: bool) -> dict[str, Any]:
    """Ten steps of Accelerate's recipe for sequences that two ranks share; its groups are made once
    in a process.
    """
    join()
    config = deepspeed_config(None, plain=plain)
    if not plain:
        config["zero_topo"]["topology"] = {
            "emulated": {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 2}
        }
    shared = ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=2,
        dp_shard_size=dist.get_world_size() // 2,
        sp_handler=DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        ),
    )
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=shared,
        kwargs_handlers=[
            InitProcessGroupKwargs(backend=get_accelerator().communication_backend_name())
        ],
    )
    set_seed(0)
    model, windows = llama(), Windows(4096)
    positions = torch.arange(CONTEXT)
    samples: Any = [{**windows[index], "position_ids": positions} for index in range(len(windows))]
    batches = DataLoader(samples, batch_size=1)
    model, _, batches = accelerator.prepare(model, DummyOptim(model.parameters(), lr=1e-3), batches)
    losses = [
        float(_whole_loss(accelerator, model, batch))
        for _, batch in zip(range(SAVED), batches, strict=False)
    ]
    return {"losses": losses, "topo": steps_of_engine(model)}


def _whole_loss(accelerator: Accelerator, model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """A step on the mean loss of a whole sequence, and that loss, mean over ranks.

    The recipe gathers the parts' losses with their gradient, which adds up the gradients that all
    ranks of a sequence have of a part; torch cannot do that in groups of gloo, so the factor is
    here.
    """
    group, labels = parallel_state_sp.get_sequence_parallel_group(), batch["shift_labels"]
    logits = model(**{key: value for key, value in batch.items() if key != "shift_labels"}).logits
    own = accelerator.unwrap_model(model).loss_function(
        logits, None, shift_labels=labels, vocab_size=logits.shape[-1]
    )
    counted = (labels != -100).sum()
    of_all = counted.clone()
    dist.all_reduce(of_all, group=group)
    loss = own * counted / of_all * dist.get_world_size(group)
    accelerator.backward(loss)
    return accelerator.gather(loss.detach()).mean()


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
        "ulysses": partial(with_ulysses, plain=False),
        "ulysses-plain": partial(with_ulysses, plain=True),
    }
    found = programs[verb](folder)
    if dist.get_rank() == 0:
        (folder / f"{verb}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
