# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Loss on three levels as in stock DeepSpeed ZeRO-3, from the same seeds, with clipping on and
replicas compared after every step.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.launcher.training import Job, block, largest_difference, train

pytestmark = pytest.mark.eight_ranks


@cache
def stock(dtype: str, micro_batches: int) -> tuple[float, ...]:
    """The loss curve of stock ZeRO-3; the same on every rank, so every rank runs it or none."""
    return tuple(train(Job(dtype=dtype, micro_batches=micro_batches, steps=6)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("scheme", "micro_batches"),
    [("zero3", 1), ("zero++", 2), ("hsdp", 1), ("paper", 1), ("topo", 2)],
)
def test_losses_equal_stock_zero3(scheme: str, micro_batches: int, dtype: str) -> None:
    """Unquantized: at most 1e-5 apart in FP32, 3e-3 in BF16."""
    mine = train(Job(zero_topo=block(scheme), micro_batches=micro_batches, dtype=dtype, steps=6))
    tolerance = {"fp32": 1e-5, "bf16": 3e-3}[dtype]
    assert largest_difference(mine, list(stock(dtype, micro_batches))) <= tolerance
