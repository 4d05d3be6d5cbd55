# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What callers do to weights and states in BF16 is as under stock ZeRO-3."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from tests.device import DEVICE
from tests.launcher import training
from tests.launcher.checkpoints import groups
from tests.launcher.features import weights_are_masters, with_states, zero
from tests.launcher.models import SMALL
from tests.launcher.training import (
    Job,
    Net,
    assert_equal,
    batch,
    block,
    ds_config,
    mse,
    run,
    running,
    train,
)
from tests.marks import core

# -- the caller's hands on BF16 weights, masters and states; in FP32 `tests/launcher/test_matrix.py`


@pytest.mark.parametrize(
    ("scheme", "dtype"), [core("topo", "bf16"), ("hsdp", "bf16"), ("topo", "fp32")]
)
def test_access_to_gradients_masters_and_states(scheme: str, dtype: str) -> None:
    """`safe_get_*` and `safe_set_*` show and change what stock's do; in FP32 where the weights are
    the masters.
    """
    with weights_are_masters():
        mine, stock = (with_states(zero_topo, dtype) for zero_topo in (block(scheme), None))
    assert_equal(mine, stock, 1e-5 if dtype == "fp32" else 3e-2)


@pytest.mark.parametrize("overlap", [core(True), False])
def test_a_publish_goes_on_after_the_step(overlap: bool) -> None:
    """The step ends that of persistent parameters alone, whichever sub-group is updated first."""
    seen = []

    def after(engine: Any, step: int) -> None:
        topo, kept = engine.optimizer.topo, engine.optimizer.persistent_parameters
        assert {param.ds_status for param in kept} == {ZeroParamStatus.AVAILABLE}
        left = [run for run, _ in topo.weights._pending]
        assert len(topo.queues.updates._begun) == (len(left) if overlap else 0)
        seen.append((len(left) > 0, sum(map(len, left)) + len(kept)))

    few = zero(stage3_param_persistence_threshold=20, sub_group_size=20)
    job = Job(model=SMALL, steps=2, ds=few, groups=groups, after_step=after)
    run(job.under(block("topo", overlap=overlap, debug_checks=False)))
    assert seen == [(True, len(list(SMALL().parameters())))] * 2


class ReadsAWeight(Net):
    """Reads the weight of a module outside of it, as losses do that do not make all logits at
    once.
    """

    def __init__(self) -> None:
        super().__init__(width=64, depth=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(
            nn.functional.linear(
                self.blocks[0](self.inp(x)), self.blocks.get_parameter("1.1.weight")
            )
        )


@pytest.mark.parametrize("scheme", ["topo", "zero++"])
def test_a_weight_read_outside_its_module_has_the_same_value_each_time(scheme: str) -> None:
    """The first pass gathers it where it is read, later ones with the module that reads it, and
    after a step too.
    """
    job = Job(ReadsAWeight, block(scheme, quantize={"weights": "int8"}), micro_batches=4)
    x, y = batch(0, 0, torch.float32)
    with running(job) as engine:
        losses = []
        for _ in range(3):
            losses.append(mse(engine, x.to(DEVICE), y.to(DEVICE)))
            engine.backward(losses[-1])
            engine.step()
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])


def owned(kind: str, until: ExitStack) -> nn.Module:
    """A model of an engine, of one without an optimizer, or of none."""
    job = Job(zero_topo=block("topo", quantize={}), zero_init=True)
    if kind == "init":
        with deepspeed.zero.Init(config_dict_or_path=ds_config(job)):
            return Net()
    begin = training.start if kind == "trained" else training.without_optimizer
    engine: nn.Module = until.enter_context(running(job, begin))
    return engine


@pytest.mark.parametrize(
    "kinds",
    [core(("trained", "inference")), ("init", "trained"), ("trained", "init")],
)
def test_an_edit_of_parameters_of_two_models_reaches_both(kinds: tuple[str, str]) -> None:
    """DeepSpeed calls the methods of the first parameter for all, whichever model was built
    first.
    """
    with ExitStack() as until:
        both = [owned(kind, until) for kind in kinds]
        params: list[Any] = [param for model in both for param in model.parameters()]
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            for param in params:
                param.data.fill_(0.5 if dist.get_rank() == 0 else -1.0)
        x = torch.full((4, 11), 0.1, device=DEVICE)
        expected = Net().to(DEVICE)
        for param in expected.parameters():
            param.data.fill_(0.5)
        for kind, model in zip(kinds, both, strict=True):
            if kind != "init":
                with torch.no_grad():
                    torch.testing.assert_close(model(x), expected(x))
        # As a coordinator of either model gathers what its modules use
        for group in (params, params[::-1]):
            group[0].all_gather_coalesced(group).wait()
            assert all(p.sub(0.5).abs().max() < 1e-2 for p in params)
            group[0].partition(group)


def test_an_engine_without_an_optimizer_may_hold_its_parameters_on_the_host() -> None:
    """Unmodified DeepSpeed gathers them. With an optimizer the same config trains on the device.

    So it does with stock's other ways to gather and reduce: DeepSpeed would all-reduce past our
    reduce-scatter.
    """
    host = {"offload_param": {"device": "cpu"}}
    job = Job(zero_topo=block("topo"), steps=4, zero_init=True)
    x, _ = batch(0, 0, torch.float32)
    with running(replace(job, ds=zero(**host)), training.without_optimizer) as engine:
        assert {param.ds_tensor.device.type for param in engine.parameters()} == {"cpu"}
        torch.manual_seed(0)
        with torch.no_grad():
            assert torch.equal(engine(x.to(DEVICE)), Net().to(DEVICE)(x.to(DEVICE)))
    ways = {"reduce_scatter": False, "stage3_use_all_reduce_for_fetch_params": True}
    assert train(replace(job, ds=zero(**host, **ways))) == train(job)
