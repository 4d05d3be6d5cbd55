# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism, by a client's ``mpu`` and by AutoTP, and expert parallelism by AutoEP.

They train as under unmodified ZeRO-3. Dense parameters and experts have a plan each.
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
from tests.launcher.checkpoints import SAVED_AT, TAG, assert_same_bits, resume, save
from tests.launcher.parallel_models import HIDDEN, Layers, Mixture, Mpu, autoep, autotp
from tests.launcher.training import (
    ADAMS,
    PLAIN,
    Job,
    advance,
    assert_equal,
    batch,
    block,
    close,
    run,
    running,
    start,
    weights,
    without_optimizer,
)
from tests.marks import core, on_eight
from zero_topo.observe.report import bytes_of

EXACT = 1e-6
SUB_GROUPS = {"sub_group_size": 200, "stage3_param_persistence_threshold": 20}
ON_HOST = {"zero_optimization": {**SUB_GROUPS, "offload_optimizer": {"device": "cpu"}}}
CASES: dict[str, dict[str, Any]] = {
    "autotp": {"shared": 2, "hidden": 25},
    "autotp of 4": {"shared": 4, "hidden": 25},
    "mpu": {"shared": 2, "by_mpu": True, "ds": ON_HOST},
    "mpu of far ranks": {"shared": 2, "by_mpu": True, "far": True},
    "experts": {"experts": 2, "ds": {"zero_optimization": SUB_GROUPS}},
    "experts of 4": {"experts": 4},
    "experts on the host": {"experts": 2, "ds": ON_HOST},
    "experts and autotp": {"experts": 2, "shared": 2},
    "experts of 4 and autotp of 4": {"experts": 4, "shared": 4},
}


@pytest.fixture(autouse=True)
def own_groups() -> Iterator[None]:
    """Restore the groups: engines of other tests have no parallelism."""
    with clean_groups():
        yield


