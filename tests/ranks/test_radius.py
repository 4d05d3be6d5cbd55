# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Radius: a mask chosen of the optimizer's own update, common to all peers, and nothing lost
between resamplings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.ranks.test_sparse_modes import (
    PLACES,
    Step,
    check_nothing_is_lost,
    mode_of,
    observed,
    sparse_world,
)
from tests.ranks.trainer import Trainer, computed, usual_rate
from tests.ranks.worlds import NUMELS, World
from zero_topo.config.sparse_config import RadiusSync
from zero_topo.cost import Workload, step_bytes
from zero_topo.engine.stage3 import Stage3
from zero_topo.sync.radius import Radius

INTERVAL = 3
RATE = 0.01
Rate = Callable[[int, int], float]  # of step and sub-group


class Seen(NamedTuple):
    """One step of one rank: what was synced, the residual, the own row's update, the masks, and the
    rank's rows.
    """

    step: Step
    update: Tensor
    before: Tensor
    after: Tensor
    masters: Tensor


def radius_world(
    setting: str, peers: int = 4, numels: tuple[int, ...] = NUMELS, **sync: Any
) -> World:
    """A world with the mode, on 2 x 2 x 2 or in plain data parallelism; of the usual parameters
    there are two runs.
    """
    sync = {"density": 0.1, "interval": INTERVAL, "value_dtype": "fp32", **sync}
    w = sparse_world(
        PLACES[setting], peers if setting == "data parallel" else None, "radius", numels, **sync
    )
    return replace(w, chunk=1024)


def mask_of(engine: Stage3) -> Tensor:
    """The mask in force, bool ``[P, C]``."""
    mode = mode_of(engine)
    assert isinstance(mode, Radius)
    return mode.mask(mode._state)


class Run(Trainer):
    """With AdamW."""

    def __init__(
        self, w: World, rank: int, rate: Rate = usual_rate, peeks_at: Sequence[int] = ()
    ) -> None:
        # With its usual epsilon the first step is the sign of the gradient, and all elements tie.
        super().__init__(w, rank, lambda masters: torch.optim.AdamW(masters, eps=1.0), 0.0)
        self.rate, self.peeks_at = rate, peeks_at

    def step(self, step: int) -> Seen:
        """A whole step."""
        rows = self.sync(step, step in self.peeks_at)
        before, old, own = (
            mask_of(self.engine),
            self.table(self.masters),
            self.engine.masters.own_row,
        )
        self.update(rows, lambda group: self.rate(step, group))
        new = self.table(self.masters)
        return Seen(observed(self.engine), (new - old)[own], before, mask_of(self.engine), new)


def train(w: World, steps: int, **more: Any) -> list[list[Seen]]:
    """Steps of every rank."""

    def rank_main(rank: int) -> list[Seen]:
        trainer = Run(w, rank, **more)
        return [trainer.step(step) for step in range(steps)]

    return run_threads(w.size, rank_main)


@lru_cache(maxsize=4)
def trained(setting: str) -> tuple[World, list[list[Seen]]]:
    """Two intervals and two steps of a setting."""
    w = radius_world(setting)
    return w, train(w, 2 * INTERVAL + 2)


def chosen(w: World, update: Tensor) -> Tensor:
    """The elements of a row that its owner should choose, by sorting: columns of the mask, those of
    all but vectors.
    """
    found, begin = [], 0
    for numel in w.numels:
        width = w.config.plan.shard_numel(numel)
        if numel > 1:
            score = update[begin : begin + width].abs()
            density: float = w.config.sync.density  # type: ignore[attr-defined]
            last = score.sort(descending=True).values[max(1, int(density * width)) - 1]
            found.append(score >= last)
        begin += width
    return torch.cat(found)


