# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Training loops of other shapes than forward, backward, step, and passes that fail: what goes on
afterwards is not spoiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import get_global_norm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_topo
from tests.launcher.checkpoints import assert_same_bits
from tests.launcher.training import (
    Job,
    Net,
    advance,
    assert_equal,
    batch,
    block,
    mse,
    run,
    running,
    weights,
)
from tests.marks import core

BLOCKS: dict[str, dict[str, Any]] = {
    "topo": block("topo"),
    "zero3": block("zero3"),
    "replicated optimizer": block("topo", optimizer="node"),
    "quantized": block("topo", quantize={}, sync={"mode": "quantized"}),
}
# The first gradient of the inner pass fills a bucket, so DeepSpeed reduces it in that pass.
SMALL = {"zero_optimization": {"reduce_bucket_size": 100}}
LAST = -1


class Break(torch.autograd.Function):
    """Nothing, but for a backward pass that fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise MemoryError("as if memory had run out")


class Tile(torch.autograd.Function):
    """The loss of a head, whose backward pass runs in the forward pass, as in DeepSpeed's
    TiledFusedLogitsLoss.
    """

    @staticmethod
    def forward(ctx: Any, head: Callable[[Tensor], Tensor], h: Tensor, y: Tensor) -> Tensor:
        h = h.detach().requires_grad_()
        with torch.enable_grad():
            loss = nn.functional.mse_loss(head(h), y)
        torch.autograd.backward(loss)
        ctx.save_for_backward(h.grad)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, ctx.saved_tensors[0] * grads[0], None


class Loops(Net):
    """Returns its loss if it gets targets.

    Attributes:
        tiled: the head's backward pass runs in the forward pass.
        checkpointed: all layers lie in reentrant checkpoints.
        fails: the forward pass raises.
        breaks: the block at which the backward pass fails, ``LAST`` for its begin.
    """

    tiled = False
    checkpointed = False
    fails = False
    breaks: int | None = None

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if self.checkpointed:
            x = x.requires_grad_()
        h = self._run(self.inp, x)
        for index, layer in enumerate(self.blocks):
            h = h + torch.tanh(self._run(layer, h, self.breaks == index))
        if self.fails:
            raise ValueError("a batch that cannot be used")
        if y is not None and self.tiled:
            loss: Tensor = Tile.apply(self.out, h, y)
            return loss
        output = self._run(self.out, h)
        if self.breaks == LAST:
            output = Break.apply(output)
        return output if y is None else nn.functional.mse_loss(output, y)

    def _run(self, layer: nn.Module, x: Tensor, breaks: bool = False) -> Tensor:
        def run(x: Tensor) -> Tensor:
            output: Tensor = layer(x)
            return Break.apply(output) if breaks else output

        return checkpoint(run, x, use_reentrant=True) if self.checkpointed else run(x)


def attempt(engine: Any, step: int, micro: int = 0, breaks: int | None = None) -> None:
    """Run a forward and a backward pass, the latter perhaps up to a failure."""
    engine.module.breaks = breaks
    loss = mse(engine, *batch(step, micro, torch.float32))
    if breaks is None:
        engine.backward(loss)
        return
    with pytest.raises(MemoryError):
        engine.backward(loss)


# -- passes that fail ------------------------------------------------------------------------------


def trained(run: Job, interrupted: bool, how: str) -> dict[str, Tensor]:
    """Weights after two steps, each of which may have been tried in vain first."""
    with running(run) as engine:
        engine.module.checkpointed = how == "checkpointed"
        for step in range(2):
            if interrupted:
                attempt(engine, 17, breaks=0)
            if how == "zeroed":
                engine.optimizer.zero_grad()
            for micro in range(run.micro_batches):
                attempt(engine, step, micro)
                engine.step()
        return weights(engine)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        core("topo", "plain"),
        ("topo", "zeroed"),
        ("topo", "checkpointed"),
        ("replicated optimizer", "plain"),
    ],
)
def test_a_backward_pass_that_failed_leaves_no_gradients_behind(name: str, how: str) -> None:
    """Caught and tried with another batch, as after running out of memory: bit for bit as if it had
    not been. Behind checkpoints, the passes inside it have ended well, and none of its own
    gradients had come.
    """
    micro_batches = 2 if how == "plain" else 1
    run = Job(zero_topo=BLOCKS[name], model=Loops, micro_batches=micro_batches)
    assert_same_bits(trained(run, True, how), trained(run, False, how))


def test_a_backward_pass_that_failed_before_any_gradient_drops_none() -> None:
    """Those of the micro-batch before it stay, as in plain PyTorch."""
    found = []
    for interrupted in (False, True):
        with running(Job(Loops, BLOCKS["topo"], micro_batches=2)) as engine:
            attempt(engine, 0, 0)
            engine.step()
            if interrupted:
                attempt(engine, 0, 1, breaks=LAST)
            attempt(engine, 0, 1)
            engine.step()
            found.append(weights(engine))
    assert_same_bits(*found)


@pytest.mark.core
def test_a_step_on_half_a_backward_pass_is_refused() -> None:
    """With a way out; after it, training goes on."""
    with running(Job(zero_topo=BLOCKS["topo"], model=Loops)) as engine:
        attempt(engine, 0, breaks=0)
        with pytest.raises(RuntimeError, match=r"the backward pass did not end.*zero_grad"):
            engine.step()
        attempt(engine, 0)
        engine.step()
        assert engine.global_steps == 1


@pytest.mark.parametrize(("name", "breaks"), [core("topo", 0), ("quantized", None)])
def test_an_engine_is_destroyed_between_backward_and_step(name: str, breaks: int | None) -> None:
    """What its backward pass has begun ends first: else groups die under collectives, and what
    follows hangs.
    """
    run = Job(zero_topo=BLOCKS[name], model=Loops, steps=1)
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


# -- what stands between and inside passes ---------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "lines"), [core("plain", 1), core("ending", 0), ("accumulation", 0), ("zero3", 0)]
)
def test_backward_passes_that_each_cross_nodes_are_warned_of(
    case: str, lines: int, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, by rank 0, with the ways out; not where the script or the config says which pass is the
    last of a step, or sync spans the job and is none.
    """
    run = Job(zero_topo=BLOCKS["zero3" if case == "zero3" else "topo"])
    if case == "accumulation":
        run = replace(run, micro_batches=2)
    with running(run) as engine:
        for step in range(2):
            for micro in range(2):
                if case == "ending":
                    engine.set_gradient_accumulation_boundary(micro == 1)
                attempt(engine, step, micro)
                if case == "accumulation":
                    engine.step()
            if case != "accumulation":
                engine.step()
    said = [line for line in caplog.messages if "several backward passes" in line]
    assert len(said) == (lines if rank == 0 else 0)
    assert all('"gradient_accumulation_steps"' in line and "\n" not in line for line in said)


