# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_clients.py`` runs: a trainer of another library, with three DeepSpeed
configs; see there.

Started as ``clients.py CLIENT FOLDER``, which takes ``CLIENT.json``: losses by config. Models are
small and have random weights, texts are generated, and nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.e2e.programs.hugging_face import deepspeed_config, join, losses
from tests.e2e.programs.shared import BLOCKS, STEPS, steps_of_engine
from zero_topo.config.parts import ROOT
from zero_topo.leaving import leave

WORDS = ("red", "green", "blue", "warm", "cold", "old", "new", "sea", "sky", "hill")
SIZES = {
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    use_cache=False,
    **SIZES,
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Of the words above."""
    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    words = Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


def text(seed: int, length: int = 6) -> str:
    """Words drawn at random."""
    drawn = torch.randint(len(WORDS), (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[index] for index in drawn)


def rows(**columns: Callable[[int], Any]) -> Dataset:
    """A data set of 64 rows."""
    return Dataset.from_list(
        [{name: of(index) for name, of in columns.items()} for index in range(64)]
    )


def arguments(kind: Any, config: dict[str, Any], folder: Path, **more: Any) -> Any:
    """A trainer's arguments."""
    return kind(
        output_dir=str(folder),
        deepspeed=config,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        weight_decay=0.01,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        **more,
    )


def sft(config: dict[str, Any], folder: Path) -> Any:
    """Supervised fine-tuning."""
    from trl import SFTConfig, SFTTrainer

    home = saved(LlamaForCausalLM, LLAMA, folder)
    args = arguments(SFTConfig, config, folder, max_length=32)
    return SFTTrainer(home, args, train_dataset=rows(text=text), processing_class=tokenizer())


def saved(kind: Any, shape: Any, folder: Path) -> str:
    """A folder with a model of random weights and the tokenizer, as if it had been downloaded."""
    unset_hf_deepspeed_config()  # of the training before: the model is whole
    home = folder / "model"
    if dist.get_rank() == 0:
        kind(shape).save_pretrained(home)
        tokenizer().save_pretrained(home)
    dist.barrier()
    return str(home)


def _pairs() -> Dataset:
    return rows(
        prompt=text, chosen=lambda seed: text(seed + 100), rejected=lambda seed: text(seed + 200)
    )


def dpo(config: dict[str, Any], folder: Path) -> Any:
    """Preference optimization, next to a frozen reference that is an engine without an
    optimizer.
    """
    from trl import DPOConfig, DPOTrainer

    home = saved(LlamaForCausalLM, LLAMA, folder)
    args = arguments(DPOConfig, config, folder, max_length=32)
    return DPOTrainer(home, None, args, train_dataset=_pairs(), processing_class=tokenizer())


def dpo_lora(config: dict[str, Any], folder: Path) -> Any:
    """Of adapters alone; the reference is the model without them."""
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
    home = saved(LlamaForCausalLM, LLAMA, folder)
    args = arguments(DPOConfig, config, folder, max_length=32)
    return DPOTrainer(
        home, None, args, train_dataset=_pairs(), processing_class=tokenizer(), peft_config=lora
    )


def kto(config: dict[str, Any], folder: Path) -> Any:
    """Preferences of single answers."""
    from trl import KTOConfig, KTOTrainer

    data = rows(
        prompt=text, completion=lambda seed: text(seed + 100), label=lambda seed: seed % 2 == 0
    )
    home = saved(LlamaForCausalLM, LLAMA, folder)
    args = arguments(KTOConfig, config, folder, max_length=32)
    return KTOTrainer(home, None, args, train_dataset=data, processing_class=tokenizer())


def reward(config: dict[str, Any], folder: Path) -> Any:
    """A reward model."""
    from trl import RewardConfig, RewardTrainer

    home = saved(
        LlamaForSequenceClassification, LlamaConfig(**{**LLAMA.to_dict(), "num_labels": 1}), folder
    )
    args = arguments(RewardConfig, config, folder, max_length=32)
    return RewardTrainer(home, args, train_dataset=_pairs(), processing_class=tokenizer())


def grpo(config: dict[str, Any], folder: Path) -> Any:
    """Group relative policy optimization: it generates under gathered weights."""
    from trl import GRPOConfig, GRPOTrainer

    def count_red(completions: list[str], **_: Any) -> list[float]:
        return [float(completion.count("red")) for completion in completions]

    home = saved(LlamaForCausalLM, LLAMA, folder)
    args = arguments(
        GRPOConfig, config, folder, num_generations=4, max_completion_length=8, beta=0.1
    )
    return GRPOTrainer(
        home, count_red, args, train_dataset=rows(prompt=text), processing_class=tokenizer()
    )


def seq2seq(config: dict[str, Any], folder: Path) -> Any:
    """An encoder and a decoder, with generated answers in the evaluation."""
    sizes = {
        f"{part}_{name}": n
        for part in ("encoder", "decoder")
        for name, n in (("layers", 1), ("ffn_dim", 64))
    }
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    shape: dict[str, Any] = {**SIZES, **sizes, **heads, "d_model": 64, "decoder_start_token_id": 1}
    words = tokenizer()
    data = rows(
        input_ids=lambda seed: words(text(seed))["input_ids"],
        labels=lambda s: words(text(s + 9))["input_ids"],
    )
    home = saved(BartForConditionalGeneration, BartConfig(**shape), folder)
    args = arguments(
        Seq2SeqTrainingArguments, config, folder, predict_with_generate=True, eval_strategy="steps"
    )
    args.eval_steps = STEPS // 2
    model = BartForConditionalGeneration.from_pretrained(home)
    collator = DataCollatorForSeq2Seq(words, model)
    return Seq2SeqTrainer(
        model, args, collator, data, data.select(range(8)), processing_class=words
    )


def sentences(config: dict[str, Any], folder: Path) -> Any:
    """Embeddings of sentences."""
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling, Transformer

    shape = BertConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
    )
    home = saved(BertModel, shape, folder)
    args = arguments(SentenceTransformerTrainingArguments, config, folder)
    model = SentenceTransformer(modules=[Transformer(home), Pooling(64)], device="cpu")
    data = rows(anchor=text, positive=lambda seed: text(seed, 5))
    return SentenceTransformerTrainer(model, args, data, loss=MultipleNegativesRankingLoss(model))


CLIENTS = {
    client.__name__: client
    for client in (sft, dpo, dpo_lora, kto, reward, grpo, seq2seq, sentences)
}


def run(
    client: Callable[[dict[str, Any], Path], Any], folder: Path, block: dict[str, Any] | None
) -> dict[str, Any]:
    """Losses of a training, and how many of its steps zero_topo took."""
    config = {**deepspeed_config(plain=True), **({} if block is None else {ROOT: block})}
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    set_seed(0)
    trainer = client(config, folder)
    trainer.train()
    found = {"losses": losses(trainer), "topo": steps_of_engine(trainer.model_wrapped)}
    trainer.accelerator.free_memory()
    return found


def main(client: str, folder: Path) -> None:
    """The three trainings; rank 0 writes their losses."""
    join()
    found = {name: run(CLIENTS[client], folder / name, block) for name, block in BLOCKS.items()}
    if dist.get_rank() == 0:
        (folder / f"{client}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
