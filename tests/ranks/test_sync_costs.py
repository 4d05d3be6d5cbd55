# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What a step of a sparse mode queues, waits for and holds, at any number of peers.

One rank of a pretended world is run, whose peers all send what it sends to itself. In `fake_world`
nothing comes, and a mode that goes on with what came would stop. Here what comes is of the right
size and in the right region, so that a mode makes all of its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.bare import fake_world
from benchmarks.counting import Allocations, Counts, Launches, count, total
from tests.marks import late
from tests.plans import resolve
from tests.ranks.sync_cases import SYNC, sync_world
from tests.ranks.test_launch_budget import PARAMS, PER_PARAMETER, numels
from tests.ranks.test_streams import ONE_GROUP, job
from tests.ranks.trainer import Trainer
from tests.ranks.worlds import BLOCKS, World
from zero_topo.collectives import backends
from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Group
from zero_topo.config.tagc_config import LEAST_BLOCKS
from zero_topo.cost import Workload, step_bytes
from zero_topo.cost.job import Job
from zero_topo.cost.memory import moments, predict_memory
from zero_topo.cost.transformer import Transformer
from zero_topo.engine.gradients import Gradients
from zero_topo.sync import selection
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


class Mirrored(Group):
    """Peers that send what this rank sends to itself."""

    def _all_gather(self, x: Tensor, counts: Sequence[int] = ()) -> Handle[Tensor]:
        if not counts:
            return Handle(torch.stack([x] * self.size))
        received = torch.cat([x] * self.size)
        assert len(received) == sum(counts)
        return Handle(received)

    def _all_to_all(
        self, x: Tensor, counts: Sequence[int] = (), expected: Sequence[int] = ()
    ) -> Handle[Tensor]:
        if not counts:
            return Handle(x[self.index].expand_as(x).contiguous())
        assert sum(counts) == len(x)
        begin = sum(counts[: self.index])
        own = x[begin : begin + counts[self.index]]
        # Where nothing stays here (a tree), a message of zeros comes: an element that is zero.
        zeros = self._room(expected, x).zero_()
        received = torch.cat([own] * self.size) if len(own) else zeros
        assert len(received) == sum(expected)
        return Handle(received)


@contextmanager
def mirrored(size: int) -> Iterator[None]:
    """This process is rank 0 of a world whose other ranks send what it sends; sums take the path of
    a GPU.
    """
    with (
        fake_world(size),
        patch.object(backends, "transport", lambda: Mirrored),
        patch.object(selection, "_on_cpu", lambda x: False),
    ):
        yield


def steps(w: World, count: int, around: Callable[[int], AbstractContextManager[object]]) -> None:
    """Steps of rank 0; ``around(step)`` is entered while gradients are synced, and again while the
    step ends.
    """
    trainer = Trainer(w, 0)
    engine = trainer.engine
    for step in range(count):
        engine.gradients.scatter(range(len(w.numels)), w.grads(0, step), last=True)
        with around(step):
            engine.gradients.sync()
        trainer.update(engine.gradients.optimizer_rows())
        with around(step):
            engine.end_step(skipped=False)


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
        steps(w, 5, lambda step: found.phase(str(step)))
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
Case = tuple[str, dict[str, Any]]
ONE_RUN: list[Case] = [
    ("oktopk", {"density": 0.002}),
    ("tagc", {}),
    ("tagc", {"select": "parameter"}),
    ("radius", {"density": 0.4}),
    ("scape", {"value_dtype": "bf16"}),
    ("ternary", {}),
    ("ternary", {"start": 1}),
]
IN_RUNS: list[Case] = [
    ("radius", {"density": 0.4}),
    ("scape", {"select": "parameter"}),
    *((name, {"select": "run"}) for name in ("ternary", "oktopk", "sharded", "scape")),
]


@pytest.mark.parametrize(
    ("name", "sync", "runs", "owned"),
    [
        *((*case, 1, owned) for case, owned in product(ONE_RUN, (True, False))),
        # Where sums stay with their owners
        *((*case, RUNS, True) for case in IN_RUNS),
        late("tagc", {"theta": None, "select": "run"}, RUNS, True),
    ],
    ids=str,
)
def test_a_step_holds_at_most_what_the_formula_says(
    name: str, sync: dict[str, Any], runs: int, owned: bool
) -> None:
    """The peak of four steps next to the residual and the masks; none but a new mask is left after
    a step.

    In runs it is at most 1.5 bytes an element at 8 peers, with gradients in FP32, where each owns a
    row.
    """
    peers = 8
    w = pretended(name, peers, owned, runs, **sync)
    expected = w.config.sync.scratch(w.config.plan, w.columns, (w.columns // runs,), 4)[0]
    found = [Allocations() for _ in range(4)]
    with mirrored(w.size):
        steps(w, 4, found.__getitem__)
    numel = w.columns * w.size // w.config.plan.gradients
    assert all(one.live <= 0.3 * numel for one in found)
    peak = max(one.peak for one in found)
    assert 0.3 * expected <= peak <= expected
    assert runs == 1 or peak <= 1.5 * peers * w.columns


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


@pytest.mark.parametrize(
    ("select", "numel", "growth"),
    [("all", 2**32, 1), ("all", 2**32 + 4, 1.5), ("run", 2**32 + 4, 1), ("run", 2**34 + 8, 1.5)],
)
def test_bytes_follow_the_width_of_an_index(select: str, numel: int, growth: float) -> None:
    """Of 4 bytes up to 2**32 elements, of 8 above; in runs, indices count within an owner's row."""
    w = sync_world("oktopk", "data parallel", density=1e-6, select=select)
    least, sent = (
        sum(step_bytes(w.config, Workload.uniform([size], itemsize=4)).values())
        for size in (2**31, numel)
    )
    assert sent / numel == pytest.approx(growth * least / 2**31, rel=1e-3)


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