@pytest.mark.core
def test_norms_are_of_the_synced_gradient_before_the_step_too() -> None:
    """As `engine.get_global_grad_norm` says after it; under offload it was zero."""
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    with running(Job(zero_topo=BLOCKS["topo"], ds=offload)) as engine:
        attempt(engine, 0)
        before = float(get_global_norm(engine.optimizer._get_norm_groups()))
        engine.step()
        assert before == pytest.approx(float(engine.get_global_grad_norm()), rel=1e-6)
        assert before > 0


def sync_bytes(engine: Any) -> dict[tuple[str, str], int]:
    """What sync has sent in the last step."""
    sent = zero_topo.stats(engine).step_bytes
    return {key: count for key, count in sent.items() if key[0] == "sync"}


def tiled(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss that the model itself returns."""
    value: Tensor = engine(x, y)
    return value


def test_gradients_of_an_inner_pass_cross_nodes_once() -> None:
    """DeepSpeed's flag of the last micro-batch is then that of the backward pass before it."""
    job = Job(Loops, BLOCKS["topo"], steps=2, micro_batches=2, loss=tiled, ds=SMALL)
    sent = []
    for inner in (True, False):
        with running(job) as engine:
            engine.module.tiled = inner
            advance(job, engine, 0, job.steps)
            sent.append(sync_bytes(engine))
    assert sent[0] == sent[1] != {}


def test_a_step_takes_gradients_of_an_inner_pass_alone() -> None:
    """As in plain PyTorch: the head is trained, the rest has no gradient; unmodified DeepSpeed
    drops them or fails.
    """
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0, "torch_adam": True}}
    with running(Job(Loops, BLOCKS["topo"], ds={"optimizer": adam})) as engine:
        engine.module.tiled = True
        before = weights(engine)
        tiled(engine, *batch(0, 0, torch.float32))
        engine.step()
        after = weights(engine)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"out.weight", "out.bias"}


def two_halves(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    """The sum of two losses; the second forward pass is called on the module itself."""
    first = mse(engine, x[:2], y[:2])
    return first + mse(engine.module, x[2:], y[2:])


def by_its_output(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    """`torch.autograd.grad` uses up DeepSpeed's hook on the output: the step then ends the pass
    itself.
    """
    output = engine(x)
    loss = nn.functional.mse_loss(output, y)
    (grad,) = torch.autograd.grad(loss, output)
    output.backward(grad)
    return loss.detach()


def test_a_loss_of_several_forward_passes() -> None:
    """One backward pass of their sum trains as under stock ZeRO-3."""
    job = Job(steps=3, loss=two_halves)
    assert_equal(run(job.under(BLOCKS["topo"])), run(job))


def test_the_gradient_of_an_output_may_be_taken_first() -> None:
    """Weights are those of the usual backward pass."""
    found = []
    for usual in (True, False):
        with running(Job(zero_topo=BLOCKS["topo"])) as engine:
            for step in range(2):
                if usual:
                    attempt(engine, step)
                else:
                    by_its_output(engine, *batch(step, 0, torch.float32))
                engine.step()
            found.append(weights(engine))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [core("quantized"), "replicated optimizer"])
def test_gradients_may_be_read_in_each_step(name: str) -> None:
    """They cross nodes once, and training with lossy sync is the same without it, to the
    bit.
    """
    sent, found = [], []
    for reads in (True, False):
        with running(Job(Net, BLOCKS[name])) as engine:
            for step in range(3):
                attempt(engine, step)
                for param in engine.module.parameters() if reads else ():
                    assert deepspeed.utils.safe_get_full_grad(param).abs().max() > 0
                engine.step()
            sent.append(sync_bytes(engine))
            found.append(weights(engine))
    assert sent[0] == sent[1]
    assert_same_bits(*found)
