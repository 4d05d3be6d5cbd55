# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Default quantization on real text: what a language model learns under it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.launcher.training import Job, block, train
from zero_topo.examples.data import Corpus
from zero_topo.examples.data import batch as text_batch
from zero_topo.examples.gpt import GPT, GPTConfig

pytestmark = pytest.mark.eight_ranks
CONTEXT = 32


@cache
def corpus() -> Corpus:
    return Corpus.load(None, CONTEXT)


def text_job(block: dict[str, Any] | None) -> Job:
    """A tiny byte-level GPT on the standard library, 200 steps in BF16, quantized as the scheme has it by default."""

    def draw(step: int, micro: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return text_batch(corpus().train, (8, CONTEXT), 0, step, dist.get_rank())

    return Job(
        model=lambda: GPT(GPTConfig(layers=1, width=64, heads=2, context=CONTEXT)),
        zero_topo=block,
        steps=200,
        dtype="bf16",
        loss=lambda engine, x, y: engine(x, y),
        batch=draw,
        ds={"zero_optimization": {"reduce_bucket_size": 10**6}},
    )


def test_default_quantization_learns_real_text_as_zero3_does() -> None:
    """INT8 gathers and INT4 scatter: mean loss of the last 20 of 200 steps within 1% of stock ZeRO-3's."""
    losses, stocks = train(text_job(block("topo", quantize={}))), train(text_job(None))
    assert losses[0] > 5 and losses[-1] < 3.2
    assert sum(losses[-20:]) / 20 == pytest.approx(sum(stocks[-20:]) / 20, rel=0.01)
