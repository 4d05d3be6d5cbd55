# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Each thing the engine must not forget: forgetting it is seen by the comparison with stock ZeRO-3.

Every test first trains untouched and equals stock, then again with one step taken out, and must differ: so the parity
tests would fail if the engine lost that step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.launcher.training import Job, advance, block, largest_difference, running, train
from tests.ranks.worlds import whole_weights
from zero_topo.collectives.queue import Handle
from zero_topo.engine.stage3 import Stage3

pytestmark = pytest.mark.eight_ranks
Drop = Callable[[Stage3], None]
STEPS = 6
NO_PREFETCH = {"zero_optimization": {"stage3_prefetch_bucket_size": 0}}
"""A prefetch that the forward starts for the backward reads the primary, and would hide a stale secondary."""


def job(scheme: str = "topo", **more: Any) -> Job:
    return Job(zero_topo=block(scheme, **{"debug_checks": False, **more}), steps=STEPS, ds=NO_PREFETCH)


@cache
def stock() -> tuple[float, ...]:
    return tuple(train(Job(steps=STEPS)))


@cache
def untouched() -> tuple[float, ...]:
    return tuple(train(job()))


def losses_without(run: Job, drop: Drop) -> list[float]:
    with running(run) as engine:
        drop(engine.optimizer.topo)
        return advance(run, engine, 0, run.steps)


def assert_seen(drop: Drop) -> None:
    assert largest_difference(list(untouched()), list(stock())) <= 1e-5
    assert largest_difference(losses_without(job(), drop), list(stock())) > 1e-3


def test_a_dropped_cross_node_sync_is_seen() -> None:
    def drop(topo: Stage3) -> None:
        topo.gradients.mode.start = lambda *_: Handle(None, (), lambda: None)  # type: ignore[method-assign]

    assert_seen(drop)


def test_a_dropped_publish_is_seen() -> None:
    def drop(topo: Stage3) -> None:
        topo.weights.publish = lambda *_: whole_weights(topo)._renew(topo.weights.trained)  # type: ignore[method-assign]

    assert_seen(drop)


def test_a_gradient_buffer_that_is_not_zeroed_is_seen() -> None:
    def drop(topo: Stage3) -> None:
        end_step = topo.gradients.end_step

        def kept(skipped: bool) -> None:
            held = topo.gradients.buffer.clone()
            end_step(skipped)
            topo.gradients.buffer.copy_(held)

        topo.gradients.end_step = kept  # type: ignore[method-assign]

    assert_seen(drop)


def test_a_secondary_that_is_not_refreshed_is_seen() -> None:
    """It would be read stale; the version stamp turns that into an error on every rank."""
    run = job(quantize={"weights": None, "secondary": "int8", "gradients": None}, secondary="node")

    def drop(topo: Stage3) -> None:
        whole_weights(topo).secondary.refresh = lambda slots: None  # type: ignore[method-assign]

    with pytest.raises(RuntimeError, match="was not refreshed after the last publish"):
        losses_without(run, drop)


def test_a_stale_secondary_changes_the_loss() -> None:
    """What the stamp protects from: the same drop with the stamp forged trains something else."""
    run = job(quantize={"weights": None, "secondary": "int8", "gradients": None}, secondary="node")

    def drop(topo: Stage3) -> None:
        whole_weights(topo).secondary.refresh = lambda slots: None  # type: ignore[method-assign]
        whole_weights(topo).secondary.is_fresh = lambda slot: True  # type: ignore[method-assign]

    assert largest_difference(train(run), list(stock())) <= 5e-3
    assert largest_difference(losses_without(run, drop), list(stock())) > 1e-2


def test_replicas_that_part_are_seen_by_the_debug_checks() -> None:
    run = job(debug_checks=True)

    def drop(topo: Stage3) -> None:
        topo.weights.publish = lambda *_: whole_weights(topo)._renew(topo.weights.trained)  # type: ignore[method-assign]

    with pytest.raises(RuntimeError, match="share a weight shard but hold different bits"):
        losses_without(run, drop)
