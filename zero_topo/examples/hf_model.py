# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines what both Hugging Face examples use: a small Llama of bytes, text as a dataset, and a
DeepSpeed config.

The config says "auto" where Hugging Face knows the value, as its users write it; DeepSpeed never
sees that word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from zero_topo.config import load_deepspeed_config
from zero_topo.config.parts import ROOT
from zero_topo.examples.data import Corpus

if TYPE_CHECKING:
    from peft import PeftModel

CONTEXT = 64


def join() -> None:
    """Let DeepSpeed make the process group, because it would not recognise the one Hugging Face
    makes on a CPU.
    """
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())


def deepspeed_config(path: str | None, plain: bool = False) -> dict[str, Any]:
    """The DeepSpeed config of a run: the file's, or one for 8 ranks of this machine's CPU, FP32 and
    unquantized.

    Args:
        path: a DeepSpeed JSON, or None.
        plain: leave the "zero_topo" block out, so that stock ZeRO-3 trains.
    """
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True},
        },
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        ROOT: {
            "topology": {"emulated": {"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 2}},
            "scheme": "topo",
            "quantize": {"weights": None, "secondary": None, "gradients": None},
        },
    }
    if path is not None:
        config = load_deepspeed_config(path)
    return {key: value for key, value in config.items() if key != ROOT} if plain else config


def llama(layers: int = 2, width: int = 64) -> PreTrainedModel:
    """A Llama of random weights over bytes; under ZeRO-3 its parameters are partitioned as they are
    built.
    """
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config)


def with_lora(model: PreTrainedModel, rank: int) -> PeftModel:
    """The model frozen, with PEFT's adapters of that rank added to its attention."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return cast("PeftModel", get_peft_model(model, adapters))


class Windows(Dataset[dict[str, Tensor]]):
    """A dataset of non-overlapping windows of the example's text, as inputs of transformers'
    models.
    """

    def __init__(self, samples: int) -> None:
        text = Corpus.load(None, CONTEXT).train[: samples * CONTEXT]
        self._windows = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._windows[index].to(torch.long)
        return {"input_ids": tokens, "labels": tokens}
