# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a step of a sparse mode queues, waits for and holds, at any number of peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from benchmarks.counting import Allocations, Counts, Launches, count, total
from tests.marks import late
from tests.plans import resolve
from tests.ranks.mirrored import mirrored, steps
from tests.ranks.sync_cases import SYNC, sync_world
from tests.ranks.test_launch_budget import PARAMS, PER_PARAMETER, numels
from tests.ranks.test_streams import ONE_GROUP, job
from tests.ranks.worlds import BLOCKS, World
from zero_topo.config.tagc_config import LEAST_BLOCKS
from zero_topo.cost import Workload, step_bytes
from zero_topo.cost.job import Job
from zero_topo.cost.memory import moments, predict_memory
from zero_topo.cost.transformer import Transformer
from zero_topo.engine.gradients import Gradients
from zero_topo.topology.presets import emulated

ROW = LEAST_BLOCKS * 1024
MODES: dict[str, dict[str, Any]] = {
    "ternary": {},
    "oktopk": {"density": 0.01, "tau": 64},
    "sharded": {"density": 0.01, "tau": 64},
    "tagc": {"theta": 0.999},
    "tagc, plain": {"theta": 0.7},
    "radius": {"density": 0.2},
    "scape": {"density": 0.1, "warmup": 0},
}
"""And what tests of costs set."""


def pretended(name: str, peers: int, owned: bool, runs: int = 1, **sync: Any) -> World:
    """So many peers that each own a row; nodes of four ranks where an optimizer shard is one row;
    so many runs.
    """
    mode = name.partition(",")[0]
    row = ROW if mode == "tagc" else ROW // 8  # a sketch needs as many
    numel = row * peers * (4 if owned else 1)
    w = sync_world(
        mode,
        "topo" if owned else "data parallel",
        machine=emulated(peers, 2, 2) if owned else emulated(peers, 1, 1),
        numels=(numel,) * runs,
        chunk=numel,
        **{**MODES[name], **sync},
    )
    return replace(w, config=replace(w.config, overlap=False))


def counted(w: World) -> list[Counts]:
    """What each of five steps queues and waits for."""
    found = Launches()
    with mirrored(w.size):
        steps(w, 5, lambda step: partial(found.phase, str(step)))
    return list(found.phases.values())


@pytest.mark.parametrize(
    ("name", "owned"),
    [(name, own) for name in MODES for own in (False, True) if own or name != "sharded"],
)
def test_launches_and_waits_do_not_grow_with_the_peers(name: str, owned: bool) -> None:
    """At 2 peers and at 16; the host waits for lengths only, and Ok-Topk once more if old
    thresholds select too many.

    A tensor made of Python's numbers counts as a wait.
    """
    waits = {
        "tagc": 3,
        "tagc, plain": 1,
        "oktopk": 5,
        "sharded": 5,
    }
    few, many = (counted(pretended(name, peers, owned)) for peers in (2, 16))
    for a, b in zip(few, many, strict=True):
        assert a.syncs == b.syncs <= waits.get(name, 0)
        assert b.launches <= 1.2 * a.launches
    if name in ("oktopk", "sharded"):
        assert sum(step.syncs <= 3 for step in many) >= 3


RUNS = 16
STORED: list[tuple[str, dict[str, Any], int]] = [
    ("oktopk", {"density": 0.002}, 1),
    ("tagc", {}, 1),
    ("tagc", {"select": "parameter"}, 1),
    ("radius", {"density": 0.4}, 1),
    ("scape", {"value_dtype": "bf16"}, 1),
    ("ternary", {}, 1),
    ("ternary", {"start": 1}, 1),
    ("tagc", {"theta": None, "select": "run"}, RUNS),
    ("radius", {"density": 0.4}, RUNS),
    ("scape", {"select": "parameter"}, RUNS),
    *((name, {"select": "run"}, RUNS) for name in ("ternary", "oktopk", "sharded", "scape")),
]


def stored_cases() -> Iterator[Any]:
    """In one run for either place; in many where sums stay with their owners."""
    for name, sync, runs in STORED:
        often = name != "tagc" or runs == 1
        for owned in (True, False) if runs == 1 else (True,):
            case = name, sync, runs, owned
            yield case if often else late(*case)


