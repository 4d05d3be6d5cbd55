# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""SCAPE and AdamS under DeepSpeed: they train, and at density 1 are dense AdamS, clipping included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero_topo
from tests.launcher.training import ADAMS, DATA_PARALLEL, Job, advance, block, close, start, train

PLANS: dict[str, dict[str, Any]] = {"hierarchy": {"optimizer": "node"}, "data parallel": DATA_PARALLEL}


def scape(plan: str = "hierarchy", **more: Any) -> dict[str, Any]:
    """A block with the mode, copies compared at every step."""
    return block("topo", **PLANS[plan], sync={"mode": "scape", **more})


def test_a_tenth_of_the_momentum_trains() -> None:
    """The loss falls, while replicas are compared bit by bit at every step."""
    losses = train(Job(zero_topo=scape(density=0.1, warmup=4), steps=20, ds=ADAMS))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(("plan", "dtype"), [("hierarchy", "bf16"), ("data parallel", "fp32")])
def test_density_one_is_dense_adams(plan: str, dtype: str) -> None:
    """With gradients clipped at 0.5, which they exceed."""
    sparse = train(Job(zero_topo=scape(plan, density=1.0), steps=6, ds=ADAMS, dtype=dtype))
    dense = train(Job(zero_topo=block("topo", **PLANS[plan]), steps=6, ds=ADAMS, dtype=dtype))
    assert sparse == pytest.approx(dense, rel=1e-5 if dtype == "fp32" else 1e-2)


def test_adams_in_the_config_is_the_optimizer_alone() -> None:
    """Without a sparse mode, against one process's AdamS fed the same gradients: bits of a dense run repeat."""
    engine = start(Job(zero_topo=block("topo"), ds=ADAMS))
    assert isinstance(engine.optimizer.optimizer, zero_topo.AdamS)
    advance(Job(zero_topo=block("topo"), ds=ADAMS), engine, 0, 1)
    stats = zero_topo.stats(engine)
    shard = sum(-(-numel // torch.distributed.get_world_size()) for numel in stats.work.numels)
    assert stats.memory["optimizer"] == stats.optimizer_itemsize * shard
    close(engine)


def test_another_optimizer_is_refused_by_the_config() -> None:
    """On every rank, before an engine exists."""
    with pytest.raises(ValueError, match=r'optimizer\.type = "AdamW": sync\.mode = "scape" works with AdamS alone'):
        start(Job(zero_topo=scape()))
