# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What every mode of sync keeps, in every setting: nothing is lost, all selected is dense; a
skipped step, a restart and the loss scale leave no trace; what is not finite is seen; bytes are the
formula's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.marks import late, often
from tests.ranks.sync_cases import (
    CHUNK,
    INTERVAL,
    PLACES,
    SYNC,
    Step,
    check_nothing_is_lost,
    in_runs,
    mode_of,
    observed,
    run,
    sync_world,
)
from tests.ranks.trainer import Trainer, computed
from tests.ranks.worlds import NUMELS, World, overflowed, owned, synced
from zero_topo.cost import memory_bytes, step_bytes
from zero_topo.topology.presets import emulated

FEEDBACK = [name for name in SYNC if name != "scape"]
"""Their residuals are parts of gradients; SCAPE's are of momentum."""


# -- nothing is lost -------------------------------------------------------------------------------


def walked(w: World, restarts: bool) -> list[list[Step]]:
    """By rank: a step whose gradients come in two parts, both after the sync of a run may have
    begun; one whose synced gradient is read before; and a restart with runs of another size.
    """

    def rank_main(rank: int) -> list[Step]:
        trainer = Trainer(w, rank)
        steps = []
        for step in range(5):
            if step == 1:
                halves = [grad / 2 for grad in w.grads(rank, step)]
                trainer.engine.gradients.scatter(range(len(halves)), halves, last=True)
                rows = synced(trainer.engine, halves)
            else:
                rows = trainer.sync(step, peeks=step == 2)
            trainer.update(rows, lambda group: 0.01)
            steps.append(observed(trainer.engine))
            if restarts and step == 3:
                trainer.w = replace(w, chunk=1 << 20 if w.chunk == CHUNK else CHUNK)
                trainer.resume()
        return steps

    return run_threads(w.size, rank_main)


def walks() -> Iterator[Any]:
    """Name, place, and more settings: some often, the others late."""
    for name, place, runs in product(FEEDBACK, PLACES, (False, True)):
        if name == "sharded" and place not in ("topo", "gradients in a GPU", "owned"):
            continue
        usual = place in ("topo", "data parallel", "owned") or name in ("quantized", "ternary")
        case = name, place, {"chunk": CHUNK} if runs else {}
        yield case if usual and (runs or name not in ("tagc", "sharded")) else late(*case)
    for name, peers in product(("oktopk", "ternary"), (1, 3, 8)):
        yield late(name, "data parallel", {"peers": peers})
    sizes = [(1.0, 2), (0.1, 1000), (0.01, 30_000), (0.001, 1), (0.001, 1_000_000)]
    for name, (density, numel) in product(("oktopk", "ternary"), sizes):
        more: dict[str, Any] = {"numels": (numel,), "density": density}
        case = name, "data parallel", more
        yield case if numel in (1, 2) else late(*case)
    for name in ("oktopk", "tagc"):
        # Groups that are not in the order of the tree
        order = (2, 0, 4, 1, 3)
        yield name, "data parallel", {"machine": replace(emulated(5, 1, 1), order=order)}


@pytest.mark.parametrize("value_dtype", ["bf16", late("fp32")])
@pytest.mark.parametrize(("name", "place", "more"), list(walks()), ids=str)
def test_nothing_is_lost(name: str, place: str, more: dict[str, Any], value_dtype: str) -> None:
    """What has not arrived is in the residual, at every step; where all ranks update all elements,
    they get the same bits.
    """
    sync = {} if name == "quantized" else {"value_dtype": value_dtype}
    w = sync_world(name, place, **{**sync, **more})
    results = walked(w, restarts=name not in ("radius", "tagc", "quantized"))
    check_nothing_is_lost(w, results)
    if place == "data parallel":
        for found, step in product(results, range(5)):
            assert torch.equal(found[step].rows, results[0][step].rows)


ALL: dict[str, dict[str, Any]] = {
    "oktopk": {"density": 1.0},
    "tagc": {"theta": 0.0},
    "radius": {"density": 1.0},
    **{f"{name} from the third step": {"start": 2} for name in ("oktopk", "ternary", "tagc")},
}


