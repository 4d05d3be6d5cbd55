# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Sparse modes in runs: each run is sent under the backward pass, and all that holds for one run
holds for several.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from benchmarks.scale import count, total
from tests.harness import run_threads
from tests.marks import late, often
from tests.plans import resolve
from tests.ranks.test_launch_budget import PARAMS, PER_PARAMETER, numels
from tests.ranks.test_sparse_modes import (
    PLACES,
    Step,
    check_nothing_is_lost,
    observed,
    run,
    sparse_world,
)
from tests.ranks.test_streams import ONE_GROUP, job
from tests.ranks.worlds import BLOCKS, NUMELS, World, resumed, synced
from zero_topo.cost import Workload, step_bytes
from zero_topo.engine.gradients import Gradients
from zero_topo.topology.presets import emulated

SYNC: dict[str, dict[str, Any]] = {
    "oktopk": {"mode": "oktopk"},
    "ternary": {"mode": "ternary"},
    "sharded": {"mode": "oktopk", "sharded": True},
    "tagc": {"mode": "tagc", "theta": 0.9},
}
CHUNK = 600
"""Elements of a run: the small parameters of ``NUMELS`` are one, and each of the others."""


def world_of(name: str, setting: str = "topo", **sync: Any) -> World:
    """A world with a mode in runs."""
    mode = SYNC[name] | {"select": "run"} | ({} if name == "tagc" else {"density": 0.05}) | sync
    w = sparse_world(
        PLACES[setting], 4 if setting == "data parallel" else None, mode.pop("mode"), NUMELS
    )
    config = replace(w.config, sync=type(w.config.sync).model_validate({**mode}))
    return replace(w, config=config, chunk=CHUNK)


@pytest.mark.parametrize("value_dtype", [late("fp32"), "bf16"])
@pytest.mark.parametrize("setting", often(("topo", "data parallel"), PLACES))
@pytest.mark.parametrize("name", SYNC)
def test_nothing_is_lost(name: str, setting: str, value_dtype: str) -> None:
    """What has not arrived is in a residual, at every step, also of a step whose synced gradient is
    read before.
    """
    if name == "sharded" and setting not in ("topo", "gradients in a GPU"):
        return
    w = world_of(name, setting, value_dtype=value_dtype)
    results = run(w, 5, peeks_at=2)
    check_nothing_is_lost(w, results)
    for found in results if setting == "data parallel" else ():
        assert all(
            torch.equal(mine.rows, first.rows)
            for mine, first in zip(found, results[0], strict=True)
        )


@pytest.mark.parametrize("name", SYNC)
def test_a_late_gradient_is_added(name: str) -> None:
    """A run that is scattered again in the step, in part, after its sync has begun: nothing is
    lost.
    """
    w = world_of(name)

    def rank_main(rank: int) -> list[Step]:
        engine, steps = w.engine(), []
        for step in range(3):
            halves = [grad / 2 for grad in w.grads(rank, step)]
            for last in (True, True) if step else (False, True):
                engine.gradients.scatter(range(len(halves)), halves, last)
            engine.gradients.sync()
            steps.append(observed(engine))
        return steps

    check_nothing_is_lost(w, run_threads(w.size, rank_main))


@pytest.mark.parametrize("name", ["oktopk", "sharded", "ternary"])
def test_a_residual_fits_runs_of_another_size(name: str) -> None:
    """It has the columns of the parameters, whatever their runs are."""
    w = world_of(name)

    def rank_main(rank: int) -> list[Step]:
        engine, steps = w.engine(), []
        for step in range(4):
            if step == 2:
                engine = resumed(engine, replace(w, chunk=1 << 20).engine())
            synced(engine, w.grads(rank, step))
            steps.append(observed(engine))
        return steps

    check_nothing_is_lost(w, run_threads(w.size, rank_main))


@pytest.mark.parametrize(
    ("name", "setting", "sync"),
    [
        *product(("oktopk", "ternary"), ("topo", "data parallel"), [{"value_dtype": "bf16"}]),
        ("sharded", "topo", {"value_dtype": "bf16"}),
        *product(
            ["ternary"],
            ("topo", "data parallel"),
            [{"select": "all", "density": 0.3, "value_dtype": "fp32"}],
        ),
    ],
)
def test_the_meter_counts_what_the_formula_says(
    name: str, setting: str, sync: dict[str, Any]
) -> None:
    """To the byte, for the lengths of all messages are known before the step; in one run of all
    parameters too.
    """
    w = replace(world_of(name, setting, **sync), numels=(3000, 640, 9000))
    work = replace(Workload.uniform(w.numels, itemsize=4), sync_itemsize=4, run_numel=CHUNK)
    formula = sum(
        sent for (phase, _), sent in step_bytes(w.config, work).items() if phase == "sync"
    )
    assert {found[step].sent for found in run(w, 2) for step in range(2)} == {formula}


@pytest.mark.parametrize("name", [*SYNC, "radius", "scape"])
def test_a_run_is_sent_under_the_backward_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exchange is issued before the last gradients are scattered; one of all parameters waits
    for them.
    """
    started: list[int] = []
    scatter = Gradients.scatter

    def counted(gradients: Gradients, *args: Any, **options: Any) -> bool:
        started.append(len(gradients._started))
        return scatter(gradients, *args, **options)

    monkeypatch.setattr(Gradients, "scatter", counted)
    modes = SYNC | {"radius": {"mode": "radius"}, "scape": {"mode": "scape"}}
    for select in {"radius": ("parameter",), "oktopk": ("run", "all")}.get(name, ("run",)):
        block = BLOCKS["scape" if name == "scape" else "topo"] | {
            "sync": modes[name] | {"select": select}
        }
        with job(block, overlap_comm=True, model=ONE_GROUP) as deepspeed:
            deepspeed.micro_batch(last=True)
            assert (started[-1] > 0) == (select != "all")
            deepspeed.step()


LAUNCHES = {"ternary": 17}
"""Ternary packets are put together bit by bit in each run."""


@pytest.mark.parametrize("name", [*SYNC, "radius", "scape"])
def test_a_run_costs_few_launches(name: str) -> None:
    """At most 12 for each parameter where a run has sixteen, with exceptions; fewer share what a
    run costs by itself, which is 40 to 60 launches of most modes, 170 of ternary.

    The host waits for nothing in the modes whose messages have known lengths.
    """
    blocks = {
        "radius": {"mode": "radius", "interval": 2},
        "scape": {"mode": "scape", "select": "run"},
    }
    sync = blocks.get(name) or SYNC[name] | {"select": "run"}
    block = {"scheme": "topo", "sync": sync} | ({"optimizer": "node"} if name == "scape" else {})
    config = resolve(emulated(2, 4, 2), **block, overlap=False)
    counts = count(config, numels(16), 16, 2)
    assert total(counts) / PARAMS <= LAUNCHES.get(name, PER_PARAMETER)
    assert name == "tagc" or not any(phase.syncs for phase in counts.values())


def test_reports_are_of_all_runs() -> None:
    """Densities of all elements, not of the last run."""
    for (found,) in run(world_of("oktopk"), 1):
        assert (
            found.report["density_asked"] == pytest.approx(0.05)
            and 0.0499 < found.report["density"] < 0.06
        )
