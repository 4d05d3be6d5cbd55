# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``offload_states`` and ``reload_states``: what is freed, what can be used meanwhile, and what
says that it cannot.

That a run with them equals one without is a row of the matrix (`tests.launcher.features`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State
from deepspeed.utils import safe_get_full_grad, safe_get_local_fp32_param, safe_set_local_fp32_param

from tests.launcher.checkpoints import assert_same_bits
from tests.launcher.training import (
    ADAMS,
    CODES,
    Job,
    Result,
    advance,
    batch,
    block,
    mse,
    run,
    running,
    train,
    weights,
)
from tests.marks import cores

STEPS = 4
SCAPE = {"mode": "scape", "density": 0.3}
BLOCKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "codes": (block("topo", quantize=CODES), {}),
    "as it comes": (block("topo", quantize={}), {}),
    "scape": (block("topo", quantize={}, optimizer="node", sync=SCAPE), ADAMS),
}


def job(name: str = "as it comes", **more: Any) -> Job:
    zero_topo, ds = BLOCKS[name]
    return Job(zero_topo=zero_topo, steps=STEPS, dtype="bf16", ds=ds, **more)


def there_and_back(engine: Any, step: int) -> None:
    """All states, before each step but the first; meanwhile none of them is on the device."""
    if step == 0:
        return
    optimizer = engine.optimizer
    stored = [
        *optimizer.topo.weights.tensors(),
        *optimizer.topo.gradients.tensors(),
        *optimizer.optimizer_tensors(),
        *optimizer.fp32_partitioned_groups_flat,
    ]
    storages = [tensor.untyped_storage() for tensor in stored]
    before = [storage.nbytes() for storage in storages]
    engine.offload_states()
    assert not any(storage.nbytes() for storage in storages)
    assert optimizer.offloaded_states == set(State)
    engine.reload_states()
    assert [storage.nbytes() for storage in storages] == before
    assert optimizer.offloaded_states == set()


@pytest.mark.parametrize("name", cores(("codes",), BLOCKS))
def test_a_run_whose_states_are_freed_and_come_back_goes_on_bit_for_bit(name: str) -> None:
    """It may be destroyed while all is away."""
    whole = run(job(name))
    broken = job(name, each_step=there_and_back)
    with running(broken) as engine:
        assert advance(broken, engine, 0, STEPS) == whole.losses
        assert_same_bits(weights(engine), whole.weights)
        engine.offload_states()


def backward(engine: Any) -> None:
    engine.backward(mse(engine, *batch(9, 0, torch.bfloat16)))


def first(engine: Any) -> Any:
    return next(engine.module.parameters())


def gather(engine: Any) -> None:
    with deepspeed.zero.GatheredParameters([first(engine)]):
        pass


USES: tuple[tuple[State, Callable[[Any, Path], object]], ...] = (
    (State.lp_params, lambda engine, path: mse(engine, *batch(9, 0, torch.bfloat16))),
    (State.lp_params, lambda engine, path: gather(engine)),
    (State.lp_grads, lambda engine, path: backward(engine)),
    (State.contiguous_grad_buffer, lambda engine, path: backward(engine)),
    (State.lp_grads, lambda engine, path: safe_get_full_grad(first(engine))),
    (State.lp_grads, lambda engine, path: engine.optimizer._get_norm_groups()),
    (State.optim_states, lambda engine, path: engine.save_checkpoint(str(path))),
)


@pytest.mark.core
def test_a_use_of_what_is_away_says_so_and_the_run_goes_on(shared_path: Path) -> None:
    with running(job()) as engine:
        losses = advance(job(), engine, 0, 2)
        for kind, act in USES:
            engine.offload_states(include=[kind])
            with pytest.raises(
                RuntimeError,
                match=rf"{kind.value} to the host: call engine.reload_states\(\) first",
            ):
                act(engine, shared_path)
            engine.reload_states()
            engine.zero_grad()
        assert losses + advance(job(), engine, 2, STEPS) == train(job())


def checkpointed(engine: Any, path: Path, offloaded: bool) -> None:
    """On a CPU, `torch.load` gives optimizer states memory that cannot be resized: they stay where
    they are.
    """
    engine.save_checkpoint(str(path))
    engine.load_checkpoint(str(path))
    if offloaded:
        engine.offload_states()


def edited(engine: Any, path: Path, offloaded: bool) -> None:
    """Masters can be read and edited there."""
    if offloaded:
        engine.offload_states(include=[State.hp_params, State.optim_states])
    for param in engine.module.parameters():
        safe_set_local_fp32_param(param, safe_get_local_fp32_param(param) * 0.5)


def stepped(engine: Any, path: Path, offloaded: bool) -> None:
    """A step without masters is refused, and taken afterwards."""
    if offloaded:
        engine.offload_states(include=[State.hp_params])
    backward(engine)
    if offloaded:
        with pytest.raises(RuntimeError, match="hp_params to the host"):
            engine.step()
        engine.reload_states()
    engine.step()


@pytest.mark.parametrize("act", [checkpointed, edited, stepped])
def test_what_is_done_while_states_are_away_is_as_without(
    act: Callable[[Any, Path, bool], None], shared_path: Path
) -> None:
    def trained(offloaded: bool) -> Result:
        with running(job()) as engine:
            losses = advance(job(), engine, 0, 2)
            act(engine, shared_path, offloaded)
            if offloaded:
                engine.reload_states()
            return Result(losses + advance(job(), engine, 2, STEPS), weights(engine))

    here, there = trained(False), trained(True)
    assert here.losses == there.losses
    assert_same_bits(there.weights, here.weights)
