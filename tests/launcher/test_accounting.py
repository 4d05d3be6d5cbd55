# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Bytes sent and bytes stored equal the formulas of ``zero_topo.cost``, to the byte."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

import zero_topo
from tests.launcher.training import Job, Net, advance, block, running
from tests.marks import core
from zero_topo.cost.memory import ADAM_BYTES, ADAM_BYTES_FP32, memory_bytes
from zero_topo.cost.volume import step_bytes
from zero_topo.hook.seam import Stock
from zero_topo.observe.report import Stats

SCHEMES = ("zero3", "zero++", "hsdp", "paper", "topo")


def measured(
    scheme: str, dtype: str, micro_batches: int = 1, persistence: int = 0, **more: Any
) -> Stats:
    """Stats after three steps in which every parameter is gathered, released and reduced in one
    bucket.
    """
    zero = {
        "stage3_prefetch_bucket_size": 0,
        "reduce_bucket_size": 10**6,
        "stage3_param_persistence_threshold": persistence,
    }
    model = more.pop("model", Net)
    ds = {"zero_optimization": zero}
    run = Job(model, block(scheme, **more), dtype=dtype, micro_batches=micro_batches, ds=ds)
    with running(run) as engine:
        advance(run, engine, 0, 3)
        return zero_topo.stats(engine)


def assert_bytes_equal(stats: Stats) -> None:
    assert stats.step_bytes == step_bytes(stats.config, stats.work)


def assert_memory_equals(stats: Stats) -> None:
    stored = {
        role: stats.memory[role] for role in ("weights", "secondary", "gradients", "optimizer")
    }
    assert stored == memory_bytes(stats.config, stats.work, 2, ADAM_BYTES)


@pytest.mark.eight_ranks
@pytest.mark.parametrize(
    ("scheme", "quantized"),
    [
        core("topo", True),
        *((scheme, True) for scheme in SCHEMES[:-1]),
        *((scheme, False) for scheme in SCHEMES),
    ],
)
def test_bytes_and_memory_equal_the_formulas(scheme: str, quantized: bool) -> None:
    more: dict[str, Any] = {"quantize": {}} if quantized else {}
    stats = measured(scheme, "bf16", 2, **more)
    assert_bytes_equal(stats)
    assert_memory_equals(stats)


@pytest.mark.eight_ranks
@pytest.mark.parametrize("scheme", [core("topo"), "topo-zero2"])
def test_bytes_and_memory_of_codes_equal_the_formulas(scheme: str) -> None:
    """What publish sends depends on how many blocks are sent whole, which the engine tells the
    formula.
    """
    stats = measured(scheme, "bf16", 2, model=partial(Net, 64), quantize={})
    assert len(stats.work.published) == 1
    assert_bytes_equal(stats)
    assert_memory_equals(stats)


@pytest.mark.core
def test_fp32_memory_is_counted_as_it_is_stored() -> None:
    """Stock may let FP32 weights be their own masters; the statistics say whether it did."""
    stats = measured("topo", "fp32")
    assert (
        stats.memory["optimizer"]
        == memory_bytes(stats.config, stats.work, 4, stats.optimizer_itemsize)["optimizer"]
    )
    assert stats.optimizer_itemsize in (ADAM_BYTES, ADAM_BYTES_FP32)
    assert_bytes_equal(stats)


@pytest.mark.core
def test_persistent_parameters_are_gathered_exactly_once_a_step() -> None:
    stats = measured("topo", "bf16", 2, persistence=100, quantize={})
    assert any(stats.work.persistent) and not all(stats.work.persistent)
    assert_bytes_equal(stats)


@pytest.mark.core
def test_a_wider_accumulation_type_costs_what_it_says() -> None:
    stats = measured("topo", "bf16", 1, accumulation_dtype="fp32")
    assert (
        stats.memory["gradients"]
        == memory_bytes(stats.config, stats.work, 4, ADAM_BYTES)["gradients"]
    )
    assert_bytes_equal(stats)


@pytest.mark.core
def test_statistics_of_an_engine_without_the_block_are_refused() -> None:
    with running(Job()) as engine, pytest.raises(ValueError, match="runs without zero_topo"):
        zero_topo.stats(engine)


@pytest.mark.core
def test_a_destroyed_engine_lets_go_of_its_shards_and_groups() -> None:
    """DeepSpeed's own caches keep the optimizer; each group kept with it would cost a rank threads
    and sockets.
    """
    run = Job(zero_topo=block("topo"), steps=1)
    with running(run) as engine:
        stored = weakref.ref(engine.optimizer.topo)
        advance(run, engine, 0, 1)
    gc.collect()
    assert stored() is None


@pytest.mark.parametrize("dtype", ["fp32", core("bf16")])
def test_deepspeeds_own_flat_weights_are_freed(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours take their place: what keeps a view of the old ones costs a world shard of the weights
    for ever.
    """
    name, old = "_create_fp16_partitions_with_defragmentation", list[StorageWeakRef]()
    stock = getattr(Stock, name)

    def recording(optimizer: Any, groups: Any) -> None:
        stock(optimizer, groups)
        old.append(StorageWeakRef(optimizer.lp_param_buffer.untyped_storage()))

    monkeypatch.setattr(Stock, name, recording)
    run = Job(zero_topo=block("topo"), dtype=dtype)
    with running(run) as engine:
        advance(run, engine, 0, 1)
        assert [storage.expired() for storage in old] == [True]
