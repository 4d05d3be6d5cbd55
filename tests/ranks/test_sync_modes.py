# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What every mode of sync keeps, in every setting: nothing is lost; a skipped step, a restart, the
loss scale and overlap leave no trace; what is not finite is seen; bytes are the formula's. Each
mode's own algorithm is in ``test_papers.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bare import fake_world
from tests.marks import late
from tests.ranks.sync_cases import (
    CHUNK,
    HIERARCHY,
    INTERVAL,
    PLACES,
    SYNC,
    Step,
    check_nothing_is_lost,
    mode_of,
    observed,
    residuals_of,
    run,
    summed,
    sync_world,
)
from tests.ranks.trainer import Trainer, computed
from tests.ranks.worlds import PLAIN, World, owned, synced, world
from zero_topo import AgedAdamW
from zero_topo.cost import step_bytes
from zero_topo.topology.presets import emulated

MOMENTUM = ("replicated optimizer", "owned", "gradients in a GPU")
"""Places in which SCAPE is tested."""
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
            trainer.update(rows)
            steps.append(observed(trainer.engine))
            if restarts and step == 3:
                trainer.w = replace(w, chunk=1 << 20 if w.chunk == CHUNK else CHUNK)
                trainer.resume()
        return steps

    return w.on_ranks(rank_main)


PRECISIONS: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "accumulation_dtype": "fp32"},
    {"dtype": torch.float16},
    {"dtype": torch.float16, "accumulation_dtype": "fp32"},
]


def walks() -> Iterator[Any]:
    """Name, place, and more settings: some often, the others late."""
    for name, place, runs in product(FEEDBACK, PLACES, (False, True)):
        if name == "sharded" and place not in ("topo", "owned"):
            continue
        usual = place in ("topo", "data parallel", "owned") or name in ("quantized", "ternary")
        case = name, place, {"chunk": CHUNK} if runs else {}
        yield case if usual and (runs or name not in ("tagc", "sharded")) else late(*case)
    for place, precision in product(HIERARCHY, PRECISIONS):
        yield "quantized", place, precision
    for name in ("oktopk", "ternary"):
        for peers in (1, 3, 8):
            yield late(name, "data parallel", {"peers": peers})
        for density, numel in [(1.0, 2), (0.01, 30_000), (0.001, 1), (0.001, 1_000_000)]:
            yield late(name, "data parallel", {"numels": (numel,), "density": density})
    for name in ("oktopk", "tagc"):
        # Groups that are not in the order of the tree
        order = (2, 0, 4, 1, 3)
        yield name, "data parallel", {"machine": replace(emulated(5, 1, 1), order=order)}


@pytest.mark.parametrize(("name", "place", "more"), list(walks()), ids=str)
def test_nothing_is_lost(name: str, place: str, more: dict[str, Any]) -> None:
    """What has not arrived is in the residual, at every step; where all ranks update all elements,
    they get the same bits.
    """
    sync: dict[str, Any] = {} if name == "quantized" else {"value_dtype": "bf16"}
    w = sync_world(name, place, **sync, **more)
    results = walked(w, restarts=name not in ("radius", "tagc", "quantized"))
    check_nothing_is_lost(w, results)
    if place == "data parallel":
        for found, step in product(results, range(5)):
            assert torch.equal(found[step].rows, results[0][step].rows)


@pytest.mark.parametrize("place", MOMENTUM)
def test_nothing_of_a_momentum_is_lost(place: str) -> None:
    """SCAPE: ``m' + sum of e' = b m + (1 - b) mean of g + sum of e`` in every element, rounding of
    values included.
    """
    w = sync_world("scape", place, density=0.3, warmup=0)
    beta = 0.9

    def rank_main(rank: int) -> list[tuple[Tensor, list[tuple[int, Tensor]]]]:
        trainer, found = Trainer(w, rank), []
        row = trainer.engine.layout.row(w.config.plan.optimizer)
        for step in range(4):
            trainer.step(step)
            momentum = trainer.table([moment.mean for moment in trainer.moments()])
            found.append((momentum[row], residuals_of(trainer.engine)))
        return found

    results = w.on_ranks(rank_main)
    before = [torch.zeros(w.columns) for _ in range(w.size)]
    for step in range(4):
        residuals = summed(w, [found[step][1] for found in results])
        for rank, found in enumerate(results):
            waits = (1 - beta) * residuals[rank]
            due = beta * before[rank] + (1 - beta) * w.own_mean(rank, step)
            torch.testing.assert_close(found[step][0] + waits, due, atol=1e-5, rtol=1e-5)
            # The momentum decays at the next step, the residual does not.
            before[rank] = found[step][0] + waits / beta


