# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The user's module stays the user's: it is copied, saved, compiled, and given to several
engines.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zero_topo
from tests.launcher.checkpoints import assert_same_bits
from tests.launcher.models import adapted
from tests.launcher.training import (
    Job,
    Net,
    advance,
    batch,
    block,
    close,
    mse,
    running,
    start,
    weights,
    without_optimizer,
)
from tests.marks import core

TOPO = block("topo")
BLOCKS: dict[str, dict[str, Any]] = {
    "topo": TOPO,
    "zero++": block("zero++"),
    "INT8 weights": block("topo", quantize={"resident": "int8"}),
    "replicated optimizer": block("topo", optimizer="node"),
}


def _compiled() -> nn.Module:
    net = Net()
    net.compile(backend="eager")
    return net


def test_a_compiled_module_trains_as_the_module_does() -> None:
    """Compiled before the engine has it, or by the engine; our hooks break its graph as DeepSpeed's
    do.
    """
    losses = []
    for when in ("never", "before", "after"):
        job = Job(_compiled if when == "before" else Net, TOPO, steps=3)
        with running(job) as engine:
            if when == "after":
                engine.compile(backend="eager")
            losses.append(advance(job, engine, 0, job.steps))
    assert losses[1:] == [pytest.approx(losses[0], abs=1e-6)] * 2


# -- one module, several engines -------------------------------------------------------------------


def alongside(model: nn.Module, job: Job) -> Any:
    """An engine without optimizer for a module that may have another engine."""
    return without_optimizer(replace(job, model=lambda: model))


def outputs(engine: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = engine(batch(50, 0, torch.float32)[0]).clone()
        return found


def on_plan(engine: Any) -> bool:
    """Whether our engines serve every parameter."""
    return all(isinstance(param.partition, partial) for param in engine.module.parameters())


def steps_of(engine: Any, job: Job) -> tuple[list[float], dict[str, int]]:
    """Losses, and the bytes of the last step."""
    losses = advance(job, engine, 0, job.steps)
    sent = zero_topo.stats(engine).step_bytes
    return losses, {phase: count for (phase, _), count in sent.items()}


MODELS: dict[str, Callable[[], nn.Module]] = {"all": Net, "adapters": adapted}
# After an evaluation DeepSpeed leaves prefetched parameters in flight, which GatheredParameters
# refuses.
NO_PREFETCH = {"zero_optimization": {"stage3_prefetch_bucket_size": 0}}


@pytest.mark.parametrize(
    ("destroyed", "name", "model"),
    [
        core("last", "topo", "adapters"),
        ("last", "topo", "all"),
        ("last", "replicated optimizer", "all"),
        ("at first", "INT8 weights", "all"),
        ("before training", "topo", "all"),
        ("before training", "zero++", "all"),
        ("after training", "INT8 weights", "adapters"),
    ],
)
def test_an_engine_next_to_the_training_engine_of_a_module(
    destroyed: str, name: str, model: str
) -> None:
    """It may be destroyed at any time: losses and bytes are those of the training engine alone, as
    are weights.
    """
    job = Job(MODELS[model], BLOCKS[name], steps=2, ds=NO_PREFETCH)
    with running(job) as engine:
        expected = steps_of(engine, job)
        own = weights(engine)
        last = outputs(engine)
    torch.manual_seed(0)
    module = job.model()
    first = alongside(module, job)
    if destroyed in ("at first", "before training"):
        # Otherwise not before the other engine begins: DeepSpeed's order of modules is that of one
        outputs(first)
    if destroyed == "at first":
        close(first)
    engine = start(replace(job, model=lambda: module))
    if destroyed == "before training":
        close(first)
    assert steps_of(engine, job) == expected
    if destroyed == "after training":
        close(first)
    assert on_plan(engine)
    assert_same_bits(weights(engine), own)
    assert torch.equal(outputs(engine), last)
    close(engine)
    if destroyed == "last":
        assert on_plan(first)
        assert_same_bits(weights(first), own)
        torch.testing.assert_close(outputs(first), last, rtol=1e-5, atol=1e-6)
        close(first)
    assert not any(hasattr(param, "zero_topo_calls") for param in module.parameters())


@pytest.mark.parametrize(("trains", "destroyed"), [(False, 0), (False, 1), (True, 0)])
def test_an_engine_without_optimizer_outlives_another_of_its_module(
    trains: bool, destroyed: int
) -> None:
    """The newer one or the older, which reads what it read, by its plan; after an engine that
    trained it reads weights as they were trained.
    """
    job = Job(steps=2, zero_topo=TOPO, ds=NO_PREFETCH)
    module = job.model()
    first = start(replace(job, model=lambda: module)) if trains else alongside(module, job)
    pair = [first, alongside(module, job)]
    if trains:
        advance(job, first, 0, job.steps)
    expected = outputs(first)
    close(pair.pop(destroyed))
    assert trains or on_plan(pair[0])
    assert torch.equal(outputs(pair[0]), expected)
    close(pair[0])


@pytest.mark.core
def test_a_destroyed_engine_frees_its_shards_and_gradients() -> None:
    """Also those of a backward pass without its step, and where its optimizer lives on, as in
    DeepSpeed's caches; each group kept with it would cost a rank threads and sockets.
    """
    job = Job(Net, TOPO, steps=1)
    engine = start(job)
    advance(job, engine, 0, job.steps)
    engine.backward(mse(engine, *batch(1, 0, torch.float32)))
    optimizer = engine.optimizer
    stored = weakref.ref(optimizer.topo)
    gradients = StorageWeakRef(optimizer.topo.gradients.buffer.untyped_storage())
    assert not gradients.expired()
    close(engine)
    assert gradients.expired() and optimizer is engine.optimizer
    gc.collect()
    assert stored() is None
