# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What breaks between a backward pass and its step, or in a load, and is caught: a run that goes on
is not spoiled.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import get_global_norm
from torch import Tensor

from tests.launcher.checkpoints import assert_same_bits
from tests.launcher.training import Job, Net, advance, batch, block, mse, running, weights
from tests.marks import core, late, often

Q4: dict[str, Any] = {"sync": {"mode": "quantized"}}
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
    """Fails half-way through its backward pass where it is asked to."""

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


@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [core("topo", 1), ("topo", 2), ("replicated optimizer", 1), ("replicated optimizer", 2)],
)
def test_a_backward_pass_that_failed_leaves_no_gradients_behind(
    name: str, micro_batches: int
) -> None:
    """Caught and tried with another batch, as after running out of memory: bit for bit as if it had
    not been.
    """
    run = Job(zero_topo=BLOCKS[name], model=Breaking, micro_batches=micro_batches)
    expected = trained(run, interrupted=False)
    for zeroed in (False, True):
        assert_same_bits(trained(run, interrupted=True, zeroed=zeroed), expected)


@pytest.mark.core
def test_a_step_on_half_a_backward_pass_is_refused() -> None:
    """With a way out; after it, training goes on."""
    with running(Job(zero_topo=BLOCKS["topo"], model=Breaking)) as engine:
        attempt(engine, 0, breaks=True)
        with pytest.raises(RuntimeError, match=r"the backward pass did not end.*zero_grad"):
            engine.step()
        attempt(engine, 0)
        engine.step()
        assert engine.global_steps == 1


def attempts(engine: Any, ending: bool | None = None) -> None:
    """Two steps of two backward passes each; ``ending`` has the script say which of them is the
    last.
    """
    for step in range(2):
        for micro in range(2):
            if ending:
                engine.set_gradient_accumulation_boundary(micro == 1)
            x, y = batch(step, micro, torch.float32)
            engine.backward(mse(engine, x, y))
        engine.step()


@pytest.mark.parametrize(
    ("case", "lines"),
    [core("plain", 1), core("ending", 0), ("accumulation", 0), ("offload", 0), ("zero3", 0)],
)
def test_backward_passes_that_each_cross_nodes_are_warned_of(
    case: str, lines: int, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, by rank 0, with the ways out; not where sync waits for the step, or spans the job and
    is none.
    """
    ds: dict[str, Any] = {"zero_force_ds_cpu_optimizer": False}
    if case == "offload":
        ds["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}}
    run = Job(zero_topo=block("zero3" if case == "zero3" else "topo"), ds=ds)
    with running(replace(run, micro_batches=2) if case == "accumulation" else run) as engine:
        if case == "accumulation":
            advance(replace(run, micro_batches=2), engine, 0, 2)
        else:
            attempts(engine, ending=case == "ending")
    said = [line for line in caplog.messages if "several backward passes" in line]
    assert len(said) == (lines if rank == 0 else 0)
    assert all('"gradient_accumulation_steps"' in line and "\n" not in line for line in said)


def test_the_gradient_of_an_output_may_be_taken_first() -> None:
    """`torch.autograd.grad` uses up DeepSpeed's hook on the output: the step then ends the pass
    itself.
    """

    def stepped(way: str) -> dict[str, Tensor]:
        with running(Job(zero_topo=BLOCKS["topo"])) as engine:
            for step in range(2):
                x, y = batch(step, 0, torch.float32)
                output = engine(x)
                if way == "backward":
                    engine.backward(torch.nn.functional.mse_loss(output, y))
                else:
                    leaf = output.detach().requires_grad_() if way == "detached" else output
                    (grad,) = torch.autograd.grad(torch.nn.functional.mse_loss(leaf, y), leaf)
                    output.backward(grad)
                engine.step()
            return weights(engine)

    expected = stepped("backward")
    for way in ("attached", "detached"):
        torch.testing.assert_close(stepped(way), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.core
@pytest.mark.parametrize("breaks", [True, late(False)])
@pytest.mark.parametrize("name", often(("topo",), BLOCKS))
def test_an_engine_is_destroyed_between_backward_and_step(name: str, breaks: bool) -> None:
    """What its backward pass has begun ends first: else groups die under collectives, and what
    follows hangs.
    """
    run = Job(zero_topo=BLOCKS[name], model=Breaking, steps=1)
    with running(run) as engine:
        attempt(engine, 0)
        engine.step()
        # The other node is done first
        time.sleep(0.5 if dist.get_rank() < dist.get_world_size() // 2 else 0)
        attempt(engine, 1, breaks=breaks)
    dist.barrier()
    with running(run) as engine:
        assert len(advance(run, engine, 0, 1)) == 1


@pytest.mark.core
def test_a_shard_that_is_set_to_another_tensor_is_noticed() -> None:
    """The engine gathers from its own; else weights would be those of before, without a word."""
    run = Job(zero_topo=BLOCKS["topo"])
    with running(run) as engine:
        advance(run, engine, 0, 1)
        shard = engine.module.inp.weight.ds_tensor
        home, shard.data = shard.data, shard.data.clone()
        with pytest.raises(
            RuntimeError, match=r"ds_tensor\.data of a parameter of shape \(37, 11\) was set"
        ):
            engine(batch(1, 0, torch.float32)[0])
        shard.data = home


@pytest.mark.parametrize(
    "offload",
    [{}, core({"offload_optimizer": {"device": "cpu"}})],
    ids=["on the device", "offloaded"],
)
def test_norms_are_of_the_synced_gradient_before_the_step_too(offload: dict[str, Any]) -> None:
    """As `engine.get_global_grad_norm` says after it; under offload it was zero."""
    more = {"zero_optimization": offload, "zero_force_ds_cpu_optimizer": False}
    with running(Job(zero_topo=BLOCKS["topo"], model=Breaking, ds=more)) as engine:
        attempt(engine, 0)
        before = float(get_global_norm(engine.optimizer._get_norm_groups()))
        engine.step()
        assert before == pytest.approx(float(engine.get_global_grad_norm()), rel=1e-6)
        assert before > 0