@pytest.mark.parametrize("place", often(("topo", "data parallel"), list(PLACES)[:-1]))
@pytest.mark.parametrize("name", ALL)
def test_all_selected_is_dense(name: str, place: str) -> None:
    """The mean gradient arrives, and the residual is zero; then the mode begins."""
    w = sync_world(name.split()[0], place, **ALL[name], value_dtype="fp32")
    later = "start" in ALL[name]
    results = run(w, 5 if later else 2)
    for rank, found in enumerate(results):
        for step in range(2):
            torch.testing.assert_close(
                found[step].own, w.own_mean(rank, step), atol=1e-6, rtol=1e-6
            )
            assert not any(part.abs().max() > 1e-6 for _, part in found[step].residuals)
            assert not later or found[step].report["density"] == 1
        assert not later or any(bool(part.any()) for _, part in found[2].residuals)
    check_nothing_is_lost(w, results)


# -- no trace --------------------------------------------------------------------------------------

SETTINGS = {
    "hierarchy": ("replicated optimizer", (2, 2, 2)),
    "three nodes": ("replicated optimizer", (3, 1, 2)),
    "algorithm 2": ("owned", (4, 1, 1)),
    "a group in the node first": ("gradients in a GPU", (2, 2, 2)),
}
WORLDS: dict[str, Callable[[], World]] = {
    # It stops in the middle of tau; its sums go to ranks of the node that have other peers, which
    # may have no NaN.
    "oktopk": partial(sync_world, "oktopk", "gradients in a GPU", tau=4),
    "ternary": partial(sync_world, "ternary"),
    **{
        f"{mode}, warming up": partial(sync_world, mode, start=1, warmup=5, density=0.02)
        for mode in ("oktopk", "ternary")
    },
    **{f"{name} in runs": partial(in_runs, name) for name in ("oktopk", "ternary", "sharded")},
    "tagc in runs": partial(in_runs, "tagc"),
    # 64 blocks of 1024 elements in each row: enough for a sketch
    "tagc, falling back": partial(sync_world, "tagc", "data parallel", 2, (2 * 65_536,), ratio=10),
    **{
        f"radius, {place}": partial(sync_world, "radius", place, value_dtype="fp32", chunk=1024)
        for place in PLACES
    },
    **{
        f"scape, {setting}": partial(sync_world, "scape", place, machine=emulated(*shape))
        for setting, (place, shape) in SETTINGS.items()
    },
    "quantized": partial(sync_world, "quantized", dtype=torch.float16),
}
LATE: tuple[str, ...] = (
    "radius, gradients in a GPU",
    "radius, replicated optimizer",
    "radius, owned",
)
LATE += ("scape, three nodes", "oktopk, warming up")
STEPS = 2 * INTERVAL + 1


