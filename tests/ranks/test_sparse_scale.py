# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a step of a sparse mode queues, waits for and holds, at any number of peers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from benchmarks.counting import Allocations, Counts, Launches
from tests.marks import late
from tests.ranks.mirrored import mirrored, steps
from tests.ranks.test_sparse_modes import (
    DATA_PARALLEL,
    HIERARCHY,
    NUMEL,
    check_nothing_is_lost,
    run,
    sparse_world,
)
from tests.ranks.worlds import PLAIN, World, shuffled, world
from zero_topo.config.tagc_config import LEAST_BLOCKS
from zero_topo.cost import Workload, step_bytes
from zero_topo.cost.job import Job
from zero_topo.cost.memory import moments, predict_memory
from zero_topo.cost.transformer import Transformer
from zero_topo.topology.presets import emulated

ROW = LEAST_BLOCKS * 1024
MODES: dict[str, dict[str, Any]] = {
    "ternary": {},
    "oktopk": {"tau_prime": 2},
    "sharded oktopk": {"tau_prime": 2, "sharded": True},
    "tagc": {"theta": 0.999},
    "plain tagc": {"theta": 0.7},
    "radius": {"interval": 3, "density": 0.2},
    "scape": {"density": 0.1},
}


def pretended(name: str, peers: int, sharded: bool, runs: int = 1, **sync: Any) -> World:
    """So many peers that each own a row; nodes of four ranks where an optimizer shard is one row;
    so many runs.
    """
    mode = name.split()[-1]
    setting: dict[str, Any] = dict(HIERARCHY["topo"] if sharded else DATA_PARALLEL)
    block = {
        **setting,
        "overlap": False,
        "quantize": PLAIN,
        "sync": {"mode": mode, **MODES[name], **sync},
    }
    topology = emulated(peers, 2, 2) if sharded else emulated(peers, 1, 1)
    row = ROW if mode == "tagc" else ROW // 8  # a sketch needs as many
    numel = row * peers * (4 if sharded else 1)
    return replace(world(block, topology, (numel,) * runs), chunk=numel)


def counted(w: World) -> list[Counts]:
    """What each of five steps queues and waits for."""
    found = Launches()
    with mirrored(w.size):
        steps(w, 5, lambda step: partial(found.phase, str(step)))
    return list(found.phases.values())


@pytest.mark.parametrize(
    ("name", "sharded"),
    [(name, own) for name in MODES for own in (False, True) if own or name != "sharded oktopk"],
)
def test_launches_and_waits_do_not_grow_with_the_peers(name: str, sharded: bool) -> None:
    """At 2 peers and at 16; the host waits for lengths only, and Ok-Topk once more if old
    thresholds select too many.

    A tensor made of Python's numbers counts as a wait.
    """
    waits = {
        "tagc": 3,
        "plain tagc": 1,
        "oktopk": 5,
        "sharded oktopk": 5,
    }
    few, many = (counted(pretended(name, peers, sharded)) for peers in (2, 16))
    for a, b in zip(few, many, strict=True):
        assert a.syncs == b.syncs <= waits.get(name, 0)
        assert b.launches <= 1.2 * a.launches
    if "oktopk" in name:
        assert sum(step.syncs <= 3 for step in many) >= 3


STORED: list[tuple[str, dict[str, Any]]] = [
    ("oktopk", {"density": 0.002}),
    ("tagc", {}),
    ("tagc", {"select": "parameter"}),
    ("radius", {"density": 0.4}),
    ("radius", {"density": 0.05, "value_dtype": "bf16"}),
    ("scape", {}),
    ("scape", {"value_dtype": "bf16"}),
    ("scape", {"select": "parameter"}),
    ("ternary", {}),
    ("ternary", {"density": 0.01}),
    ("ternary", {"density": 0.01, "start": 1}),
]


RUNS = 16
IN_RUNS: list[tuple[str, dict[str, Any]]] = [
    ("tagc", {"theta": None, "select": "run"}),
    ("radius", {"density": 0.4}),
    ("scape", {"select": "parameter"}),
    *((name, {"select": "run"}) for name in MODES if name not in ("tagc", "plain tagc", "radius")),
]


@pytest.mark.parametrize(
    ("name", "sync", "sharded", "peers", "runs"),
    [
        ("sharded oktopk", {"density": 0.01}, True, 8, 1),
        *((*case, own, 8, 1) for case in STORED for own in (False, True)),
        *(late(*case, own, 2, 1) for case in STORED for own in (False, True)),
        *((*case, True, 8, RUNS) for case in IN_RUNS),
    ],
    ids=str,
)
def test_a_step_holds_at_most_what_the_formula_says(
    name: str, sync: dict[str, Any], sharded: bool, peers: int, runs: int
) -> None:
    """The peak next to the residual and the masks.

    In runs it is at most 1.5 bytes an element at 8 peers, with gradients in FP32, where each owns a
    row.
    """
    w = pretended(name, peers, sharded, runs, **sync)
    expected, peak = (
        w.config.sync.scratch(w.config.plan, w.columns, (w.columns // runs,), 4)[0],
        stored(w),
    )
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
    w = sparse_world(DATA_PARALLEL, 4, "oktopk", (NUMEL,), density=1e-6, select=select)

    def per_element(numel: int) -> float:
        (sent,) = step_bytes(w.config, Workload.uniform([numel], itemsize=4)).values()
        return sent / numel

    least = per_element(2**31)
    assert per_element(2**32) == pytest.approx(least, rel=1e-3)
    assert per_element(2**32 + 4) == pytest.approx(
        least * (1 if select == "run" else 1.5), rel=1e-3
    )
    assert per_element(2**34 + 8) == pytest.approx(least * 1.5, rel=1e-3)


# -- the same bits on another way ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["oktopk", "tagc"])
def test_nothing_is_lost_where_groups_are_not_in_the_order_of_the_tree(mode: str) -> None:
    """Messages of any length are brought into the order of the members on both ways."""
    w = world(
        {**DATA_PARALLEL, "quantize": PLAIN, "sync": {"mode": mode}},
        shuffled(emulated(5, 1, 1)),
        (3000,),
    )
    assert w.config.plan.order is not None
    check_nothing_is_lost(w, run(w, 4))
