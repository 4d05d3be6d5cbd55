# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A rank of NeoX on CPUs: ``neox_on_cpu.py CHECKOUT CONFIG.yml``, under torchrun.

NeoX calls torch.cuda for functions that any device could serve. This program replaces them by CPU
versions. A config without a block trains under plain ZeRO-3.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch

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


def stand_in(ranks_per_node: int) -> None:
    """Answer for torch.cuda.

    Args:
        ranks_per_node: number of devices reported to NeoX.
    """
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

    training: Any = import_module("megatron.training")
    tokenizer: Any = import_module("megatron.tokenizer.tokenizer")
    training.initialize_megatron = partial(training.initialize_megatron, allow_no_cuda=True)
    tokenizer.CharLevelTokenizer.tokenize = _bytes_of
    deepspeed.ops.adam.FusedAdam = torch.optim.AdamW  # the same update, and nothing to compile


def _bytes_of(tokenizer: Any, text: str) -> list[int]:
    """NeoX calls numpy.fromstring on text, which numpy 2 refuses."""
    return list(text.encode("utf-8"))


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed's first import
    stand_in(int(os.environ["LOCAL_WORLD_SIZE"]))
    from zero_topo.neox import adapt, train

    adapt.reach(sys.argv[1])
    adapt_neox()
    train.start(sys.argv[2:], OVERRIDES)