def job(
    zero_topo: dict[str, Any] | None,
    experts: int = 1,
    shared: int = 1,
    by_mpu: bool = False,
    far: bool = False,
    hidden: int = HIDDEN,
    ds: dict[str, Any] | None = None,
    steps: int = 4,
    **more: Any,
) -> Job:
    """Return a run of two micro-batches whose gradients are clipped; the norms are compared too.

    Args:
        zero_topo: the block.
        experts: number of ranks over which experts are spread; 1 for a model without.
        shared: number of ranks that share each dense layer.
        by_mpu: they are a client's; else AutoTP's.
        far: they lie on different nodes.
        hidden: units of a dense layer.
        ds: keys of the DeepSpeed config.
        steps: number of optimizer steps.
        more: other fields of the run.
    """
    seen: list[float] = []

    def note(engine: Any, _: int) -> None:
        seen.append(float(engine.get_global_grad_norm()))

    keys = dict(ds or {})
    mpu = None
    data_rank = dist.get_rank() // shared
    if by_mpu:
        mpu = Mpu(shared, far)
        data_rank = mpu.get_data_parallel_rank()
    elif shared > 1:
        keys |= autotp(shared)
    model: Any = partial(Layers, mpu, hidden)
    if experts > 1:
        model = Mixture
        keys |= autoep(experts)
    return Job(
        model,
        zero_topo,
        steps=steps,
        micro_batches=2,
        ds=keys,
        batch=partial(batch, rank=data_rank),
        mpu=mpu,
        after_step=note,
        seen=seen,
        **more,
    )


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        core("autotp", "topo"),
        core("experts", "topo"),
        ("mpu", "topo"),
        ("mpu of far ranks", "topo"),
        ("experts of 4", "topo"),
        ("experts on the host", "topo"),
        ("experts and autotp", "topo"),
        *((name, scheme) for name in ("mpu", "experts") for scheme in ("zero3", "hsdp")),
        *(on_eight(name, "topo") for name in CASES),
        *(on_eight(name, "hsdp") for name in ("autotp", "experts")),
    ],
)
def test_it_trains_and_resumes_as_under_stock(name: str, scheme: str, shared_path: Path) -> None:
    """Losses, norms that bind and weights are stock's; checkpoints of both go on as their runs did.

    Parts of a layer may have different shapes. A data-parallel group of far ranks has whole nodes.
    """

    def split(zero_topo: dict[str, Any] | None) -> Job:
        return job(zero_topo, **CASES[name])

    with clean_groups():
        stock = save(split(None), shared_path / "stock")
    mine = save(split(block(scheme)), shared_path / "own")
    assert_equal(mine.result, stock.result, EXACT)
    engine = start(mine.job, 99)
    for saved, close_to in ((mine, 0.0), (stock, EXACT)):
        engine.load_checkpoint(str(saved.path))
        losses = advance(mine.job, engine, SAVED_AT, mine.job.steps)
        torch.testing.assert_close(losses, saved.losses, rtol=close_to, atol=close_to)
    tree = zero_topo.stats(engine).config.topology
    assert "far" not in name or (tree.nodes, tree.ranks_per_node) == (1, dist.get_world_size() // 2)
    if name.startswith("autotp"):
        refuses_a_damaged_file(engine, mine.path, CASES[name]["shared"])
    close(engine)


def refuses_a_damaged_file(engine: Any, folder: Path, shared: int) -> None:
    """All ranks refuse it, also those of the other data-parallel group, which read other files.

    Files are named by the rank in the data-parallel group and that in the tensor-parallel group, as
    stock's.
    """
    files = folder / TAG
    names = {
        f"zero_pp_rank_{rank // shared}_mp_rank_0{rank % shared}_model_states.pt"
        for rank in range(dist.get_world_size())
    }
    assert {path.name for path in files.glob("*model_states.pt")} == names
    dist.barrier()
    if dist.get_rank() == 0:
        (files / "zero_pp_rank_0_mp_rank_01_model_states.pt").write_bytes(b"damaged")
    dist.barrier()
    with pytest.raises(ValueError, match=r"mp_rank_01_model_states\.pt cannot be read"):
        engine.load_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["autotp", "experts", on_eight("autotp"), on_eight("experts")])
def test_quantized_runs_train_near_stock_and_resume_with_equal_bits(
    name: str, shared_path: Path
) -> None:
    """INT8 weights, also of uneven parts and of experts, and 4-bit gradients of all plans."""
    with clean_groups():
        stock = run(job(None, **CASES[name]))
    quantized = job(block("topo", quantize={}), **CASES[name])
    mine = save(quantized, shared_path)
    assert mine.result.losses == pytest.approx(stock.losses, rel=0.05)
    assert resume(quantized, shared_path) == mine.losses


@pytest.mark.parametrize(
    ("name", "scheme", "quantize"),
    [
        ("mpu", "zero3", {}),
        ("experts", "zero3", PLAIN),
        on_eight("mpu", "topo", {}, name="mpu"),
        on_eight("mpu", "zero++", {}, name="mpu, zero++"),
        on_eight("experts", "topo", PLAIN, name="experts"),
    ],
)
def test_bytes_equal_the_formulas_of_all_trees(
    name: str, scheme: str, quantize: dict[str, Any]
) -> None:
    """A data-parallel group has one die of each GPU. The experts' domains have a name of their
    own.
    """
    zero = {
        "stage3_prefetch_bucket_size": 0,
        "reduce_bucket_size": 10**6,
        "stage3_max_live_parameters": 0,
    }
    keys = {**CASES[name], "ds": {"zero_optimization": zero}}
    split = job(block(scheme, quantize=quantize), **keys)
    with running(split) as engine:
        advance(split, engine, 0, 2)
        found = zero_topo.stats(engine)
    plan = found.experts[0].plan if found.experts else found.config.plan
    assert plan.world_size == dist.get_world_size() // 2
    assert found.step_bytes == bytes_of(found.parts)
    domains = {domain for _, domain in found.step_bytes}
    assert ("experts_world" in domains) == (name == "experts")


