# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Radius: a mask chosen of the optimizer's own update, common to all peers, and nothing lost
between resamplings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.ranks.sync_cases import INTERVAL, PLACES, Step, mode_of, observed, sync_world
from tests.ranks.trainer import Trainer, computed, usual_rate
from tests.ranks.worlds import NUMELS, World
from zero_topo.engine.stage3 import Stage3
from zero_topo.sync.radius import Radius

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


def radius_world(place: str, **sync: Any) -> World:
    """A world with the mode, in two runs."""
    return sync_world("radius", place, chunk=1024, value_dtype="fp32", **sync)


def mask_of(engine: Stage3) -> Tensor:
    """The mask in force, bool ``[P, C]``."""
    mode = mode_of(engine)
    assert isinstance(mode, Radius)
    return mode.mask(mode._state)


class Run(Trainer):
    """With AdamW."""

    def __init__(self, w: World, rank: int, rate: Rate = usual_rate) -> None:
        # With its usual epsilon the first step is the sign of the gradient, and all elements tie.
        super().__init__(w, rank, lambda masters: torch.optim.AdamW(masters, eps=1.0), 0.0)
        self.rate = rate

    def step(self, step: int) -> Seen:
        """A whole step."""
        rows = self.sync(step)
        before, old, own = (
            mask_of(self.engine),
            self.table(self.masters),
            self.engine.masters.own_row,
        )
        self.update(rows, lambda group: self.rate(step, group))
        new = self.table(self.masters)
        return Seen(observed(self.engine), (new - old)[own], before, mask_of(self.engine), new)


def train(w: World, steps: int, rate: Rate = usual_rate) -> list[list[Seen]]:
    """Steps of every rank."""

    def rank_main(rank: int) -> list[Seen]:
        trainer = Run(w, rank, rate)
        return [trainer.step(step) for step in range(steps)]

    return run_threads(w.size, rank_main)


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


@pytest.mark.parametrize("place", PLACES)
def test_the_mask_is_that_of_the_last_resampling(place: str) -> None:
    """All peers store it; the row of each is its own choice of the optimizer's update then; the
    others' elements do not arrive. A resampling leaves no residual.
    """
    w = radius_world(place)
    results = train(w, 2 * INTERVAL + 2)
    between = [step % INTERVAL != 0 for step in range(2 * INTERVAL + 2)]
    assert all(has_residual(steps) == between for steps in results)
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