# -- no trace --------------------------------------------------------------------------------------

WORLDS: dict[str, Callable[[], World]] = {
    # It stops in the middle of tau; its sums go to ranks of the node that have other peers, which
    # may have no NaN.
    "oktopk": partial(sync_world, "oktopk", "gradients in a GPU", tau=4),
    "ternary": partial(sync_world, "ternary"),
    **{
        f"{mode}, warming up": partial(sync_world, mode, start=1, warmup=5, density=0.02)
        for mode in ("oktopk", "ternary")
    },
    **{
        f"{name} in runs": partial(sync_world, name, chunk=CHUNK)
        for name in ("oktopk", "ternary", "sharded", "tagc")
    },
    # 64 blocks of 1024 elements in each row: enough for a sketch
    "tagc, falling back": partial(sync_world, "tagc", "data parallel", 2, (2 * 65_536,), ratio=10),
    **{
        f"radius, {place}": partial(sync_world, "radius", place, value_dtype="fp32", chunk=1024)
        for place in PLACES
    },
    **{f"scape, {place}": partial(sync_world, "scape", place) for place in MOMENTUM},
    "quantized": partial(sync_world, "quantized", **PRECISIONS[-1]),
    "quantized in runs": partial(sync_world, "quantized", chunk=CHUNK, **PRECISIONS[-1]),
}
LATE = ("radius, gradients in a GPU", "radius, owned", "oktopk, warming up")
STEPS = 2 * INTERVAL + 1


def disturbances() -> Iterator[Any]:
    """What happens when to which mode: to Radius also in the middle of an interval, at its end, and
    at a resampling.
    """
    for name in WORLDS:
        cases = [("skip", 2), ("stop", 3), ("scale", -1), ("no overlap", -1)]
        if name.startswith("radius"):
            cases += [("skip", when) for when in (0, 1, INTERVAL)]
            cases += [("stop", when) for when in (1, 2, INTERVAL + 1)]
        for what, when in cases:
            rare = name in LATE or (what == "scale" and "runs" in name)
            rare |= what == "no overlap" and "runs" not in name and name != "quantized"
            yield late(name, what, when) if rare else (name, what, when)


@cache
def undisturbed(name: str) -> list[Tensor]:
    """What each rank computes."""
    return computed(WORLDS[name](), STEPS)


