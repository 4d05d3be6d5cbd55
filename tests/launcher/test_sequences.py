# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ulysses: ranks that share each sequence train as under stock ZeRO-3.

Stock's stage 3 averages gradients over all ranks, its stages 0 to 2 over the ranks of different
sequences: for the same update a loss is the whole sequence's, gathered with its gradient, as
Hugging Face's Trainer does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from torch import Tensor, nn

from tests.launcher.training import Job, Result, assert_equal, block, run
from tests.marks import late, often

TOKENS, WIDTH, HEADS = 8, 12, 4


@pytest.fixture(scope="module", params=[2, late(4)], autouse=True)
def ranks_of_a_sequence(request: pytest.FixtureRequest) -> Iterator[int]:
    """Groups as Hugging Face makes them; afterwards no engine has an mpu any more."""
    parallel_state_sp.initialize_sequence_parallel(request.param)
    yield request.param
    parallel_state_sp._release_sequence_parallel_groups()
    groups.mpu = None
    stock.cache_clear()


class Attending(nn.Module):
    """One causal attention between two matrices; a rank has its part of each sequence,
    ``[batch, tokens, 11]``.
    """

    def __init__(self) -> None:
        super().__init__()
        # The gradient of a key's bias is noise about zero
        self.inp = nn.Linear(11, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, 5)
        group = parallel_state_sp.get_sequence_parallel_group()
        self.attention = DistributedAttention(_attend, group, scatter_idx=2, gather_idx=1)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (HEADS, -1)) for part in self.inp(x).chunk(3, dim=-1))
        mixed: Tensor = self.out(self.attention(*heads, 0).flatten(2))
        return mixed


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All tokens of a few heads, ``[batch, tokens, heads, size]``."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(
        1, 2
    )


def part_of_a_sequence(step: int, micro: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """This rank's tokens of the sequences that its group shares, and their targets."""
    rank, ranks = (
        parallel_state_sp.get_sequence_parallel_rank(),
        parallel_state_sp.get_sequence_parallel_world_size(),
    )
    generator = torch.Generator().manual_seed(1009 * step + 101 * micro + dist.get_rank() // ranks)
    x = torch.randn(2, TOKENS, 11, generator=generator)
    y = x[..., :5].cumsum(1).sin()
    own = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    return x[:, own].to(dtype), y[:, own].to(dtype)


def job(zero_topo: dict[str, Any] | None) -> Job:
    """Three short steps, whose gradient norms are compared too: clipping and Adam would hide a
    factor.
    """
    seen: list[float] = []
    return Job(
        Attending,
        zero_topo,
        steps=3,
        micro_batches=2,
        batch=part_of_a_sequence,
        mpu=parallel_state_sp,
        after_step=lambda engine, _: seen.append(float(engine.get_global_grad_norm())),
        seen=seen,
    )


@cache
def stock() -> Result:
    """Of unmodified DeepSpeed ZeRO-3."""
    return run(job(None))


@pytest.mark.core
@pytest.mark.parametrize("scheme", often(("topo",), ("zero3", "zero++", "topo")))
def test_ranks_that_share_a_sequence_train_as_under_stock(scheme: str) -> None:
    assert_equal(run(job(block(scheme))), stock())
