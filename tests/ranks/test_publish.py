# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The all-gather of updated weights: no gather reads older ones; its bytes are the formula's."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.ranks.worlds import (
    NUMELS,
    PLAIN,
    World,
    loaded,
    world,
)
from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Group
from zero_topo.cost import step_bytes
from zero_topo.engine.stage3 import Stage3

SCHEMES = ("topo", "zero3", "zero++", "hsdp")


def started(
    w: World, dtype: torch.dtype = torch.bfloat16, chunk: int = 600
) -> tuple[Stage3, Tensor]:
    """An engine with loaded weights, and the FP32 masters of its optimizer rows."""
    engine, _ = loaded(w, dtype, chunk)
    return engine, engine.weights.storage.own.float().clone()


def masters_of(w: World, rank: int, degree: int, step: int, rate: float) -> Tensor:
    """The same random walk of FP32 masters for everybody: this rank's rows of a degree."""
    plan = w.config.plan
    walks = [
        walked(numel, plan.world_size, plan.shard_numel(numel), step, rate) for numel in w.numels
    ]
    return torch.cat([walk[plan.rows(rank, degree)] for walk in walks], dim=1)


@lru_cache(maxsize=128)
def walked(numel: int, rows: int, columns: int, step: int, rate: float) -> Tensor:
    """Where the walk of one parameter is after some steps; not to be written to."""
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(numel))
    for s in range(step):
        walk = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1000 * s + numel))
        whole = whole + rate * walk
    whole.view(-1)[numel:] = 0  # padding
    return whole


def publish_step(engine: Stage3, masters: Tensor, param_indices: range | None = None) -> None:
    """What the optimizer does with new masters, by default of all parameters."""
    param_indices = param_indices or range(len(engine.layout.numels))
    if not engine.weights.needs_masters:
        engine.weights.storage.own[:, engine.layout.columns_of(param_indices)].copy_(masters)
    engine.weights.mark_updated(param_indices, masters if engine.weights.needs_masters else None)


def test_a_delayed_publish_is_never_read_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is gathered after a step is of that step, however late publish arrives."""
    all_gather = Group._all_gather

    def slow(group: Group, message: Tensor) -> Handle[Tensor]:
        """Messages arrive when they are waited for; until then, the received buffer holds NaN."""
        received = all_gather(group, message).wait()
        arrived = received.clone()
        received.view(torch.uint8).fill_(255)  # NaN in every floating type
        return Handle(received).then(lambda r: r.copy_(arrived))

    monkeypatch.setattr(Group, "_all_gather", slow)
    w = world({"scheme": "topo", "quantize": PLAIN})

    def rank_main(rank: int) -> bool:
        engine, _ = started(w, torch.float32)
        good = True
        for step in range(1, 4):
            publish_step(engine, masters_of(w, rank, 8, step, 1e-2))
            for param_indices in [(3,), (0, 1, 2, 4)]:
                for param_index, whole in zip(
                    param_indices,
                    engine.weights.gather(param_indices, "gather_forward").wait(),
                    strict=True,
                ):
                    rows = engine.layout.parameter(masters_of(w, rank, 1, step, 1e-2), param_index)
                    good &= torch.equal(whole, rows.reshape(-1)[: NUMELS[param_index]])
        return good

    assert all(run_threads(w.size, rank_main))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_published_bytes_are_the_formula(scheme: str) -> None:
    """Per domain, for several runs."""
    w = world({"scheme": scheme, "quantize": PLAIN})

    def rank_main(rank: int) -> None:
        engine, masters = started(w, chunk=600)
        engine.meter.reset_step()
        publish_step(engine, masters + 0.5)
        engine.end_step(skipped=False)
        work = engine.workload(1)
        expected = {key: n for key, n in step_bytes(w.config, work).items() if key[0] == "publish"}
        engine.weights.wait_for_publish()
        engine.meter.end_step()
        sent = {k: n for k, n in engine.meter.total.items() if k[0] == "publish"}
        assert sent == expected

    run_threads(w.size, rank_main)
