# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Modes of sync in every setting, and what tests of all modes observe of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.ranks.worlds import NUMELS, PLAIN, World, owned, residual_table, synced, world
from zero_topo.engine.stage3 import Stage3
from zero_topo.sync.quantized import Quantized
from zero_topo.sync.sparse import Sparse
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import emulated

HIERARCHY: dict[str, dict[str, Any]] = {
    "topo": {"scheme": "topo"},
    # A dense group inside the node comes first
    "gradients in a GPU": {"weights": "gpu", "gradients": "gpu", "optimizer": "gpu"},
    "replicated optimizer": {"scheme": "topo", "optimizer": "node"},
}
DATA_PARALLEL = {"weights": "rank", "gradients": "rank", "optimizer": "rank"}
OWNED = {**DATA_PARALLEL, "optimizer": "world"}
PLACES = {**HIERARCHY, "data parallel": DATA_PARALLEL, "owned": OWNED}

SYNC: dict[str, dict[str, Any]] = {
    "oktopk": {"mode": "oktopk", "density": 0.05, "tau": 3, "tau_prime": 2},
    "sharded": {"mode": "oktopk", "density": 0.05, "sharded": True, "tau": 3, "tau_prime": 2},
    "ternary": {"mode": "ternary", "density": 0.05},
    "tagc": {"mode": "tagc", "theta": 0.9},
    "radius": {"mode": "radius", "density": 0.1, "interval": 3},
    "scape": {"mode": "scape", "density": 0.05, "warmup": 3},
    "quantized": {"mode": "quantized"},
}
INTERVAL: int = SYNC["radius"]["interval"]
CHUNK = 600
"""Elements of a run: the small parameters of ``NUMELS`` are one, and each of the others."""


def sync_world(
    name: str,
    place: str = "topo",
    peers: int | None = None,
    numels: tuple[int, ...] = NUMELS,
    machine: Topology | None = None,
    chunk: int = 1 << 20,
    dtype: torch.dtype = torch.float32,
    accumulation_dtype: str | None = None,
    **sync: Any,
) -> World:
    """A world with a mode and nothing else quantized.

    Args:
        name: of the mode in `SYNC`, whose settings ``sync`` changes.
        place: of `PLACES`.
        peers: ranks of data parallelism, by default four; the others have 2 x 2 x 2.
        numels: elements of each parameter.
        machine: another machine.
        chunk: elements of a run; with 600, modes that can select of each run do.
        dtype: of weights and gradients.
        accumulation_dtype: of the gradient shard, if it is another one.
        sync: settings.
    """
    if machine is None and place in HIERARCHY and peers is None:
        machine = emulated(2, 2, 2)
    if chunk == CHUNK and SYNC[name]["mode"] in ("oktopk", "ternary", "tagc", "scape"):
        sync = {"select": "run", **sync}
    block = {**PLACES[place], "quantize": PLAIN, "sync": {**SYNC[name], **sync}}
    if accumulation_dtype is not None:
        block["accumulation_dtype"] = accumulation_dtype
    w = world(block, machine or emulated(peers or 4, 1, 1), numels)
    return replace(w, chunk=chunk, dtype=dtype)


def mode_of(engine: Stage3) -> Sparse:
    """The mode of an engine."""
    assert isinstance(engine.gradients.mode, Sparse)
    return engine.gradients.mode


class Step(NamedTuple):
    """What one rank sees of one step: its own row and all its optimizer rows, synced; its residual
    then, by owner; the bytes of sync; the report.
    """

    own: Tensor
    rows: Tensor
    residuals: list[tuple[int, Tensor]]
    sent: int
    report: dict[str, float]


def residuals_of(engine: Stage3) -> list[tuple[int, Tensor]]:
    """The owners that lack something of a rank between steps, and its residual for each."""
    mode = engine.gradients.mode
    plan = engine.layout.plan
    if isinstance(mode, Quantized):
        residual = mode.residual_owners()
        rows = mode.residual_rows()
        if residual is None or rows is None:
            return []
        found = zip(residual.owners, rows.float().clone(), strict=True)
        return [(owner, row) for owner, row in found if owner != engine.layout.rank]
    assert isinstance(mode, Sparse)
    lo, hi = 1, 1
    if plan.gradients < plan.world_size:
        lo, hi = plan.stages(plan.gradients, plan.world_size)[-1]
    members = plan.group(engine.layout.rank, lo, hi)
    return list(zip(members, residual_table(mode), strict=True))


def observed(engine: Stage3) -> Step:
    """After sync, and the end of the step."""
    rows, own = engine.gradients.optimizer_rows().float().clone(), owned(engine).float()
    engine.end_step(skipped=False)
    sent = sum(n for (phase, _), n in engine.meter.last_step.items() if phase == "sync")
    return Step(own, rows, residuals_of(engine), sent, engine.gradients.mode.report())


def run(
    w: World, steps: int, grads: Callable[[int, int], list[Tensor]] | None = None
) -> list[list[Step]]:
    """Steps of every rank, on the world's gradients or others."""

    def rank_main(rank: int) -> list[Step]:
        engine, found = w.engine(), []
        for step in range(steps):
            synced(engine, (grads or w.grads)(rank, step))
            found.append(observed(engine))
        return found

    return w.on_ranks(rank_main)


def summed(w: World, results: list[list[tuple[int, Tensor]]]) -> list[Tensor]:
    """By owner: the residuals of all ranks for it."""
    found: dict[int, Tensor] = defaultdict(lambda: torch.zeros(w.columns))
    for residuals in results:
        for owner, part in residuals:
            found[owner] = found[owner] + part
    return [found[owner] for owner in range(w.size)]


ROUNDING = {torch.bfloat16: 0.2, torch.float16: 0.02}
"""The part of a residual that roundings of 16-bit gradients may amount to."""


def check_nothing_is_lost(w: World, results: list[list[Step]]) -> None:
    """After every step: the sum of all gradients = what arrived + all residuals, for each owner; of
    16 bits up to their roundings, which are far less than the residual.
    """
    arrived = [torch.zeros(w.columns) for _ in range(w.size)]
    due = [torch.zeros(w.columns) for _ in range(w.size)]
    for step in range(len(results[0])):
        residuals = summed(w, [found[step].residuals for found in results])
        for rank in range(w.size):
            arrived[rank] += results[rank][step].own
            due[rank] += w.own_mean(rank, step)
            found = arrived[rank] + residuals[rank]
            if w.dtype in ROUNDING:
                largest = ROUNDING[w.dtype] * residuals[rank].norm()
                assert 0 < (found - due[rank]).norm() < largest
            else:
                torch.testing.assert_close(found, due[rank], atol=2e-5, rtol=1e-5)
