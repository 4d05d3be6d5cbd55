# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""In every sparse mode a skipped step, a restart and the loss scale leave no trace, and what is not
finite is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.marks import late, often
from tests.ranks.test_radius import INTERVAL, radius_world
from tests.ranks.test_scape import FEW, SETTINGS, scape_world
from tests.ranks.test_sparse_modes import HIERARCHY, MODES, PLACES, sparse_world
from tests.ranks.test_sparse_runs import SYNC, world_of
from tests.ranks.test_tagc import ROW, tagc
from tests.ranks.trainer import Trainer, computed
from tests.ranks.worlds import NUMELS, World, overflowed

topo = partial(sparse_world, HIERARCHY["topo"], None)
WORLDS: dict[str, Callable[[], World]] = {
    **{mode: partial(topo, mode, NUMELS, density=0.05) for mode in MODES},
    # It stops in the middle of tau; its sums go to ranks of the node that have other peers, which
    # may have no NaN.
    "oktopk": partial(
        sparse_world, PLACES["gradients in a GPU"], None, "oktopk", NUMELS, density=0.05, tau=4
    ),
    **{
        f"{mode}, warming up": partial(topo, mode, NUMELS, start=1, warmup=5, density=0.02)
        for mode in ("oktopk", "ternary")
    },
    **{f"{name} in runs": partial(world_of, name) for name in SYNC},
    "tagc": partial(tagc, (3000,), 2, ratio=10, theta=0.9),
    "tagc, falling back": partial(tagc, (2 * ROW,), 2, ratio=10, theta=0.9),
    **{f"radius, {setting}": partial(radius_world, setting) for setting in PLACES},
    **{
        f"scape, {setting}": partial(scape_world, setting, density=0.05, warmup=3)
        for setting in SETTINGS
    },
}
LATE = {f"scape, {setting}" for setting in SETTINGS if setting not in FEW}
LATE |= {"radius, gradients in a GPU", "radius, replicated optimizer"}
STEPS = 2 * INTERVAL + 1


def disturbances() -> Iterator[Any]:
    """What happens when to which mode: to Radius also in the middle of an interval, at its end, and
    at a resampling.
    """
    for name in WORLDS:
        cases = [("skip", 2), ("stop", 3), ("scale", -1)]
        if name.startswith("radius"):
            cases += [("skip", when) for when in (0, 1, INTERVAL)] + [
                ("stop", when) for when in (1, 2, INTERVAL + 1)
            ]
        for what, when in cases:
            rare = name in LATE or (what == "scale" and "runs" in name)
            yield late(name, what, when) if rare else (name, what, when)


@cache
def undisturbed(name: str) -> list[Tensor]:
    """What each rank computes."""
    return computed(WORLDS[name](), STEPS)


@pytest.mark.parametrize(("name", "what", "when"), list(disturbances()))
def test_skipped_steps_resuming_and_the_loss_scale_change_nothing(
    name: str, what: str, when: int
) -> None:
    """Residuals, masks, thresholds, densities and counters are as after finished steps, kept
    without the scale, and saved: bit for bit.
    """

    def disturb(trainer: Trainer, step: int) -> None:
        if what == "scale":
            trainer.scale = 2.0 ** (5 - step)
        elif step == when:
            trainer.skipped(77) if what == "skip" else trainer.resume()

    for found, expected in zip(
        computed(WORLDS[name](), STEPS, disturb), undisturbed(name), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("steps", "bad"), [(0, torch.nan), (1, torch.inf)])
@pytest.mark.parametrize("name", often(WORLDS.keys() - LATE, WORLDS))
def test_a_gradient_that_is_not_finite_reaches_the_optimizer(
    name: str, steps: int, bad: float
) -> None:
    """NaN is in no comparison the larger, nor is every element in a mask: training would go on
    without a word.

    In a dense step and in a sparse one; the state stays as it was.
    """
    w = WORLDS[name]()

    def rank_main(rank: int) -> bool:
        trainer = Trainer(w, rank)
        for step in range(steps):
            trainer.update(trainer.sync(step), lambda group: 0.01)
            trainer.engine.end_step(skipped=False)
        return overflowed(trainer.engine, w.grads(rank, steps), bad)

    assert any(run_threads(w.size, rank_main))