@pytest.mark.parametrize(
    "sync", [{"mode": "oktopk", "density": 0.2}, {"mode": "tagc", "theta": 0.5}]
)
def test_replicas_stay_equal_under_sparse_sync(sync: dict[str, Any]) -> None:
    """Without the mean over tensor-parallel ranks norms and biases drift apart.

    ``debug_checks`` compares them too: all ranks raise, and the line names a parameter.
    """
    everyones: list[Any] = [None] * dist.get_world_size()
    split = job(block("topo", gradients="rank", sync=sync), shared=2)
    with running(split) as engine:
        advance(split, engine, 0, 6)
        assert zero_topo.stats(engine).step_bytes["replicated", "replicated"] > 0
        whole = weights(engine)
        found = {name: whole[name] for name in whole if "norm" in name or "out" in name}
        dist.all_gather_object(everyones, found)
        for theirs in everyones:
            assert_same_bits(found, theirs)
        if dist.get_rank() % 2:
            master = engine.optimizer.fp32_partitioned_groups_flat[0]
            with torch.no_grad():
                master += 1
        with pytest.raises(
            RuntimeError, match="is replicated on tensor-parallel ranks but has different bits"
        ):
            advance(split, engine, 6, 7)


@pytest.mark.parametrize("shared", [1, on_eight(2)])
def test_sparse_sync_of_experts_converges(shared: int) -> None:
    """With AutoTP too, where ``debug_checks`` compares replicas."""
    sparse = block("topo", sync={"mode": "oktopk", "density": 0.2})
    losses = run(job(sparse, experts=2, shared=shared, steps=10)).losses
    assert losses[-1] < losses[0] * 0.8


@pytest.mark.parametrize("name", ["autotp", "experts"])
def test_an_engine_without_an_optimizer_computes_as_under_stock(name: str) -> None:
    """It has a plan of the weights alone; experts are gathered over their own groups there too."""
    found = []
    for zero in (None, block("topo")):
        split = job(zero, **CASES[name])
        assert split.batch is not None
        x, _ = split.batch(0, 0, torch.float32)
        with clean_groups(), running(split, begin=without_optimizer) as engine, torch.no_grad():
            found.append(engine(x).clone())
    torch.testing.assert_close(found[0], found[1], rtol=EXACT, atol=EXACT)


def test_offloaded_states_of_both_plans_come_back() -> None:
    """A run whose states are on the host between two steps goes on as if they had stayed."""

    def away(engine: Any, step: int) -> None:
        if step == 2:
            engine.offload_states()
            engine.reload_states()

    undisturbed = run(job(block("topo"), experts=2)).losses
    assert run(job(block("topo"), experts=2, each_step=away)).losses == undisturbed


SCAPE = block("topo", sync={"mode": "scape"})
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}


@pytest.mark.parametrize(
    ("zero_topo", "keys", "match"),
    [
        # Its masks say which elements of AdamS's momentum leave the optimizer
        (SCAPE, {"shared": 2, "by_mpu": True, "ds": ADAMS}, "scape.*with tensor parallelism"),
        (SCAPE, {"shared": 2, "ds": ADAMS}, "scape.*with tensor parallelism"),
        (block("topo"), {"experts": 2, "ds": MUON}, "Muon does not work with expert_parallel"),
        # It gives tensor-parallel ranks rank 0's part of the weights
        (
            block("topo"),
            {"shared": 2, "zero_init": True},
            r"inp.weight is partitioned over \d+ ranks",
        ),
    ],
    ids=["scape with an mpu", "scape with AutoTP", "Muon with experts", "`zero.Init`"],
)
def test_what_cannot_train_is_refused(
    zero_topo: dict[str, Any], keys: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        start(job(zero_topo, **keys))
