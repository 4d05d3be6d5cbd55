# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Loss as in stock DeepSpeed ZeRO-3, from the same seeds, with clipping on and replicas compared
after every step.

A step that the engine forgets is seen by this comparison, on which all tests of parity rely: with
one taken out losses must differ. What other steps are for, threads show (`tests/hazards.md`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from torch import Tensor

from tests.launcher.training import Job, advance, block, largest_difference, running, train
from tests.marks import core, cores
from tests.ranks.worlds import whole_weights
from zero_topo.collectives.queue import Handle
from zero_topo.engine.stage3 import Stage3

pytestmark = pytest.mark.eight_ranks
STEPS = 6
SCHEMES = ("zero3", "zero++", "hsdp", "paper", "topo")


@cache
def stock(dtype: str, micro_batches: int) -> tuple[float, ...]:
    """The loss curve of stock ZeRO-3; the same on every rank, so every rank runs it or none."""
    return tuple(train(Job(dtype=dtype, micro_batches=micro_batches, steps=STEPS)))


@pytest.mark.parametrize(
    ("scheme", "micro_batches"),
    [core("zero++", 2), ("topo", 2), *((scheme, 1) for scheme in SCHEMES)],
)
def test_fp32_losses_equal_stock_zero3(scheme: str, micro_batches: int) -> None:
    """Unquantized: at most 1e-5 apart. Several micro-batches where the secondary is captured, and
    where it is not.
    """
    mine = train(Job(zero_topo=block(scheme), micro_batches=micro_batches, steps=STEPS))
    assert largest_difference(mine, list(stock("fp32", micro_batches))) <= 1e-5


@pytest.mark.parametrize("scheme", cores(("topo",), SCHEMES))
def test_bf16_losses_equal_stock_zero3(scheme: str) -> None:
    """Unquantized: at most 3e-3 apart."""
    mine = train(Job(zero_topo=block(scheme), dtype="bf16", steps=STEPS))
    assert largest_difference(mine, list(stock("bf16", 1))) <= 3e-3


DROPPING = Job(zero_topo=block("topo", debug_checks=False), steps=STEPS)


def cross_node_sync(topo: Stage3) -> None:
    topo.gradients.mode.start = lambda *_: Handle()  # type: ignore[method-assign]


def publish(topo: Stage3) -> None:
    weights = whole_weights(topo)
    update = weights.update

    def unpublished(masters: Tensor, param_indices: range) -> None:
        update(masters, param_indices)
        weights._updates.clear()
        weights._stale.clear()
        weights._renew(param_indices)

    weights.update = unpublished  # type: ignore[assignment,method-assign]


def zeroing_of_gradients(topo: Stage3) -> None:
    end_step = topo.gradients.end_step

    def kept(skipped: bool) -> None:
        stored = topo.gradients.buffer.clone()
        end_step(skipped)
        topo.gradients.buffer.copy_(stored)

    topo.gradients.end_step = kept  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "drop", [cross_node_sync, publish, zeroing_of_gradients], ids=lambda drop: drop.__name__
)
def test_what_the_engine_forgets_is_seen(drop: Callable[[Stage3], None]) -> None:
    with running(DROPPING) as engine:
        drop(engine.optimizer.topo)
        assert (
            largest_difference(advance(DROPPING, engine, 0, STEPS), list(stock("fp32", 1))) > 1e-3
        )