@pytest.mark.parametrize(("name", "what", "when"), list(disturbances()))
def test_skipped_steps_resuming_and_the_loss_scale_change_nothing(
    name: str, what: str, when: int
) -> None:
    """A skipped step, a restart, a loss scale, overlap with the backward pass: residuals, masks,
    thresholds, densities and counters are as after finished steps, bit for bit.
    """

    def disturb(trainer: Trainer, step: int) -> None:
        if what == "scale":
            trainer.scale = 2.0 ** (5 - step)
        elif step == when:
            trainer.skipped(77) if what == "skip" else trainer.resume()

    w = WORLDS[name]()
    overlaps = what != "no overlap"
    found = computed(replace(w, config=replace(w.config, overlap=overlaps)), STEPS, disturb)
    for ours, expected in zip(found, undisturbed(name), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(("steps", "bad"), [(0, torch.nan), (1, torch.inf)])
@pytest.mark.parametrize("name", [late(name) if name in LATE else name for name in WORLDS])
def test_a_gradient_that_is_not_finite_reaches_the_optimizer(
    name: str, steps: int, bad: float
) -> None:
    """NaN is in no comparison the larger, nor is every element in a mask: training would go on
    without a word.

    In a dense step and in a sparse one. The step is skipped in the end: the state stays as it was.
    """
    w = WORLDS[name]()

    def rank_main(rank: int) -> bool:
        trainer = Trainer(w, rank)
        for step in range(steps):
            trainer.step(step)
        mode = trainer.engine.gradients.mode
        before = {key: value.clone() for key, value in mode.state_dict().items()}
        grads = w.grads(rank, steps)
        if rank == w.size // 2:
            grads[-1][5] = bad
        is_finite = synced(trainer.engine, grads).isfinite().all()
        trainer.engine.end_step(skipped=True)
        after = mode.state_dict()
        assert all(torch.equal(after[key], value) for key, value in before.items())
        return not is_finite

    assert any(w.on_ranks(rank_main))


@pytest.mark.parametrize(
    ("mode", "more", "kind", "words"),
    [
        ("oktopk", {}, AgedAdamW, ""),
        ("oktopk", {"error_feedback": False}, AgedAdamW, "AgedAdamW"),
        ("dense", {}, AgedAdamW, "AgedAdamW"),
        ("scape", {}, torch.optim.AdamW, "AdamS"),
    ],
)
def test_an_optimizer_that_does_not_fit_the_mode_is_refused(
    mode: str, more: dict[str, Any], kind: Any, words: str
) -> None:
    """One that counts how long sums wait where none wait: a zero is a gradient there. Whoever built
    the optimizer.
    """
    optimizer = "node" if mode == "scape" else "world"
    sync = {"mode": mode, **more}
    w = world({"scheme": "topo", "optimizer": optimizer, "quantize": PLAIN, "sync": sync})
    with fake_world(w.size):
        found = w.engine().gradients.mode
        with pytest.raises(ValueError, match=words) if words else nullcontext():
            found.check_optimizer(kind([torch.ones(1, requires_grad=True)]))


# -- densities that change -------------------------------------------------------------------------


def test_the_residual_of_another_run_comes_with_the_first_dense_step() -> None:
    """After a checkpoint of other ranks the steps are counted anew; its residuals do not wait for
    the last of them.
    """
    w = sync_world("oktopk", start=2, numels=(64, 501))

    def rank_main(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        engine = w.engine()
        mode_of(engine).residual.fill_(1.0)
        synced(engine, w.grads(rank, 0))
        first = owned(engine)
        engine.end_step(skipped=False)
        synced(engine, w.grads(rank, 1))
        return first, mode_of(engine).residual, owned(engine)

    for rank, (first, residual, second) in enumerate(w.on_ranks(rank_main)):
        residual_of_both = 2.0
        due = w.own_mean(rank, 0) + residual_of_both
        torch.testing.assert_close(first, due, atol=1e-5, rtol=0)
        torch.testing.assert_close(second, w.own_mean(rank, 1), atol=1e-6, rtol=1e-6)
        assert not residual.any()


@pytest.mark.parametrize("name", ["oktopk", "ternary", "tagc"])
def test_the_density_goes_down_geometrically(name: str) -> None:
    """After dense steps, which leave no residual: by equal factors apart from DGC's quarter; what
    is selected follows, and is reported of all runs.
    """
    start, warmup, sizes = 2, 4, (32_768, 32_768)
    sync: dict[str, Any] = {"theta": 0.99} if name == "tagc" else {"density": 0.01}
    sync |= {"start": start, "warmup": warmup, "start_density": 0.25, "value_dtype": "fp32"}
    w = sync_world(name, numels=sizes, chunk=CHUNK, select="run", **sync)
    factors = [0.25 * 0.04 ** (step / warmup) for step in range(warmup)]
    expected = [1.0] * start + factors + [0.01, 0.01]
    results = run(w, start + 6)
    for found in results:
        for step in range(start):
            assert not any(part.any() for _, part in found[step].residuals)
        assert [step.report["density_asked"] for step in found] == pytest.approx(expected)
        assert [step.report["density"] for step in found] == pytest.approx(expected, rel=0.02)
        falling = found[start : start + warmup + 1]
        assert all(more.sent > less.sent for more, less in pairwise(falling))
    check_nothing_is_lost(w, results)


# -- bytes -----------------------------------------------------------------------------------------

SIZES = (3000, 640, 9000)
ENDS = ("topo", "data parallel")
BYTES: list[tuple[str, str, dict[str, Any]]] = [
    *((name, place, {"chunk": CHUNK}) for name, place in product(("oktopk", "ternary"), ENDS)),
    ("sharded", "topo", {"chunk": CHUNK}),
    *(("ternary", place, {"density": 0.3}) for place in ENDS),
    ("radius", "topo", {"value_dtype": "fp32"}),
    ("radius", "data parallel", {"value_dtype": "bf16"}),
    *(("scape", place, {"numels": (40_000,), "warmup": 0}) for place in MOMENTUM),
]


@pytest.mark.parametrize(("name", "place", "more"), BYTES, ids=str)
def test_bytes_are_the_formulas(name: str, place: str, more: dict[str, Any]) -> None:
    """To the byte, the mean of three steps, of which Radius resamples in one. Those of quantized
    sync are in ``test_step_bytes.py``.
    """
    w = sync_world(name, place, **{"numels": SIZES, **more})

    def rank_main(rank: int) -> None:
        trainer = Trainer(w, rank)
        sent = []
        for step in range(INTERVAL + 1):
            trainer.update(trainer.sync(step))
            sent.append(observed(trainer.engine).sent)
        formula = step_bytes(w.config, trainer.engine.workload(1)).items()
        assert round(sum(sent[1:]) / INTERVAL) == sum(
            n for (phase, _), n in formula if phase == "sync"
        )

    w.on_ranks(rank_main)
