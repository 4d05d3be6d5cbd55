# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Delta publish: copies stay bit-identical and close to the masters; overlap and delay change
nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import run_threads
from tests.ranks.worlds import (
    NUMELS,
    PLAIN,
    World,
    assert_weights_alike,
    either_placement,
    loaded,
    primary,
    world,
)
from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Group
from zero_topo.cost import step_bytes
from zero_topo.engine.agreement import checksum
from zero_topo.engine.stage3 import Stage3
from zero_topo.topology.model import Topology

SCHEMES = ("topo", "zero3", "zero++", "hsdp")


def block(scheme: str = "topo", delta: str | None = "int4", **more: Any) -> dict[str, Any]:
    """A block whose only quantized phase is publish."""
    return {
        "scheme": scheme,
        "quantize": PLAIN,
        "publish": {"delta": delta, "block_size": 64},
        **more,
    }


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


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("delta", ["int8", "int4"])
@either_placement
def test_every_copy_is_bit_identical_and_close_to_the_masters(
    scheme: str, delta: str, machine: Topology
) -> None:
    """Whatever the tree and the scheme: the owner's own view is every replica's, and follows the
    masters.
    """
    w = world(block(scheme, delta), machine)
    plan = w.config.plan

    def rank_main(rank: int) -> tuple[int, float]:
        engine, _ = started(w)
        for step in range(1, 6):
            engine.weights.mark_updated(masters=masters_of(w, rank, plan.optimizer, step, 1e-2))
        engine.weights.wait_for_publish()
        wanted = masters_of(w, rank, plan.weights, 5, 1e-2)
        return int(checksum(primary(engine))), float(
            (primary(engine) - wanted).norm() / wanted.norm()
        )

    results = run_threads(w.size, rank_main)
    assert_weights_alike(w, [found for found, _ in results])
    assert max(error for _, error in results) < 3e-3


def replica_errors(w: World, dtype: torch.dtype, steps: int) -> list[list[float]]:
    """By rank and step: how far the replicas are from masters that walk at random, ever more
    slowly, relatively.
    """

    def rank_main(rank: int) -> list[float]:
        engine, masters = started(w, dtype)
        generator = torch.Generator().manual_seed(rank)
        errors = []
        for step in range(steps):
            rate = 1e-2 * (0.97**step)
            masters = masters + rate * torch.randn(masters.shape, generator=generator)
            engine.weights.mark_updated(masters=masters)
            engine.weights.wait_for_publish()
            rows = engine.weights.storage.own.float()
            errors.append(float((rows - masters).norm() / masters.norm()))
        return errors

    return run_threads(w.size, rank_main)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.bfloat16, 3e-3), (torch.float32, 2e-3)], ids=str
)
def test_the_replica_error_does_not_grow(dtype: torch.dtype, limit: float) -> None:
    """Over many steps; in FP32 it falls with the learning rate. An owner that ignored the replica's
    rounding drifts.
    """
    for errors in replica_errors(world(block("topo", "int4")), dtype, 120):
        assert max(errors) <= limit
        late, early = sum(errors[-20:]), sum(errors[20:40])
        assert late <= 1.25 * early if dtype == torch.bfloat16 else late <= 0.3 * early


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
    w = world(block("topo", None))

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
@pytest.mark.parametrize("delta", [None, "int8", "int4"])
def test_published_bytes_are_the_formula(scheme: str, delta: str | None) -> None:
    """Per domain, for several runs, quantized or not."""
    w = world(block(scheme, delta))

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
