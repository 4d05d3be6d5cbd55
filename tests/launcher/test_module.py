# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The user's module stays the user's: it is copied, saved, compiled, and given to several
engines.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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
    ds_config,
    mse,
    running,
    start,
    weights,
)
from tests.marks import cores, late, often
from zero_topo.engine.stage3 import Stage3

TOPO = block("topo")
BLOCKS: dict[str, dict[str, Any]] = {
    "topo": TOPO,
    "zero++": block("zero++"),
    "INT8 weights": block("topo", quantize={"resident": "int8"}),
    "replicated optimizer": block("topo", optimizer="node"),
}
JOB = Job(Net, TOPO, steps=3)


def plain(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def engines() -> int:
    """Number of our engines in this process."""
    return sum(isinstance(found, Stage3) for found in gc.get_objects())


@pytest.mark.parametrize("zero_topo", [TOPO, None])
def test_an_average_of_weights_is_that_of_unmodified_deepspeed(
    zero_topo: dict[str, Any] | None,
) -> None:
    """Torch's own average, which copies the module and is updated after each step."""
    job = JOB.under(zero_topo)
    expected: dict[str, Tensor] = {}
    with running(job) as engine:
        params = [*engine.module.parameters()]
        with deepspeed.zero.GatheredParameters(params):
            average = AveragedModel(engine.module, multi_avg_fn=get_ema_multi_avg_fn(0.75))
        for step in range(job.steps):
            advance(job, engine, step, step + 1)
            with deepspeed.zero.GatheredParameters(params):
                average.update_parameters(engine.module)
            now = weights(engine)
            expected = {
                name: expected[name].lerp(now[name], 0.25) if expected else now[name]
                for name in now
            }
    torch.testing.assert_close(plain(average.module), expected, rtol=1e-6, atol=1e-7)


def test_weights_of_the_module_are_saved_by_torch(tmp_path: Path) -> None:
    """Its state, gathered; the module itself cannot be pickled, as under unmodified DeepSpeed."""
    reasons = []
    for under in (TOPO, None):
        with running(JOB.under(under)) as engine:
            with deepspeed.zero.GatheredParameters([*engine.module.parameters()]):
                torch.save(engine.module.state_dict(), tmp_path / "weights")
                with pytest.raises((AttributeError, pickle.PicklingError, TypeError)) as refused:
                    pickle.dumps(engine.module)
                reasons.append(refused.type)
            net = Net()
            net.load_state_dict(torch.load(tmp_path / "weights"))
            assert_same_bits(plain(net), weights(engine))
    assert reasons[0] is reasons[1]


def _compiled() -> nn.Module:
    net = Net()
    net.compile(backend="eager")
    return net


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_module_trains_as_the_module_does(when: str) -> None:
    """Compiled before the engine has it, or by the engine; our hooks break its graph as DeepSpeed's
    do.
    """
    job = Job(_compiled if when == "before" else Net, TOPO, steps=3)
    with running(job) as engine:
        if when == "after":
            engine.compile(backend="eager")
        losses = advance(job, engine, 0, job.steps)
    with running(JOB) as engine:
        assert losses == pytest.approx(advance(JOB, engine, 0, job.steps), abs=1e-6)


# -- one module, several engines -------------------------------------------------------------------


def alongside(model: nn.Module, job: Job) -> Any:
    """An engine without optimizer for a module that may have another engine."""
    config = {key: value for key, value in ds_config(job).items() if key != "optimizer"}
    return deepspeed.initialize(model=model, config=config)[0]


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


@pytest.mark.core
@pytest.mark.parametrize("model", often(("adapters",), MODELS))
@pytest.mark.parametrize("name", often(("topo",), BLOCKS))
@pytest.mark.parametrize("destroyed", [late("before training"), late("after training"), "last"])
def test_an_engine_next_to_the_training_engine_of_a_module(
    name: str, destroyed: str, model: str
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
    if destroyed == "before training":
        # Otherwise not before the other engine begins: DeepSpeed's order of modules is that of one
        outputs(first)
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
    calls = [getattr(param, "partition") for param in module.parameters()]  # noqa: B009 (DeepSpeed sets it)
    assert not any(isinstance(call, partial) for call in calls)
    assert not any(hasattr(param, "zero_topo_calls") for param in module.parameters())


@pytest.mark.parametrize("destroyed", ["first", "second"])
def test_engines_without_optimizer_share_a_module(destroyed: str) -> None:
    """Either may be destroyed first; the other gathers by its plan."""
    job = Job(Net, TOPO, ds=NO_PREFETCH)
    torch.manual_seed(0)
    module = job.model()
    pair = [alongside(module, job), alongside(module, job)]
    expected = outputs(pair[0])
    close(pair.pop(0 if destroyed == "first" else 1))
    assert on_plan(pair[0])
    assert torch.equal(outputs(pair[0]), expected)
    close(pair[0])


def test_the_training_engine_of_a_module_is_destroyed_before_a_newer_one_without_optimizer() -> (
    None
):
    """Which then reads the weights as they were trained."""
    job = Job(Net, TOPO, steps=2, ds=NO_PREFETCH)
    with running(job) as engine:
        module = engine.module
        second = alongside(module, job)
        advance(job, engine, 0, job.steps)
        expected = outputs(engine)
    assert torch.equal(outputs(second), expected)
    close(second)


@pytest.mark.parametrize("name", cores(("topo",), BLOCKS))
def test_a_destroyed_engine_frees_its_gradients(name: str) -> None:
    """Also those of a backward pass without its step, and where its optimizer lives on, as in
    DeepSpeed's caches.
    """
    job = Job(Net, BLOCKS[name], steps=1)
    engine = start(job)
    advance(job, engine, 0, job.steps)
    engine.backward(mse(engine, *batch(1, 0, torch.float32)))
    optimizer = engine.optimizer
    gradients = StorageWeakRef(optimizer.topo.gradients.buffer.untyped_storage())
    assert not gradients.expired()
    close(engine)
    assert gradients.expired() and optimizer is engine.optimizer
