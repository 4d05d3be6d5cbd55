# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Radius: which updates choose its mask. The algorithm is in ``test_papers.py``, what it shares
with the other modes in ``test_sync_modes.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tests.ranks.sync_cases import INTERVAL, mode_of, sync_world
from tests.ranks.trainer import Trainer, computed
from tests.ranks.worlds import NUMELS, World
from zero_topo.sync.radius import Radius

RATE = 0.01
WORLD = partial(sync_world, "radius", chunk=1024, value_dtype="fp32")
"""A world with the mode, in two runs."""


class Seen(NamedTuple):
    """After a step of a rank: the mask in force, bool ``[P, C]``; whether a residual waits, and
    whether updates were asked for.
    """

    mask: Tensor
    waits: bool
    asked: bool


def train(w: World, steps: int, rate: Callable[[int, int], float]) -> list[list[Seen]]:
    """Steps of every rank, with the learning rate of a step and a sub-group."""
    # With the usual epsilon the first step is the sign of the gradient, and all elements tie.
    optimizer = partial(torch.optim.AdamW, eps=1.0)

    def rank_main(rank: int) -> list[Seen]:
        trainer = Trainer(w, rank, optimizer, 0.0)
        mode = mode_of(trainer.engine)
        assert isinstance(mode, Radius)
        found = []
        for step in range(steps):
            rows = trainer.sync(step)
            asked = mode.wants_updates
            trainer.update(rows, partial(rate, step))
            trainer.engine.end_step(skipped=False)
            found.append(Seen(mode.mask(mode._state), bool(mode.residual.any()), asked))
        return found

    return w.on_ranks(rank_main)


def test_a_learning_rate_of_zero_chooses_nothing() -> None:
    """There is no update to choose by: the first step that has one resamples; later ones keep the
    mask they have.
    """
    rates = [0.0, 0.0, RATE, RATE, 0.0, RATE, 0.0]
    for steps in train(WORLD("data parallel"), len(rates), lambda step, group: rates[step]):
        # Step 2 has no mask yet, 3 and 6 end intervals.
        assert [seen.waits for seen in steps] == [False] * 4 + [True, True, False]
        assert not steps[1].mask.any() and steps[2].mask.any()
        assert torch.equal(steps[6].mask, steps[5].mask)


def test_a_group_with_a_learning_rate_of_zero_keeps_its_part_of_the_mask() -> None:
    """The others choose anew. Updates are asked for at resamplings only: other steps, the dense
    ones at the start too, pay nothing for the hook.
    """
    w = WORLD("data parallel", start=1)
    group = sum(w.config.plan.shard_numel(n) for n in NUMELS[-2:])

    def rate(step: int, group: int) -> float:
        return RATE if step <= INTERVAL else RATE * (1 - group)

    for steps in train(w, INTERVAL + 2, rate):
        assert [seen.asked for seen in steps] == [False, True, False, False, True]
        *_, before, after = steps
        assert torch.equal(after.mask[:, -group:], before.mask[:, -group:])
        assert not torch.equal(after.mask[:, :-group], before.mask[:, :-group])


def test_a_step_skipped_after_some_updates_changes_nothing() -> None:
    """What an update said is forgotten with a step that is skipped after all, though the next one
    says nothing.
    """

    def rate(step: int, group: int) -> float:
        return 0.0 if step == INTERVAL else RATE

    def disturb(trainer: Trainer, step: int) -> None:
        if step == INTERVAL:
            trainer.sync(77)
            begin, _ = trainer.columns[1]
            with trainer.engine.watched(trainer.masters[1], begin, RATE):
                pass
            trainer.engine.end_step(skipped=True)

    w = WORLD("topo")
    steps = 2 * INTERVAL + 1
    expected = computed(w, steps, rate=rate)
    assert all(map(torch.equal, computed(w, steps, disturb, rate), expected))
