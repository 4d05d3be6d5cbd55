# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Bytes sent and bytes stored equal the formulas of ``zero_topo.cost``, to the byte."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import zero_topo
from tests.launcher.training import AGED, Job, Net, advance, block, running
from zero_topo.cost.memory import ADAM_BYTES, ADAM_BYTES_FP32, memory_bytes
from zero_topo.cost.volume import step_bytes
from zero_topo.hook.seam import Stock
from zero_topo.observe.report import Stats


def measured(
    scheme: str, dtype: str, micro_batches: int = 1, persistence: int = 0, **more: Any
) -> Stats:
    """Stats after three steps in which every parameter is gathered, released and reduced in one
    bucket; the bytes that were sent are the formula's.
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
        stats = zero_topo.stats(engine)
    assert stats.step_bytes == step_bytes(stats.config, stats.work)
    return stats


@pytest.mark.eight_ranks
@pytest.mark.parametrize("width", [37, 64])
@pytest.mark.parametrize("scheme", ["topo", "zero++", "hsdp"])
def test_bytes_and_memory_equal_the_formulas(scheme: str, width: int) -> None:
    """Where parameters are wide enough to be stored as INT8, what publish sends depends on how many
    blocks are sent whole, which the formula takes from the engine.
    """
    stats = measured(scheme, "bf16", 2, model=partial(Net, width), quantize={})
    assert stats.work.published or (scheme, width) != ("topo", 64)
    stored = {
        role: stats.memory[role] for role in ("weights", "secondary", "gradients", "optimizer")
    }
    assert stored == memory_bytes(stats.config, stats.work, 2, ADAM_BYTES)


@pytest.mark.core
def test_fp32_memory_is_counted_as_it_is_stored() -> None:
    """Stock may let FP32 weights be their own masters; the statistics say whether it did."""
    stats = measured("topo", "fp32")
    assert (
        stats.memory["optimizer"]
        == memory_bytes(stats.config, stats.work, 4, stats.optimizer_itemsize)["optimizer"]
    )
    assert stats.optimizer_itemsize in (ADAM_BYTES, ADAM_BYTES_FP32)


@pytest.mark.core
def test_a_wider_accumulation_type_costs_what_it_says() -> None:
    """Persistent parameters are gathered exactly once a step."""
    stats = measured("topo", "bf16", 2, persistence=100, quantize={}, accumulation_dtype="fp32")
    expected = memory_bytes(stats.config, stats.work, 4, ADAM_BYTES)
    assert stats.memory["gradients"] == expected["gradients"]
    assert any(stats.work.persistent) and not all(stats.work.persistent)


@pytest.mark.core
def test_statistics_of_an_engine_without_the_block_are_refused() -> None:
    with running(Job()) as engine, pytest.raises(ValueError, match="runs without zero_topo"):
        zero_topo.stats(engine)


@pytest.mark.core
def test_deepspeeds_own_flat_weights_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours take their place: what keeps a view of the old ones costs a world shard of the weights
    for ever.
    """
    name, old = "_create_fp16_partitions_with_defragmentation", list[StorageWeakRef]()
    stock = getattr(Stock, name)

    def recording(optimizer: Any, groups: Any) -> None:
        stock(optimizer, groups)
        old.append(StorageWeakRef(optimizer.lp_param_buffer.untyped_storage()))

    monkeypatch.setattr(Stock, name, recording)
    run = Job(zero_topo=block("topo"), dtype="bf16")
    with running(run) as engine:
        advance(run, engine, 0, 1)
        assert [storage.expired() for storage in old] == [True]


def test_sums_of_waiting_gradients_train_with_their_ages() -> None:
    """AgedAdamW: the loss falls, ages are what the sums say, and the optimizer has the bytes that
    the formula says.
    """

    def ages() -> Tensor:
        return torch.cat([state["age"] for state in engine.optimizer.optimizer.state.values()])

    thin = block("topo", optimizer="node", sync={"mode": "oktopk", "density": 0.1})
    run = Job(zero_topo=thin, steps=20, ds=AGED)
    with running(run) as engine:
        losses = advance(run, engine, 0, 1)
        for step in range(1, run.steps):
            before = ages()
            losses += advance(run, engine, step, step + 1)
            waits = ages() > 0
            assert torch.equal(ages()[waits], before[waits] + 1)
        assert ages().max() > 3
        stats = zero_topo.stats(engine)
    expected = memory_bytes(stats.config, stats.work, 4, stats.optimizer_itemsize)
    assert stats.memory["optimizer"] == expected["optimizer"]
    assert losses[-1] < 0.6 * losses[0]
