# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_trainers.py`` runs: Hugging Face's Trainer or Accelerate trains a small
Llama with unmodified ZeRO-3, with zero_topo, and resumed; see there.

Started as ``hugging_face.py VERB FOLDER``, which takes the states, the weights and ``<verb>.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import DummyOptim
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

from tests.e2e.programs.shared import BLOCKS, finish, steps_of_engine
from zero_topo.config.parts import ROOT
from zero_topo.examples.data import Corpus

STEPS, SAVED = 20, 10
CONTEXT = 64
SAMPLES = 4096


def join() -> None:
    """Let DeepSpeed make the process group: it does not use Hugging Face's on a CPU."""
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())


def deepspeed_config(block: dict[str, Any] | None) -> dict[str, Any]:
    """A config in FP32 as Hugging Face's users write it, with "auto" where it knows the value;
    unmodified ZeRO-3 trains without a block.
    """
    stage3 = {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    adam = {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": stage3,
    }
    return config if block is None else {**config, ROOT: block}


def llama() -> Any:
    """A small Llama of random weights over bytes; under ZeRO-3 it is partitioned as it is built."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config)


def windows() -> list[dict[str, torch.Tensor]]:
    """Parts of the example's text, as inputs of transformers' models."""
    text = Corpus.load(None, CONTEXT).train[: SAMPLES * CONTEXT].long()
    return [{"input_ids": tokens, "labels": tokens} for tokens in text.view(-1, CONTEXT)]


def arguments(kind: Any, config: dict[str, Any], folder: Path, **more: Any) -> Any:
    """A trainer's arguments."""
    return kind(
        output_dir=str(folder),
        deepspeed=config,
        learning_rate=1e-3,
        weight_decay=0.01,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **more,
    )


def train(
    name: str, folder: Path, save_every: int = 0, resume: Path | None = None, lora: int = 0
) -> dict[str, Any]:
    """Train with the Trainer.

    Args:
        name: of the block.
        folder: for checkpoints.
        save_every: steps between them; 0 for none.
        resume: the checkpoint to go on from.
        lora: rank of adapters, which alone are trained then; 0 for none.

    Returns:
        What :func:`trained` does.
    """
    set_seed(0)
    args = arguments(
        TrainingArguments,
        deepspeed_config(BLOCKS[name]),
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        save_strategy="steps" if save_every else "no",
        save_steps=save_every or STEPS,
    )
    model = llama()
    if lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "v_proj"]
        model = get_peft_model(
            model, LoraConfig(r=lora, target_modules=targets, task_type="CAUSAL_LM")
        )
    trainer = Trainer(model=model, args=args, train_dataset=windows())
    return trained(trainer, str(resume) if resume else None)


def trained(trainer: Any, resume: str | None = None) -> dict[str, Any]:
    """Loss by step, mean over ranks, and how many steps zero_topo took. The engine is gone then."""
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {"losses": losses, "topo": steps_of_engine(trainer.model_wrapped)}
    trainer.accelerator.free_memory()
    return result


@dataclass(frozen=True)
class Run:
    """An Accelerator with what it prepared."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    batches: DataLoader[Any]

    def train(self, first: int, end: int) -> list[float]:
        """Optimizer steps ``first .. end - 1``; loss by step, mean over ranks."""
        found = []
        batches = iter(self.accelerator.skip_first_batches(self.batches, first))
        for _ in range(first, end):
            loss = self.model(**next(batches)).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append(float(self.accelerator.gather(loss.detach()).mean()))
        return found

    def end(self, losses: list[float]) -> dict[str, Any]:
        """What :func:`trained` returns."""
        steps = steps_of_engine(self.model)
        self.accelerator.free_memory()
        return {"losses": losses, "topo": steps}


def start(name: str) -> Run:
    """Build and prepare everything."""
    AcceleratorState._reset_state()  # an earlier run of this process had another config
    backend = get_accelerator().communication_backend_name()
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=deepspeed_config(BLOCKS[name])),
        # Accelerate would find none on a CPU
        kwargs_handlers=[InitProcessGroupKwargs(backend=backend)],
    )
    set_seed(0)
    model = llama()
    batches: Any = DataLoader(windows(), batch_size=4)  # type: ignore[arg-type]
    optimizer = DummyOptim(model.parameters(), lr=1e-3)  # the config names the real one
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    return Run(accelerator, model, optimizer, batches)


def with_trainer(folder: Path, lora: int = 0) -> dict[str, Any]:
    """Three runs, the last from the second's checkpoint."""
    saved = folder / "topo" / f"checkpoint-{SAVED}"
    return {
        "plain": train("plain", folder / "plain", lora=lora),
        "topo": train("topo", folder / "topo", save_every=SAVED, lora=lora),
        "resumed": train("topo", folder / "again", resume=saved, lora=lora),
    }


def with_accelerate(folder: Path) -> dict[str, Any]:
    """Twenty steps plain; twenty with the state saved in the middle, and the last ten from there in
    a new engine.
    """
    run = start("plain")
    plain = run.end(run.train(0, STEPS))
    run = start("topo")
    losses = run.train(0, SAVED)
    run.accelerator.save_state(str(folder / "state"))
    losses += run.train(SAVED, STEPS)
    assert saved_differs(run, folder) == 0
    topo = run.end(losses)
    run = start("topo")
    torch.manual_seed(1)
    run.accelerator.load_state(str(folder / "state"))
    resumed = run.end(losses[:SAVED] + run.train(SAVED, STEPS))
    return {"plain": plain, "topo": topo, "resumed": resumed}


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
    finish(folder / f"{verb}.json", programs[verb](folder))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
