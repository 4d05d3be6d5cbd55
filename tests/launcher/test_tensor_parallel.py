# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism, by a client's ``mpu`` and by AutoTP, trains as under unmodified ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_topo
from benchmarks.engine_groups import clean_groups
from tests.launcher.checkpoints import (
    TAG,
    assert_same_bits,
    resume,
    resume_both,
    run_and_save,
    save,
)
from tests.launcher.parallel_models import HIDDEN, Layers, Mpu, autotp, inputs
from tests.launcher.parity import Result, assert_equal, run
from tests.launcher.training import (
    ADAMS,
    PLAIN,
    Job,
    advance,
    block,
    close,
    running,
    start,
    weights,
    without_optimizer,
)
from tests.marks import core, on_eight
from zero_topo.config.modes import SPARSE_MODES
from zero_topo.config.sparse_config import ScapeSync
from zero_topo.cost.volume import step_bytes

EXACT = 1e-6
SPARSE: dict[str, dict[str, Any]] = {
    mode.MODE: {"mode": mode.MODE, "density": 0.2} for mode in SPARSE_MODES if mode is not ScapeSync
}
SPARSE["tagc"] = {"mode": "tagc", "theta": 0.5}


@pytest.fixture(autouse=True)
def own_groups() -> Iterator[None]:
    """Engines of other tests have no tensor parallelism."""
    with clean_groups():
        yield


def job(zero_topo: dict[str, Any] | None, data_rank: int, steps: int = 4, **more: Any) -> Job:
    """Steps of two micro-batches whose gradients are clipped; the norms are compared too."""
    seen: list[float] = []

    def note(engine: Any, _: int) -> None:
        seen.append(float(engine.get_global_grad_norm()))

    batches = partial(inputs, data_rank)
    return Job(
        zero_topo=zero_topo,
        steps=steps,
        micro_batches=2,
        batch=batches,
        after_step=note,
        seen=seen,
        **more,
    )


