# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What breaks between a backward pass and its step, or in a load, and is caught: a run that goes on is not spoiled."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.launcher.checkpoints import assert_same_bits
from tests.launcher.training import Job, Net, advance, batch, block, mse, running, weights

Q4: dict[str, Any] = {"sync": {"mode": "quantized", "bits": 4}}
BLOCKS: dict[str, dict[str, Any]] = {
    "topo": block("topo"),
    "quantized sync": block("topo", **Q4),
    "replicated optimizer": block("topo", optimizer="node"),
}


class Break(torch.autograd.Function):
    """Nothing, but for a backward pass that fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise MemoryError("as if memory had run out")


class Breaking(Net):
    """Fails half-way through its backward pass where it is told to."""

    breaks = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index, layer in enumerate(self.blocks):
            x = x + torch.tanh(layer(x))
            if self.breaks and index == 0:
                x = Break.apply(x)
        return self.out(x)


def attempt(engine: Any, step: int, micro: int = 0, breaks: bool = False) -> None:
    """A forward and a backward pass, the latter perhaps up to the middle."""
    engine.module.breaks = breaks
    x, y = batch(step, micro, next(engine.module.parameters()).dtype)
    loss = mse(engine, x, y)
    if not breaks:
        engine.backward(loss)
        return
    with pytest.raises(MemoryError):
        engine.backward(loss)


def trained(run: Job, interrupted: bool, zeroed: bool = False) -> dict[str, Tensor]:
    """Weights after two steps, each of which may have been tried in vain first."""
    with running(run) as engine:
        for step in range(2):
            if interrupted:
                attempt(engine, 17, breaks=True)
            if zeroed:
                engine.optimizer.zero_grad()
            for micro in range(run.micro_batches):
                attempt(engine, step, micro)
                engine.step()
        return weights(engine)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", ["topo", "replicated optimizer"])
def test_a_backward_pass_that_failed_leaves_no_gradients_behind(name: str, micro_batches: int) -> None:
    """Caught and tried with another batch, as after running out of memory: bit for bit as if it had not been."""
    run = Job(zero_topo=BLOCKS[name], model=Breaking, micro_batches=micro_batches)
    expected = trained(run, interrupted=False)
    for zeroed in (False, True):
        assert_same_bits(trained(run, interrupted=True, zeroed=zeroed), expected)


def test_a_step_on_half_a_backward_pass_is_refused() -> None:
    """With a way out; after it, training goes on."""
    with running(Job(zero_topo=BLOCKS["topo"], model=Breaking)) as engine:
        attempt(engine, 0, breaks=True)
        with pytest.raises(RuntimeError, match=r"the backward pass did not end.*zero_grad"):
            engine.step()
        attempt(engine, 0)
        engine.step()
        assert engine.global_steps == 1


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("breaks", [False, True], ids=["backward", "half a backward"])
def test_an_engine_is_destroyed_between_backward_and_step(name: str, breaks: bool) -> None:
    """What its backward pass has begun ends first: else groups die under collectives, and what follows hangs."""
    run = Job(zero_topo=BLOCKS[name], model=Breaking, steps=1)
    with running(run) as engine:
        attempt(engine, 0)
        engine.step()
        time.sleep(0.5 if dist.get_rank() < dist.get_world_size() // 2 else 0)  # the other node is done first
        attempt(engine, 1, breaks=breaks)
    dist.barrier()
    with running(run) as engine:
        assert len(advance(run, engine, 0, 1)) == 1