@pytest.mark.parametrize(("name", "sync", "runs", "owned"), list(stored_cases()), ids=str)
def test_a_step_holds_at_most_what_the_formula_says(
    name: str, sync: dict[str, Any], runs: int, owned: bool
) -> None:
    """The peak next to the residual and the masks.

    In runs it is at most 1.5 bytes an element at 8 peers, with gradients in FP32, where each owns a
    row.
    """
    peers = 8
    w = pretended(name, peers, owned, runs, **sync)
    expected = w.config.sync.scratch(w.config.plan, w.columns, (w.columns // runs,), 4)[0]
    peak = stored(w)
    assert 0.3 * expected <= peak <= expected
    assert runs == 1 or peak <= 1.5 * peers * w.columns


def stored(w: World) -> int:
    """The most bytes that one of four steps holds, after which none are left but a new mask."""
    found: list[Allocations] = []

    def around(step: int) -> Callable[[], AbstractContextManager[object]]:
        found.append(Allocations())
        return lambda: found[-1]

    with mirrored(w.size):
        steps(w, 4, around)
    numel = w.columns * w.size // w.config.plan.gradients
    assert all(one.live <= 0.3 * numel for one in found)
    return max(one.peak for one in found)


def test_what_a_step_holds_is_in_the_prediction() -> None:
    """Among the messages, next to the residual and the masks that stay."""
    shape = Transformer("small", 2, 64, 2, 100, 16, 256)
    for name in ("oktopk", "radius"):
        w = pretended(name, 2, True)
        args = w.config, Workload.uniform(w.numels), Job(shape, 1, 1)
        messages = max(moment["messages"] for moment in moments(*args))
        residual = predict_memory(*args)["residual"]
        most = w.config.sync.scratch(w.config.plan, w.columns, (w.columns,), 2)[0]
        assert messages >= most > residual > 0


# -- above 2**31 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["all", "run"])
def test_bytes_follow_the_width_of_an_index(select: str) -> None:
    """Of 4 bytes up to 2**32 elements, of 8 above; in runs, indices count within an owner's row."""
    w = sync_world("oktopk", "data parallel", density=1e-6, select=select)

    def per_element(numel: int) -> float:
        (sent,) = step_bytes(w.config, Workload.uniform([numel], itemsize=4)).values()
        return sent / numel

    least = per_element(2**31)
    assert per_element(2**32) == pytest.approx(least, rel=1e-3)
    assert per_element(2**32 + 4) == pytest.approx(
        least * (1 if select == "run" else 1.5), rel=1e-3
    )
    assert per_element(2**34 + 8) == pytest.approx(least * 1.5, rel=1e-3)


# -- runs ------------------------------------------------------------------------------------------


RUNS_OF = {
    name: SYNC[name] | {"select": "run"} for name in ("oktopk", "sharded", "ternary", "tagc")
}
RUNS_OF |= {"radius": SYNC["radius"] | {"interval": 2}, "scape": SYNC["scape"] | {"select": "run"}}


@pytest.mark.parametrize("name", [*RUNS_OF, "oktopk of all"])
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
    sync = RUNS_OF.get(name, SYNC["oktopk"])
    block = BLOCKS["scape" if name == "scape" else "topo"] | {"sync": sync}
    with job(block, overlap_comm=True, model=ONE_GROUP) as deepspeed:
        deepspeed.micro_batch(last=True)
        assert (started[-1] > 0) == (name in RUNS_OF)
        deepspeed.step()


LAUNCHES = {"ternary": 17}
"""Ternary packets are put together bit by bit in each run."""


@pytest.mark.parametrize("name", RUNS_OF)
def test_a_run_costs_few_launches(name: str) -> None:
    """At most 12 for each parameter where a run has sixteen, with exceptions; fewer share what a
    run costs by itself, which is 40 to 60 launches of most modes, 170 of ternary.

    The host waits for nothing in the modes whose messages have known lengths.
    """
    block = {"scheme": "topo", "sync": RUNS_OF[name]}
    block |= {"optimizer": "node"} if name == "scape" else {}
    config = resolve(emulated(2, 4, 2), **block, overlap=False)
    counts = count(config, numels(16), 16, 2)
    assert total(counts) / PARAMS <= LAUNCHES.get(name, PER_PARAMETER)
    assert name == "tagc" or not any(phase.syncs for phase in counts.values())