def by_autotp(
    zero_topo: dict[str, Any] | None, size: int = 2, hidden: int = HIDDEN, **ds: Any
) -> Job:
    """A run split by AutoTP, whose neighbours share a layer."""
    keys = autotp(size) | ds
    return job(zero_topo, dist.get_rank() // size, model=partial(Layers, hidden=hidden), ds=keys)


def by_mpu(zero_topo: dict[str, Any] | None, mpu: Mpu, **more: Any) -> Job:
    """A run split by a client."""
    return job(zero_topo, mpu.get_data_parallel_rank(), model=partial(Layers, mpu), mpu=mpu, **more)


@pytest.fixture
def pair() -> Iterator[Mpu]:
    """An mpu of two ranks that share each layer: the two of a GPU."""
    mpu = Mpu(2)
    yield mpu
    mpu.destroy()


def under_stock(build: Callable[[dict[str, Any] | None], Job]) -> Result:
    """The run under unmodified DeepSpeed."""
    with clean_groups():
        return run(build(None))


@pytest.mark.parametrize(
    ("scheme", "size"),
    [
        core("topo", 2),
        ("zero3", 2),
        ("hsdp", 2),
        *(on_eight("topo", size) for size in (2, 4)),
        *(on_eight("hsdp", size) for size in (2, 4)),
    ],
)
def test_autotp_trains_and_resumes_as_under_stock(
    scheme: str, size: int, shared_path: Path
) -> None:
    """Ranks whose parts have different shapes; checkpoints of both go on as their runs did.

    Files are named by the rank in the data-parallel group and that in the tensor-parallel group, as
    stock's. A damaged one is refused by all ranks, also by those of the other data-parallel group,
    which read other files.
    """
    uneven = partial(by_autotp, size=size, hidden=25)
    with clean_groups():
        stock = run_and_save(uneven(None), shared_path / "stock")
    split = partial(uneven, block(scheme))
    mine = run_and_save(split(), shared_path / "own")
    assert_equal(mine, stock, EXACT)
    files = shared_path / "own" / TAG
    names = {
        f"zero_pp_rank_{rank // size}_mp_rank_0{rank % size}_model_states.pt"
        for rank in range(dist.get_world_size())
    }
    assert {path.name for path in files.glob("*model_states.pt")} == names
    engine = resume_both(split(), (shared_path / "own", mine), (shared_path / "stock", stock))
    dist.barrier()
    if dist.get_rank() == 0:
        (files / "zero_pp_rank_0_mp_rank_01_model_states.pt").write_bytes(b"damaged")
    dist.barrier()
    with pytest.raises(ValueError, match=r"mp_rank_01_model_states\.pt cannot be read"):
        engine.load_checkpoint(str(shared_path / "own"))
    close(engine)


@pytest.mark.parametrize("size", [on_eight(1), on_eight(2)])
def test_quantized_runs_train_about_as_under_stock(size: int) -> None:
    """INT8 weights and 4-bit gradients on the cut tree, and without TP: within 1% of stock alike.
    With TP 4, or on four ranks, a node has one rank of a group, which quantizes nothing.
    """
    split = partial(by_autotp, size=size)
    stock = under_stock(split)
    quantized = run(split(block("topo", quantize={})))
    assert quantized.losses == pytest.approx(stock.losses, rel=0.01)
    assert quantized.losses != pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.parametrize(
    "scheme",
    [
        *("zero3", "topo", "hsdp"),
        *(on_eight(scheme) for scheme in ("zero3", "topo", "hsdp")),
    ],
)
def test_an_mpu_trains_and_resumes_as_under_stock(
    scheme: str, pair: Mpu, shared_path: Path
) -> None:
    """With sub-groups, persistent parameters and optimizer states on the host; checkpoints of both
    go on as their runs did.
    """
    zero = {
        "sub_group_size": 200,
        "stage3_param_persistence_threshold": 20,
        "offload_optimizer": {"device": "cpu"},
    }
    split = partial(
        by_mpu, mpu=pair, ds={"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    )
    with clean_groups():
        stock = run_and_save(split(None), shared_path / "stock")
    mine = run_and_save(split(block(scheme)), shared_path / "own")
    assert_equal(mine, stock, EXACT)
    folders = (shared_path / "own", mine), (shared_path / "stock", stock)
    close(resume_both(split(block(scheme)), *folders))


def test_ranks_far_apart_share_layers() -> None:
    """Tensor-parallel ranks on different nodes; each data-parallel group has whole nodes."""
    mpu = Mpu(2, far=True)
    stock = under_stock(partial(by_mpu, mpu=mpu))
    with running(by_mpu(block("topo"), mpu)) as engine:
        tree = zero_topo.stats(engine).config.topology
        assert (tree.nodes, tree.ranks_per_node) == (1, dist.get_world_size() // 2)
    assert_equal(run(by_mpu(block("topo"), mpu)), stock, EXACT)
    mpu.destroy()


@pytest.mark.parametrize(
    ("scheme", "quantize"),
    [
        pytest.param("zero3", PLAIN, id="zero3"),
        pytest.param("zero3", {}, id="zero3-quantized"),
        on_eight("zero3", PLAIN, name="zero3"),
        on_eight("topo", PLAIN, name="topo"),
        on_eight("topo", {}, name="topo-quantized"),
        on_eight("zero++", {}, name="zero++-quantized"),
    ],
)
def test_bytes_equal_the_formulas_on_the_cut_tree(
    scheme: str, quantize: dict[str, Any], pair: Mpu
) -> None:
    """One die of each GPU: weights lie on the rank, gradients over the node, and only the nodes'
    sums cross.
    """
    zero = {
        "stage3_prefetch_bucket_size": 0,
        "reduce_bucket_size": 10**6,
        "stage3_max_live_parameters": 0,
    }
    blocks = block(scheme, quantize=quantize)
    with running(by_mpu(blocks, pair, ds={"zero_optimization": zero})) as engine:
        advance(by_mpu(blocks, pair), engine, 0, 2)
        found = zero_topo.stats(engine)
    assert found.config.plan.world_size == dist.get_world_size() // 2
    assert found.config.topology.ranks_per_gpu == 1
    assert found.step_bytes == step_bytes(found.config, found.work)


@pytest.mark.parametrize("sync", ["oktopk", "ternary", *(on_eight(mode) for mode in SPARSE)])
def test_replicas_stay_equal_under_sparse_sync(sync: str) -> None:
    """Without the mean over tensor-parallel ranks norms and biases drift apart.

    ``debug_checks`` compares them too: all ranks raise, and the line names a parameter.
    """
    sparse = block("topo", sync=SPARSE[sync])
    sparse["gradients"] = "rank"
    everyones: list[Any] = [None] * dist.get_world_size()
    split = by_autotp(sparse)
    with running(split) as engine:
        advance(split, engine, 0, 6)
        assert zero_topo.stats(engine).step_bytes["replicated", "replicated"] > 0
        found = {
            name: value
            for name, value in weights(engine).items()
            if "norm" in name or "out" in name
        }
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


def test_an_engine_without_an_optimizer_computes_as_under_stock() -> None:
    """AutoTP with a plan of the weights alone."""
    found = []
    for zero in (None, block("topo")):
        with clean_groups(), running(by_autotp(zero), begin=without_optimizer) as engine:
            x, _ = inputs(dist.get_rank() // 2, 0, 0, torch.float32)
            with torch.no_grad():
                found.append(engine(x).clone())
    torch.testing.assert_close(found[0], found[1], rtol=EXACT, atol=EXACT)


def test_a_resumed_run_with_codes_goes_on_with_equal_bits(shared_path: Path) -> None:
    """Stored INT8 weights of uneven parts."""
    split = by_autotp(block("topo", quantize={}), hidden=25)
    saved = save(split, shared_path)
    assert resume(split, shared_path) == saved.losses


def test_zero_init_over_the_world_is_refused(pair: Mpu) -> None:
    """It gives tensor-parallel ranks rank 0's part of the weights; unmodified DeepSpeed trains
    these.
    """
    split = job(block("topo"), 0, model=Layers, mpu=pair, zero_init=True)
    with pytest.raises(
        ValueError,
        match=r"inp.weight is partitioned over \d+ ranks, but the data-parallel group has",
    ):
        start(split)


def test_a_pipeline_is_refused_in_a_line(pair: Mpu) -> None:
    pair.get_pipe_parallel_world_size = lambda: 2  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match="mpu = Mpu with 2 pipeline stages: ZeRO-3 shards the whole model"
    ):
        start(by_mpu(block("topo"), pair))


def test_scape_is_refused(pair: Mpu) -> None:
    """Its masks say which elements of AdamS's momentum leave the optimizer: replicas of a parameter
    would drift apart.
    """
    scape = block("topo", sync={"mode": "scape"})
    line = 'sync.mode = "scape" does not work with tensor parallelism'
    for split in (by_mpu(scape, pair, ds=ADAMS), by_autotp(scape, **ADAMS)):
        with pytest.raises(ValueError, match=line):
            start(split)


def test_a_size_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel\.autotp_size = 3: it does not divide"):
        start(by_autotp(block("topo"), size=3))