@pytest.mark.parametrize("value_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("setting", PLACES)
def test_nothing_is_lost(setting: str, value_dtype: str) -> None:
    """What has not arrived is in the residual at every step; a resampling in FP32 leaves none, read
    or not.
    """
    w = radius_world(setting, value_dtype=value_dtype)
    results = (
        trained(setting)[1]
        if value_dtype == "fp32"
        else train(w, 2 * INTERVAL + 2, peeks_at=(1, INTERVAL))
    )
    check_nothing_is_lost(w, [[seen.step for seen in steps] for steps in results])
    between = [step % INTERVAL != 0 for step in range(2 * INTERVAL + 2)]
    assert value_dtype == "bf16" or all(has_residual(steps) == between for steps in results)


@pytest.mark.parametrize("setting", PLACES)
def test_the_mask_is_that_of_the_last_resampling(setting: str) -> None:
    """All peers hold it; the row of each is its own choice of the optimizer's update then; the
    others' stay away.
    """
    w, results = trained(setting)
    plan = w.config.plan
    vectors = sum(plan.shard_numel(n) for n in w.numels if n == 1)
    lo, hi = plan.stages(plan.gradients, plan.world_size)[-1]
    for rank, steps in enumerate(results):
        group = plan.group(rank, lo, hi)
        for step, seen in enumerate(steps):
            last = step - step % INTERVAL
            wanted = torch.stack([chosen(w, results[peer][last].update) for peer in group])
            assert torch.equal(seen.after, wanted), (rank, step)
            if step != last:
                assert torch.equal(seen.before, wanted)
                arrived = seen.step.own[vectors:] != 0
                assert not (arrived & ~wanted[group.index(rank)]).any() and arrived.any()
    assert not torch.equal(results[0][0].after, results[0][INTERVAL].after)


def test_replicas_agree_bit_for_bit() -> None:
    """Gradients, masks and masters of all ranks are alike in data parallelism."""
    _, results = trained("data parallel")
    for steps in results[1:]:
        for mine, theirs in zip(steps, results[0], strict=True):
            assert torch.equal(mine.step.rows, theirs.step.rows) and torch.equal(
                mine.masters, theirs.masters
            )
            assert torch.equal(mine.after, theirs.after)


def test_a_step_skipped_after_some_updates_changes_nothing() -> None:
    """What an update said is forgotten with a step that is skipped after all, though the next one
    says nothing.
    """

    def without_rate(step: int, group: int) -> float:
        return 0.0 if step == INTERVAL else RATE

    def disturb(trainer: Trainer, step: int) -> None:
        if step == INTERVAL:
            trainer.sync(77)
            begin, _ = trainer.columns[1]
            with trainer.engine.watched(trainer.masters[1], begin, RATE):
                pass
            trainer.engine.end_step(skipped=True)

    w, steps = radius_world("topo"), 2 * INTERVAL + 1
    found, expected = (
        computed(w, steps, disturb, without_rate),
        computed(w, steps, rate=without_rate),
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def has_residual(steps: Sequence[Seen]) -> list[bool]:
    """At which steps there is a residual."""
    return [any(bool(part.any()) for _, part in seen.step.residuals) for seen in steps]


def test_a_learning_rate_of_zero_chooses_nothing() -> None:
    """There is no update to choose by: the first step that has one resamples; later ones keep the
    mask they have.
    """
    rates = [0.0, 0.0, RATE, RATE, 0.0, RATE, RATE]
    for steps in train(
        radius_world("data parallel"), len(rates), rate=lambda step, group: rates[step]
    ):
        # Step 2 has no mask yet, 3 and 6 end intervals.
        assert has_residual(steps) == [False] * 4 + [True, True, False]
        assert not steps[1].after.any() and steps[2].after.any()
    for steps in train(
        radius_world("topo"),
        INTERVAL + 2,
        rate=lambda step, group: 0.0 if step == INTERVAL else RATE,
    ):
        assert torch.equal(steps[0].after, steps[-1].after)


def test_a_group_with_a_learning_rate_of_zero_keeps_its_part_of_the_mask() -> None:
    """The others choose anew."""
    w = radius_world("data parallel")
    group = sum(w.config.plan.shard_numel(n) for n in NUMELS[-2:])
    for steps in train(
        w, INTERVAL + 1, rate=lambda step, group: RATE if step < INTERVAL else RATE * (1 - group)
    ):
        last = steps[-1]
        assert torch.equal(last.after[:, -group:], last.before[:, -group:])
        assert not torch.equal(last.after[:, :-group], last.before[:, :-group])


def test_updates_are_asked_for_at_resamplings_only() -> None:
    """Other steps, the dense ones at the start too, and other modes pay nothing for the hook."""
    w = radius_world("topo", start=1)

    def rank_main(rank: int) -> list[bool]:
        trainer, asked = Run(w, rank), []
        for step in range(INTERVAL + 2):
            trainer.sync(step)
            asked.append(trainer.engine.gradients.mode.wants_updates)
            trainer.step(step)
        return asked

    assert run_threads(w.size, rank_main)[0] == [False, True, False, False, True]


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("setting", ["topo", "data parallel"])
def test_the_meter_counts_what_the_formulas_say(setting: str, value_dtype: str) -> None:
    """Of a step that resamples and of one that does not, exactly."""
    w = radius_world(setting, 3, NUMELS[1:], value_dtype=value_dtype)
    plan, mode = w.config.plan, w.config.sync
    assert isinstance(mode, RadiusSync)
    widths = [plan.shard_numel(n) for n in w.numels]
    resampling = mode.resampling_bytes(sum(widths), plan)
    between = mode.between_bytes(widths, plan)
    for steps in train(w, INTERVAL + 1):
        sent = [seen.step.sent for seen in steps]
        assert sent == [resampling, *[between] * (INTERVAL - 1), resampling]
    work = replace(Workload.uniform(w.numels, itemsize=4), sync_itemsize=4)
    booked = sum(n for (phase, _), n in step_bytes(w.config, work).items() if phase == "sync")
    assert booked == round((resampling + (INTERVAL - 1) * between) / INTERVAL)
