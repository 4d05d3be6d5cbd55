# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A secondary copy in host memory under DeepSpeed: the bits of one on the device, and the bytes of
the formulas.

What order of passes, edits and loads does to it, threads show (`tests/ranks/test_host_copy.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zero_topo
from tests.launcher.models import adapted
from tests.launcher.training import Job, Net, advance, block, mse, running, weights
from tests.marks import late
from zero_topo.cost import by_domain, memory_bytes, step_bytes

INT8 = {"weights": "int8", "secondary": "int8", "gradients": None, "block_size": 64}
NODE = {"secondary": "node"}
BLOCKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "16 bits": (block("zero3", **NODE), {"secondary_on": "host"}),
    "int8": (block("zero3", quantize=INT8, **NODE), {"secondary_on": "host"}),
    "frozen alone": (block("zero3", frozen=NODE), {"frozen": {**NODE, "secondary_on": "host"}}),
}


class Recomputed(Net):
    """Its layers run again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """As without recomputation."""
        x = self.inp(x)
        for layer in self.blocks:
            x = x + torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return self.out(x)


def evaluated(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a micro-batch; the model is evaluated between its passes."""
    loss = mse(engine, x, y)
    with torch.no_grad():
        mse(engine, x + 1, y)
    return loss


def disturbed(engine: Any, step: int) -> None:
    """Offloads all states and takes them back; one rank edits a weight."""
    if step == 1:
        engine.offload_states()
        engine.reload_states()
    weight = next(
        param for name, param in engine.module.named_parameters() if name.endswith("weight")
    )
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        if dist.get_rank() == 0:
            weight.data.mul_(1.5)


@pytest.mark.parametrize("name", [late("16 bits"), "int8", "frozen alone"])
def test_a_run_is_the_one_with_the_copy_on_the_device(name: str, shared_path: Path) -> None:
    """Two micro-batches a step, recomputation, evaluations, offloaded states, edits, a load: bit
    for bit.
    """
    own, host = BLOCKS[name]
    model: Any = adapted if name == "frozen alone" else Recomputed
    found: list[tuple[list[float], dict[str, Tensor]]] = []
    for zero_topo_block in (own, {**own, **host}):
        run = Job(
            model,
            zero_topo_block,
            3,
            micro_batches=2,
            dtype="bf16",
            each_step=disturbed,
            loss=evaluated,
        )
        folder = str(shared_path / str(len(found)))
        with running(run) as engine:
            losses = advance(run, engine, 0, 2)
            engine.save_checkpoint(folder)
            losses += advance(run, engine, 2, 3)
            engine.load_checkpoint(folder)
            losses += advance(run, engine, 2, 3)
            found.append((losses, weights(engine)))
    (mine, my_weights), (theirs, their_weights) = found
    assert mine == theirs
    assert all(torch.equal(my_weights[key], value) for key, value in their_weights.items())


@pytest.mark.parametrize("name", ["16 bits", "int8", "frozen alone"])
def test_bytes_and_memory_equal_the_formulas(name: str) -> None:
    """To the byte; gathers send half of ZeRO-3's bytes between nodes."""
    own, host = BLOCKS[name]
    zero = {"stage3_prefetch_bucket_size": 0, "reduce_bucket_size": 10**6}
    model: Any = adapted if name == "frozen alone" else Net
    run = Job(model, {**own, **host}, dtype="bf16", micro_batches=2, ds={"zero_optimization": zero})
    with running(run) as engine:
        advance(run, engine, 0, 2)
        stats = zero_topo.stats(engine)
    sent, formula = stats.step_bytes, step_bytes(stats.config, stats.work)
    # DeepSpeed gathers no weights before the first trained layer for a backward pass
    if name == "frozen alone":
        sent, formula = (
            {key: n for key, n in of.items() if key[1] == "world"} for of in (sent, formula)
        )
    assert sent == formula
    sizes = stats.accumulation_itemsize, stats.optimizer_itemsize
    assert (
        stats.memory == memory_bytes(stats.config, stats.work, *sizes) and stats.memory["host"] > 0
    )
    assert "host" in str(stats)
    gathers = {
        key: nbytes for key, nbytes in stats.step_bytes.items() if key[0].startswith("gather")
    }
    if name == "16 bits":
        plain = replace(
            stats.config, plan=replace(stats.config.plan, secondary=None), secondary_on="device"
        )
        zero3 = {
            key: n
            for key, n in step_bytes(plain, stats.work).items()
            if key[0].startswith("gather")
        }
        assert 2 * by_domain(gathers)["world"] == by_domain(zero3)["world"]
