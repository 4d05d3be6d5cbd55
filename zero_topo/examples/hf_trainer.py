# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Train a small Llama with Hugging Face's Trainer; to zero_topo belong its import and the block of
the DeepSpeed JSON.

    deepspeed --no_local_rank --num_accelerators 8 zero_topo/examples/hf_trainer.py --steps 20

A config of your own is given as --deepspeed_config FILE; --plain trains with stock ZeRO-3.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from transformers import Trainer, TrainingArguments, set_seed

import zero_topo
from zero_topo.examples.hf_model import Windows, deepspeed_config, join, llama, with_lora
from zero_topo.examples.process import behave


def train(
    config: dict[str, Any],
    output: Path,
    steps: int = 20,
    save_every: int = 0,
    resume: Path | None = None,
    lora: int = 0,
) -> Trainer:
    """Train, and return the Trainer, whose ``state.log_history`` holds the loss of each step.

    Args:
        config: the DeepSpeed config.
        output: folder for checkpoints.
        steps: optimizer steps.
        save_every: steps between checkpoints; 0 for none.
        resume: the checkpoint to go on from.
        lora: rank of adapters, which alone are trained then; 0 for none.
    """
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(output),
        deepspeed=config,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        weight_decay=0.01,
        lr_scheduler_type="constant",
        bf16=bool(config.get("bf16", {}).get("enabled", False)),
        save_strategy="steps" if save_every else "no",
        save_steps=save_every or steps,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=get_accelerator().device_name() == "cpu",
        dataloader_pin_memory=False,
    )
    model = with_lora(llama(), lora) if lora else llama()
    trainer = Trainer(model=model, args=arguments, train_dataset=Windows(4096))
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    """Loss by step, mean over ranks."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train a small Llama with Hugging Face's Trainer.")
    parser.add_argument("--deepspeed_config", help="DeepSpeed JSON; default: this example's own")
    parser.add_argument("--plain", action="store_true", help='drop the config\'s "zero_topo" block')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="a checkpoint-N folder to go on from")
    parser.add_argument(
        "--lora",
        type=int,
        default=0,
        metavar="RANK",
        help="train adapters of that rank alone (PEFT)",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/hf-trainer"))
    args = parser.parse_args()
    behave()
    join()
    config = deepspeed_config(args.deepspeed_config, args.plain)
    trainer = train(config, args.output, args.steps, args.save_every, args.resume, args.lora)
    print(f"loss {losses(trainer)[0]:.4f} -> {losses(trainer)[-1]:.4f}")
    zero_topo.leave()


if __name__ == "__main__":
    main()
