# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Training loops of other shapes than forward, backward, step: they train as under unmodified
ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zero_topo
from tests.launcher.checkpoints import assert_same_bits
from tests.launcher.test_interrupted import Break
from tests.launcher.training import Job, Net, advance, batch, block, running, weights
from tests.marks import core

BLOCKS: dict[str, dict[str, Any]] = {
    "topo": block("topo"),
    "zero++": block("zero++"),
    "replicated optimizer": block("topo", optimizer="node"),
    "quantized": block("topo", quantize={}, sync={"mode": "quantized"}),
}
# The first gradient of the inner pass fills a bucket, so DeepSpeed reduces it in that pass.
SMALL = {"zero_optimization": {"reduce_bucket_size": 200}}


class Tile(torch.autograd.Function):
    """The loss of a head, whose backward pass runs in the forward pass, as in DeepSpeed's
    TiledFusedLogitsLoss.
    """

    @staticmethod
    def forward(ctx: Any, head: Callable[[Tensor], Tensor], h: Tensor, y: Tensor) -> Tensor:
        h = h.detach().requires_grad_()
        with torch.enable_grad():
            loss = torch.nn.functional.mse_loss(head(h), y)
        torch.autograd.backward(loss)
        ctx.save_for_backward(h.grad)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, ctx.saved_tensors[0] * grads[0], None


class Tiled(Net):
    """Returns its loss if it gets targets, tiled or not."""

    tiled = True
    fails = False

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.inp(x)
        for layer in self.blocks:
            h = h + torch.tanh(layer(h))
        if self.fails:
            raise ValueError("a batch that cannot be used")
        if y is None:
            return self.out(h)
        if self.tiled:
            loss: Tensor = Tile.apply(self.out, h, y)
            return loss
        return torch.nn.functional.mse_loss(self.out(h), y)


def nothing(engine: Any, x: Tensor) -> None:
    """No other call between the passes."""


def losing(between: Callable[[Any, Tensor], None]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """The loss of an engine, with other calls before its backward pass."""

    def loss(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = engine(x, y)
        between(engine, x)
        return value

    return loss


def trained(run: Job) -> dict[str, Tensor]:
    with running(run) as engine:
        advance(run, engine, 0, run.steps)
        return weights(engine)


def tiled_job(name: str | None, between: Callable[[Any, Tensor], None], micro_batches: int) -> Job:
    """Three steps of the tiled loss."""
    blocks = None if name is None else BLOCKS[name]
    return Job(Tiled, blocks, steps=3, micro_batches=micro_batches, loss=losing(between), ds=SMALL)


@cache
def expected(name: str | None, micro_batches: int) -> dict[str, Tensor]:
    return trained(tiled_job(name, nothing, micro_batches))


def test_gradients_of_an_inner_pass_cross_nodes_once() -> None:
    """DeepSpeed's flag of the last micro-batch is then that of the backward pass before it."""

    def sent(tiled: bool) -> dict[str, int]:
        job = Job(Tiled, BLOCKS["topo"], steps=2, loss=losing(nothing), ds=SMALL)
        with running(job) as engine:
            engine.module.tiled = tiled
            advance(job, engine, 0, job.steps)
            return {
                phase: count for (phase, _), count in zero_topo.stats(engine).step_bytes.items()
            }

    assert sent(tiled=True)["sync"] == sent(tiled=False)["sync"] > 0


def test_a_step_takes_gradients_of_an_inner_pass_alone() -> None:
    """As in plain PyTorch: the head is trained, the rest has no gradient; unmodified DeepSpeed
    drops them or fails.
    """
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0, "torch_adam": True}}
    job = Job(Tiled, BLOCKS["topo"], ds={"optimizer": adam})
    with running(job) as engine:
        before = weights(engine)
        x, y = batch(0, 0, torch.float32)
        engine(x, y)
        engine.step()
        after = weights(engine)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"out.weight", "out.bias"}


class Nested(Net):
    """All layers lie in reentrant checkpoints, one of which may fail in the backward pass after
    others ended.
    """

    breaks = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in (self.inp, *self.blocks, self.out):
            run = self._broken if self.breaks and layer is self.blocks[0] else layer
            x = checkpoint(run, x, use_reentrant=True)
        return x

    def _broken(self, x: Tensor) -> Tensor:
        broken: Tensor = Break.apply(self.blocks[0](x))
        return broken


def test_a_backward_pass_that_failed_behind_checkpoints_leaves_no_gradients() -> None:
    """The passes inside it have ended well, and none of its own gradients had come."""
    job = Job(Nested, BLOCKS["topo"], steps=2)

    def run(interrupted: bool) -> dict[str, Tensor]:
        with running(job) as engine:
            if interrupted:
                engine.module.breaks = True
                x, y = batch(9, 0, torch.float32)
                with pytest.raises(MemoryError):
                    engine.backward(torch.nn.functional.mse_loss(engine(x), y))
                engine.module.breaks = False
            advance(job, engine, 0, job.steps)
            return weights(engine)

    assert_same_bits(run(interrupted=True), run(interrupted=False))


class Early(Net):
    """May fail at the start of its backward pass, before any gradient."""

    breaks = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return Break.apply(x) if self.breaks else x


def test_a_backward_pass_that_failed_before_any_gradient_drops_none() -> None:
    """Those of the micro-batch before it stay, as in plain PyTorch."""
    job = Job(Early, BLOCKS["topo"], micro_batches=2)

    def run(interrupted: bool) -> dict[str, Tensor]:
        with running(job) as engine:
            for micro in range(2):
                for engine.module.breaks in (True, False) if interrupted and micro else (False,):
                    x, y = batch(0, micro, torch.float32)
                    loss = torch.nn.functional.mse_loss(engine(x), y)
                    if engine.module.breaks:
                        with pytest.raises(MemoryError):
                            engine.backward(loss)
                    else:
                        engine.backward(loss)
                engine.step()
            return weights(engine)

    assert_same_bits(run(interrupted=True), run(interrupted=False))


@pytest.mark.parametrize("mode", ["forward", "module"])
def test_a_loss_of_several_forward_passes(mode: str) -> None:
    """One backward pass of the sum of two; the second may be called on the module itself."""

    def both(engine: Any, x: Tensor, y: Tensor) -> Tensor:
        half = engine if mode == "forward" else engine.module
        first = torch.nn.functional.mse_loss(engine(x[:2]), y[:2])
        return first + torch.nn.functional.mse_loss(half(x[2:]), y[2:])

    job = Job(Net, BLOCKS["topo"], steps=3, loss=both)
    torch.testing.assert_close(trained(job), trained(job.under(None)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [core("quantized"), "topo", "replicated optimizer"])
def test_gradients_may_be_read_in_each_step(name: str) -> None:
    """They cross nodes once, and training with lossy sync is the same without it, to the
    bit.
    """

    def run(reads: bool) -> tuple[dict[str, int], dict[str, Tensor]]:
        job = Job(Net, BLOCKS[name], steps=3)
        with running(job) as engine:
            for step in range(job.steps):
                x, y = batch(step, 0, torch.float32)
                engine.backward(torch.nn.functional.mse_loss(engine(x), y))
                for param in engine.module.parameters() if reads else ():
                    assert deepspeed.utils.safe_get_full_grad(param).abs().max() > 0
                engine.step()
            sent = zero_topo.stats(engine).step_bytes
            return {phase: count for (phase, _), count in sent.items() if phase == "sync"}, weights(
                engine
            )

    sent, found = run(reads=True)
    expected_sent, expected_weights = run(reads=False)
    assert sent == expected_sent
    assert_same_bits(found, expected_weights)
