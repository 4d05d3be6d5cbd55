# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_clients.py`` runs: a trainer of another library, with three DeepSpeed
configs; see there.

Started as ``clients.py CLIENT FOLDER``, which takes ``CLIENT.json``: losses by config. Models are
small and have random weights, texts are generated, and nothing is downloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.e2e.programs.hugging_face import arguments, deepspeed_config, join, trained
from tests.e2e.programs.shared import BLOCKS, STEPS, finish

WORDS = ("red", "green", "blue", "warm", "cold", "old", "new", "sea", "sky", "hill")
LLAMA = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    use_cache=False,
    vocab_size=64,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


SHORT: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "save_strategy": "no",
    "bf16": False,
    "gradient_checkpointing": False,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Of the words above."""
    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    words = Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


def text(seed: int) -> str:
    """Words drawn at random."""
    drawn = torch.randint(len(WORDS), (6,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[index] for index in drawn)


def rows(**columns: Callable[[int], Any]) -> Dataset:
    """A data set of 64 rows."""
    return Dataset.from_list(
        [{name: of(index) for name, of in columns.items()} for index in range(64)]
    )


def sft(config: dict[str, Any], folder: Path) -> Any:
    """Supervised fine-tuning."""
    from trl import SFTConfig, SFTTrainer

    home = saved(folder)
    args = arguments(SFTConfig, config, folder, **SHORT, max_length=32)
    return SFTTrainer(home, args, train_dataset=rows(text=text), processing_class=tokenizer())


def saved(folder: Path) -> str:
    """A folder with a model of random weights and the tokenizer, as if it had been downloaded."""
    unset_hf_deepspeed_config()  # of the training before: the model is whole
    home = folder / "model"
    if dist.get_rank() == 0:
        LlamaForCausalLM(LLAMA).save_pretrained(home)
        tokenizer().save_pretrained(home)
    dist.barrier()
    return str(home)


def dpo(config: dict[str, Any], folder: Path, **more: Any) -> Any:
    """Preference optimization, next to a frozen reference that is an engine without an
    optimizer.
    """
    from trl import DPOConfig, DPOTrainer

    pairs = rows(
        prompt=text, chosen=lambda seed: text(seed + 100), rejected=lambda seed: text(seed + 200)
    )
    args = arguments(DPOConfig, config, folder, **SHORT, max_length=32)
    return DPOTrainer(
        saved(folder), None, args, train_dataset=pairs, processing_class=tokenizer(), **more
    )


def dpo_lora(config: dict[str, Any], folder: Path) -> Any:
    """Of adapters alone; the reference is the model without them."""
    from peft import LoraConfig

    lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
    return dpo(config, folder, peft_config=lora)


def grpo(config: dict[str, Any], folder: Path) -> Any:
    """Group relative policy optimization: it generates under gathered weights."""
    from trl import GRPOConfig, GRPOTrainer

    def count_red(completions: list[str], **_: Any) -> list[float]:
        return [float(completion.count("red")) for completion in completions]

    home = saved(folder)
    more = {**SHORT, "num_generations": 4, "max_completion_length": 8, "beta": 0.1}
    args = arguments(GRPOConfig, config, folder, **more)
    return GRPOTrainer(
        home, count_red, args, train_dataset=rows(prompt=text), processing_class=tokenizer()
    )


CLIENTS = {"sft": sft, "dpo": dpo, "dpo_lora": dpo_lora, "grpo": grpo}


def run(
    client: Callable[[dict[str, Any], Path], Any], folder: Path, block: dict[str, Any] | None
) -> dict[str, Any]:
    """Losses of a training, and how many of its steps zero_topo took."""
    config = deepspeed_config(block)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    set_seed(0)
    return trained(client(config, folder))


def main(client: str, folder: Path) -> None:
    """The three trainings; rank 0 writes their losses."""
    join()
    found = {name: run(CLIENTS[client], folder / name, block) for name, block in BLOCKS.items()}
    finish(folder / f"{client}.json", found)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
