# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Expert parallelism by AutoEP trains as under unmodified ZeRO-3: dense parameters and experts have
a plan each.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_topo
from benchmarks.engine_groups import clean_groups
from tests.launcher.checkpoints import resume, resume_both, run_and_save, save
from tests.launcher.parallel_models import Mixture, autoep, autotp, inputs
from tests.launcher.parity import Result, assert_equal, run
from tests.launcher.training import (
    Job,
    advance,
    batch,
    block,
    close,
    running,
    start,
    without_optimizer,
)
from tests.marks import core, on_eight
from zero_topo.observe.report import bytes_of

EXACT = 1e-6
BLOCKS: dict[str, dict[str, Any]] = {
    "zero3": block("zero3"),
    "topo": block("topo"),
    "hsdp": block("hsdp"),
    "codes": block("topo", quantize={}),
}


@pytest.fixture(autouse=True)
def own_groups() -> Iterator[None]:
    """Engines of other tests have no experts."""
    with clean_groups():
        yield


def job(zero_topo: dict[str, Any] | None, size: int = 2, steps: int = 4, **more: Any) -> Job:
    """Steps of two micro-batches whose gradients are clipped; the norms are compared too."""
    seen: list[float] = []

    def note(engine: Any, _: int) -> None:
        seen.append(float(engine.get_global_grad_norm()))

    ds = autoep(size) | more.pop("ds", {})
    return Job(
        Mixture, zero_topo, steps=steps, micro_batches=2, ds=ds, after_step=note, seen=seen, **more
    )


def under_stock(run_of: Job) -> Result:
    """The run under unmodified DeepSpeed."""
    with clean_groups():
        return run(run_of)


@pytest.mark.parametrize(
    ("scheme", "size"),
    [
        core("topo", 2),
        *(("zero3", 2), ("hsdp", 2), ("topo", 4)),
        *(on_eight(scheme, size) for scheme in ("zero3", "topo", "hsdp") for size in (2, 4)),
    ],
)
def test_experts_train_and_resume_as_under_stock(scheme: str, size: int, shared_path: Path) -> None:
    """Losses, norms that bind and weights of four steps; checkpoints of both go on as their runs
    did.
    """
    zero = {"sub_group_size": 300, "stage3_param_persistence_threshold": 20}
    ds = {"zero_optimization": zero}
    with clean_groups():
        stock = run_and_save(job(None, size, ds=ds), shared_path / "stock")
    split = partial(job, BLOCKS[scheme], size, ds=ds)
    mine = run_and_save(split(), shared_path / "own")
    assert_equal(mine, stock, EXACT)
    close(resume_both(split(), (shared_path / "own", mine), (shared_path / "stock", stock)))


@pytest.mark.parametrize(
    ("size", "shared"), [(2, 2), on_eight(2, 2), on_eight(4, 2), on_eight(4, 4)]
)
def test_experts_train_with_autotp_as_under_stock(
    size: int, shared: int, shared_path: Path
) -> None:
    """Neighbouring ranks share each dense layer, and see the same tokens; experts are spread over
    ``size`` ranks. Checkpoints of both go on as their runs did.
    """
    batches = partial(inputs, dist.get_rank() // shared)
    split = partial(job, size=size, ds=autotp(shared), batch=batches)
    with clean_groups():
        stock = run_and_save(split(None), shared_path / "stock")
    mine = run_and_save(split(BLOCKS["topo"]), shared_path / "own")
    assert_equal(mine, stock, EXACT)
    folders = (shared_path / "own", mine), (shared_path / "stock", stock)
    close(resume_both(split(BLOCKS["topo"]), *folders))


def test_optimizer_offload_trains_as_under_stock() -> None:
    zero = {"offload_optimizer": {"device": "cpu"}}
    ds = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    stock = under_stock(job(None, ds=ds))
    assert_equal(run(job(BLOCKS["topo"], ds=ds)), stock, EXACT)


def test_an_engine_without_an_optimizer_computes_as_under_stock() -> None:
    """Experts are gathered over their own groups there too."""
    found = []
    for zero in (None, BLOCKS["zero3"]):
        with clean_groups(), running(job(zero), begin=without_optimizer) as engine, torch.no_grad():
            found.append(engine(batch(0, 0, torch.float32)[0]).clone())
    torch.testing.assert_close(found[0], found[1], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("size", [2, on_eight(2), on_eight(4)])
def test_quantized_experts_train_about_as_under_stock(size: int) -> None:
    """INT8 weights and 4-bit gradients of both plans."""
    stock = under_stock(job(None, size))
    assert run(job(BLOCKS["codes"], size)).losses == pytest.approx(stock.losses, rel=0.05)


@pytest.mark.parametrize(
    ("scheme", "size"),
    [("zero3", 2), on_eight("zero3", 2), on_eight("topo", 2), on_eight("topo", 4)],
)
def test_bytes_equal_the_formulas_of_both_trees(scheme: str, size: int) -> None:
    """The experts' domains have a name of their own."""
    zero = {
        "stage3_prefetch_bucket_size": 0,
        "reduce_bucket_size": 10**6,
        "stage3_max_live_parameters": 0,
    }
    split = job(BLOCKS[scheme], size, ds={"zero_optimization": zero})
    with running(split) as engine:
        advance(split, engine, 0, 2)
        found = zero_topo.stats(engine)
    assert found.experts is not None
    assert found.experts[0].plan.world_size == dist.get_world_size() // size
    assert found.step_bytes == bytes_of(found.parts)
    phase = "scatter" if scheme == "zero3" else "sync"
    assert (phase, "experts_world") in found.step_bytes


def test_a_resumed_run_with_codes_goes_on_with_equal_bits(shared_path: Path) -> None:
    """Also the experts' stored INT8 weights."""
    saved = save(job(BLOCKS["codes"]), shared_path)
    assert resume(job(BLOCKS["codes"]), shared_path) == saved.losses


def test_offloaded_states_of_both_plans_come_back() -> None:
    """A run whose states are on the host between two steps goes on as if they had stayed."""
    split = job(BLOCKS["topo"])
    undisturbed = run(split).losses

    def away(engine: Any, step: int) -> None:
        if step == 2:
            engine.offload_states()
            engine.reload_states()

    assert run(job(BLOCKS["topo"], each_step=away)).losses == undisturbed


@pytest.mark.parametrize("shared", [1, on_eight(2)])
def test_sparse_sync_of_both_plans_converges(shared: int) -> None:
    """Also with AutoTP, whose ranks must then have equal replicas: ``debug_checks`` compares
    them.
    """
    sparse = block("topo", sync={"mode": "oktopk", "density": 0.2})
    ds = autotp(shared) if shared > 1 else {}
    batches = partial(inputs, dist.get_rank() // shared)
    losses = run(job(sparse, steps=10, ds=ds, batch=batches)).losses
    assert losses[-1] < losses[0] * 0.8


def test_muon_is_refused() -> None:
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}
    with pytest.raises(ValueError, match="Muon does not work with expert_parallel"):
        start(job(BLOCKS["topo"], ds=muon))


def test_degrees_that_do_not_divide_the_experts_groups_are_refused() -> None:
    """A number counts ranks of the experts' group too."""
    world = dist.get_world_size()
    wide = block("topo", weights=world, gradients=world, optimizer=world)
    del wide["scheme"]
    line = f"expert_parallel: weights degree {world} .*experts are sharded over {world // 2} of"
    with pytest.raises(ValueError, match=line):
        start(job(wide))
