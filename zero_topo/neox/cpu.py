# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""NeoX on CPUs: everything that stands in for a CUDA device, in one place.

NeoX calls torch.cuda for functions that any device could serve. This module replaces them by CPU
versions. Features not needed to train, save and resume (generation, MoE, memory profiles) are
unchanged. It is meant for checking a config or a change on a machine without GPUs, not for speed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

OVERRIDES: Mapping[str, Any] = {
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
    "scaled_upper_triang_masked_softmax_fusion": False,
    "scaled_masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_dropout_fusion": False,
    "rope_fusion": False,
    "layernorm_fusion": False,
    "rmsnorm_fusion": False,
}
"""NeoX's keys that a CPU run has no choice about."""


def choose_cpu() -> None:
    """Have DeepSpeed take the CPU; before its first import."""
    os.environ["DS_ACCELERATOR"] = "cpu"


def stand_in(ranks_per_node: int) -> None:
    """Answer for torch.cuda.

    Args:
        ranks_per_node: number of devices reported to NeoX.
    """
    import torch

    cuda: Any = torch.cuda
    cuda.device_count = lambda: ranks_per_node
    # A function of its own for each name: torch.compile's tables refuse one object under two names.
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: None  # NeoX has just set the CPU's own
    cuda.LongTensor = torch.LongTensor
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self


def adapt_neox() -> None:
    """Replace the parts of NeoX that require CUDA or an old numpy. ``megatron`` must be
    importable.
    """
    import deepspeed.ops.adam
    import torch

    training: Any = import_module("megatron.training")
    tokenizer: Any = import_module("megatron.tokenizer.tokenizer")
    training.initialize_megatron = partial(training.initialize_megatron, allow_no_cuda=True)
    tokenizer.CharLevelTokenizer.tokenize = _bytes_of
    deepspeed.ops.adam.FusedAdam = torch.optim.AdamW  # the same update, and nothing to compile


def _bytes_of(tokenizer: Any, text: str) -> list[int]:
    """NeoX calls numpy.fromstring on text, which numpy 2 refuses."""
    return list(text.encode("utf-8"))
