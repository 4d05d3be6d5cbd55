# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Loss as in stock DeepSpeed ZeRO-3, from the same seeds, with clipping on and replicas compared after every step.

Unquantized on a small network; with the default quantization, what a language model learns of real text.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.launcher.training import Job, block, largest_difference, train
from tests.marks import late
from zero_topo.examples.data import Corpus
from zero_topo.examples.data import batch as text_batch
from zero_topo.examples.gpt import GPT, GPTConfig

pytestmark = pytest.mark.eight_ranks
SCHEMES = ("zero3", "zero++", "hsdp", "paper", "topo")  # mics is hsdp: tests/unit/test_config_resolve.py
STEPS = 8
CONTEXT = 32


@cache
def stock(dtype: str, micro_batches: int) -> tuple[float, ...]:
    """The loss curve of stock ZeRO-3; the same on every rank, so every rank runs it or none."""
    return tuple(train(Job(dtype=dtype, micro_batches=micro_batches, steps=STEPS)))


@pytest.mark.parametrize(
    ("scheme", "micro_batches"),
    [("zero++", 1), ("hsdp", 1), ("topo", 4), *map(late, ("zero3", "paper", "topo"), (1, 1, 1)), late("zero++", 4)],
)
def test_fp32_losses_equal_stock_zero3(scheme: str, micro_batches: int) -> None:
    """Unquantized: at most 1e-5 apart. Several micro-batches where the secondary is captured, and where it is not."""
    mine = train(Job(zero_topo=block(scheme), micro_batches=micro_batches, steps=STEPS))
    assert largest_difference(mine, list(stock("fp32", micro_batches))) <= 1e-5


@pytest.mark.parametrize("scheme", ["topo", *map(late, ("zero3", "zero++", "hsdp", "paper"))])
def test_bf16_losses_equal_stock_zero3(scheme: str) -> None:
    """Unquantized: at most 3e-3 apart."""
    mine = train(Job(zero_topo=block(scheme), dtype="bf16", steps=STEPS))
    assert largest_difference(mine, list(stock("bf16", 1))) <= 3e-3


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


@pytest.mark.long
def test_default_quantization_learns_real_text_as_zero3_does() -> None:
    """INT8 gathers and INT4 scatter: mean loss of the last tenth of the steps within 1% of stock ZeRO-3's."""
    losses, stocks = (train(text_job(of)) for of in (block("topo", quantize={}), None))
    assert losses[0] > 5 and losses[-1] < 3.2
    assert sum(losses[-20:]) == pytest.approx(sum(stocks[-20:]), rel=0.01)