def disturbances() -> Iterator[Any]:
    """What happens when to which mode: to Radius also in the middle of an interval, at its end, and
    at a resampling.
    """
    for name in WORLDS:
        cases = [("skip", 2), ("stop", 3), ("scale", -1)]
        if name.startswith("radius"):
            cases += [("skip", when) for when in (0, 1, INTERVAL)]
            cases += [("stop", when) for when in (1, 2, INTERVAL + 1)]
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

    found = computed(WORLDS[name](), STEPS, disturb)
    for ours, expected in zip(found, undisturbed(name), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(("steps", "bad"), [(0, torch.nan), (1, torch.inf)])
@pytest.mark.parametrize("name", [late(name) if name in LATE else name for name in WORLDS])
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


# -- densities that change -------------------------------------------------------------------------


def test_the_residual_of_another_run_comes_with_the_first_dense_step() -> None:
    """After a checkpoint of other ranks the steps are counted anew; its residuals do not wait for
    the last of them.
    """
    w = sync_world("oktopk", start=2)

    def rank_main(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        engine = w.engine()
        mode_of(engine).residual.fill_(1.0)
        synced(engine, w.grads(rank, 0))
        first = owned(engine)
        engine.end_step(skipped=False)
        synced(engine, w.grads(rank, 1))
        return first, mode_of(engine).residual, owned(engine)

    for rank, (first, residual, second) in enumerate(run_threads(w.size, rank_main)):
        added = torch.full((w.columns,), 2.0)  # of two peers
        added[: w.config.plan.shard_numel(NUMELS[0])] = 0  # a vector, which is not sparse
        torch.testing.assert_close(first, w.own_mean(rank, 0) + added, atol=1e-5, rtol=0)
        torch.testing.assert_close(second, w.own_mean(rank, 1), atol=1e-6, rtol=1e-6)
        assert not residual.any()


@pytest.mark.parametrize("name", ["oktopk", "ternary", "tagc"])
def test_the_density_goes_down_geometrically(name: str) -> None:
    """Equal factors apart from DGC's quarter, counted from the end of the dense steps; what is
    selected follows.
    """
    start, warmup = 2, 4
    sync: dict[str, Any] = {"theta": 0.99} if name == "tagc" else {"density": 0.01}
    sync |= {"start": start, "warmup": warmup, "start_density": 0.25, "value_dtype": "fp32"}
    w = sync_world(name, numels=(65_536,), **sync)
    factors = [0.25 * 0.04 ** (step / warmup) for step in range(warmup)]
    expected = [1.0] * start + factors + [0.01, 0.01]
    about = 0.3 if name == "oktopk" else 0.02  # within 0.8 and 1.25 k
    for found in run(w, start + 6):
        assert [step.report["density_asked"] for step in found] == pytest.approx(expected)
        assert [step.report["density"] for step in found] == pytest.approx(expected, rel=about)
        falling = found[start : start + warmup + 1]
        assert all(more.sent > less.sent for more, less in pairwise(falling))


# -- bytes -----------------------------------------------------------------------------------------

SIZES = (3000, 640, 9000)
BYTES: dict[str, Callable[[], World]] = {
    **{
        f"{name}, {place}, in runs": partial(in_runs, name, place, numels=SIZES)
        for name, place in product(("oktopk", "ternary"), ("topo", "data parallel"))
    },
    "sharded, in runs": partial(in_runs, "sharded", numels=SIZES),
    **{
        f"ternary, {place}": partial(sync_world, "ternary", place, numels=SIZES, density=0.3)
        for place in ("topo", "data parallel")
    },
    **{
        f"radius, {place}, {dtype}": partial(
            sync_world, "radius", place, numels=SIZES, value_dtype=dtype
        )
        for place, dtype in (("topo", "fp32"), ("data parallel", "bf16"))
    },
    **{
        f"scape, {setting}": partial(
            sync_world, "scape", place, machine=emulated(*shape), numels=(40_000,), warmup=0
        )
        for setting, (place, shape) in SETTINGS.items()
    },
    "quantized": partial(sync_world, "quantized"),
    "quantized, fp16": partial(sync_world, "quantized", dtype=torch.float16),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_the_formulas(name: str) -> None:
    """To the byte, the mean of three steps, of which Radius resamples in one; and the residual that
    is stored.
    """
    w = BYTES[name]()

    def rank_main(rank: int) -> None:
        trainer = Trainer(w, rank)
        sent = 0
        for step in range(INTERVAL + 1):
            trainer.update(trainer.sync(step), lambda group: 0.01)
            trainer.engine.end_step(skipped=False)
            last = trainer.engine.meter.last_step.items()
            sent += sum(n for (phase, _), n in last if phase == "sync") if step else 0
        work = trainer.engine.workload(1)
        formula = step_bytes(w.config, work).items()
        assert round(sent / INTERVAL) == sum(n for (phase, _), n in formula if phase == "sync")
        if name.startswith("quantized"):
            stored = memory_bytes(w.config, work, 2).get("residual", 0)
            assert trainer.engine.memory().get("residual", 0) == stored
            assert (stored > 0) == ("fp16" in name)

    run_threads(w.size, rank_main)
