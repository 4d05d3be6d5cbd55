# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Engines without an optimizer follow the plan: a policy's frozen reference, a reward model, an
evaluation.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_topo
from tests.device import DEVICE
from tests.launcher import training
from tests.launcher.checkpoints import assert_same_bits
from tests.launcher.training import (
    Job,
    Net,
    advance,
    batch,
    block,
    running,
    weights,
)
from tests.marks import core
from zero_topo.cost import by_domain
from zero_topo.cost.memory import memory_bytes
from zero_topo.cost.volume import step_bytes

ZERO = {"stage3_prefetch_bucket_size": 0, "stage3_gather_16bit_weights_on_model_save": True}


def job(scheme: str = "topo", kept: int = 0) -> Job:
    """A policy's run, quantized as the scheme has it."""
    zero = {"zero_optimization": {**ZERO, "stage3_param_persistence_threshold": kept}}
    return Job(partial(Net, 64), block(scheme, quantize={}), dtype="bf16", ds=zero)


def poisoned() -> nn.Module:
    """The policy's model with NaN beyond the end of each parameter that `zero.Init` has
    partitioned, which stock neither sets nor reads.
    """
    model: Any = Net(64)
    for param in model.parameters():
        row = param.ds_tensor.data
        stored = max(0, param.ds_numel - dist.get_rank() * row.numel())
        row[stored:] = torch.nan
    return model


def started(run: Job) -> Any:
    """An engine without an optimizer, of the policy's first weights."""
    engine = training.without_optimizer(run)
    engine.eval()
    return engine


reference = partial(running, begin=started)


def output(engine: Any) -> Tensor:
    """Of one batch, without gradients."""
    x, _ = batch(0, 0, torch.bfloat16)
    with torch.no_grad():
        found: Tensor = engine(x.to(DEVICE))
    return found


@pytest.mark.parametrize(
    ("scheme", "kept", "zero_init"),
    [core("topo", 0, True), ("zero++", 0, True), ("topo", 100, False)],
)
def test_a_reference_begins_as_its_policy(
    scheme: str, kept: int, zero_init: bool, shared_path: Path
) -> None:
    """Bit for bit, also in INT8, so that a KL divergence begins at 0; what it sends and stores is
    the plan's.

    Only ``topo`` sends nothing of it between nodes. Its report has the bytes of a forward pass of
    all ranks. What memory stored beyond the end of a parameter is not quantized together with it.
    """
    run = job(scheme, kept)
    if zero_init:
        run = replace(run, model=poisoned, zero_init=True)
    with running(run) as policy, reference(run) as frozen:
        theirs = output(frozen)
        assert torch.equal(output(policy), theirs)
        for _ in range(2):  # in its first two passes DeepSpeed does not keep small parameters whole
            assert torch.equal(output(frozen), theirs)
        stats = zero_topo.stats(frozen)
        zero_topo.report(frozen, shared_path)
        assert torch.tensor(advance(run, policy, 0, 2)).isfinite().all()
        assert torch.equal(output(frozen), theirs)
    assert stats.steps == 3 and stats.step_bytes == step_bytes(stats.config, stats.work) != {}
    assert stats.memory == memory_bytes(stats.config, stats.work, 2)
    assert ("world" in by_domain(stats.step_bytes)) == (scheme == "zero++")
    if dist.get_rank() == 0:
        found = json.loads((shared_path / "report.json").read_text())["zero_topo"]
        assert found["ranks"] == dist.get_world_size()
        assert {row["phase"] for row in found["sent"] if row["max"]} - {"gather_exact"} == {
            "gather_forward"
        }
        assert all(row["min"] == row["max"] == row["formula"] for row in found["sent"])


def test_a_reference_of_trl_begins_as_its_policy() -> None:
    """TRL leaves the persistence threshold "auto", and names its number where DeepSpeed does not
    look.
    """
    name, kept = "stage3_param_persistence_threshold", 1000
    zero = {**ZERO, name: "auto"}
    policys = job(kept=kept)
    trls = replace(policys, ds={"zero_optimization": zero, f"zero_optimization.{name}": kept})
    with running(policys) as policy, reference(trls) as frozen:
        assert torch.equal(output(policy), output(frozen))
        assert not all(param.ds_persist for param in policy.module.parameters())


def test_what_it_reads_and_writes_is_exact(shared_path: Path) -> None:
    """Exports, edits, a policy's weights copied into it, and a policy's checkpoint."""
    run = job()
    with running(run) as policy, reference(run) as frozen:
        began = weights(frozen)
        assert frozen.save_16bit_model(str(shared_path), "model.bin")
        dist.barrier()
        assert_same_bits(
            {k: v.float() for k, v in torch.load(shared_path / "model.bin").items()}, began
        )
        advance(run, policy, 0, 2)
        policy.save_checkpoint(str(shared_path), tag="policy")
        for mine, theirs in zip(
            policy.module.parameters(), frozen.module.parameters(), strict=True
        ):
            with deepspeed.zero.GatheredParameters([mine, theirs], modifier_rank=0):
                if dist.get_rank() == 0:
                    theirs.data.copy_(mine.data)
        assert_same_bits(weights(frozen), weights(policy))
        synced = output(frozen)
        with reference(run) as other:
            other.load_checkpoint(str(shared_path), tag="policy")
            assert_same_bits(weights(other), weights(policy))
            assert torch.equal(output(other), synced)


def test_a_frozen_engine_is_skipped_in_a_saved_state(
    shared_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Accelerate's ``save_state`` and ``load_state`` save and load every prepared model under a tag
    of its own.
    """
    run = job()
    with running(run) as policy, reference(run) as frozen:
        advance(run, policy, 0, 1)
        for engine, tag in ((frozen, "model_0"), (policy, "model_1")):
            engine.save_checkpoint(str(shared_path), tag)
        expected = advance(run, policy, 1, 3)
        began = weights(frozen)
    with running(run) as policy, reference(run) as frozen:
        for engine, tag in ((frozen, "model_0"), (policy, "model_1")):
            engine.load_checkpoint(str(shared_path), tag)
        assert advance(run, policy, 1, 3) == expected
        assert_same_bits(weights(frozen), began)
    said = [
        line for line in caplog.messages if "skips this engine" in line or "does not exist" in line
    ]
    assert len(said) == (2 if dist.get_rank() == 0 else 0)
    assert not any("\n" in line for line in said)
