# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Weights stored as INT8, under DeepSpeed: they follow the masters exactly in every step, whatever
the run does.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from tests.launcher.feature_jobs import zero
from tests.launcher.models import Tied
from tests.launcher.parity import run
from tests.launcher.training import Job, Net, advance, block, largest_difference, running, weights
from tests.marks import cores
from tests.suite import LONG_VARIABLE
from zero_topo.engine.weights import Weights
from zero_topo.plan import coded_params

STEPS = int(os.environ.get(LONG_VARIABLE, 0)) or 5
CODES: dict[str, Any] = {
    "quantize": {
        "weights": "int8",
        "secondary": "int8",
        "gradients": None,
        "resident": "int8",
    }
}
WHOLE: dict[str, Any] = {**CODES, "weights": "rank", "secondary": None}
WIDE = 64


def net(frozen: bool = False) -> nn.Module:
    """The harness's network, wide enough for whole blocks on every rank; perhaps with a frozen
    layer.
    """
    model = Net(width=WIDE, depth=2)
    model.blocks[0].requires_grad_(not frozen)
    return model


def follow(engine: Any, step: int) -> None:
    """Exact weights are the masters, and gathered ones too but for a code's half width, where there
    are codes.
    """
    topo, names = engine.optimizer.topo, {p: n for n, p in engine.module.named_parameters()}
    found = 0
    for param in names:
        if not param.requires_grad:
            continue
        index = engine.optimizer.param_indices[param.ds_id]
        master = safe_get_full_fp32_param(param).view(-1)
        (gathered,) = topo.weights.gather([index], "gather_forward").wait()
        (exact,) = topo.weights.gather([index], "gather_exact").wait()
        assert torch.equal(exact, master.to(exact.dtype)), names[param]
        if not topo.weights.coded[index]:
            continue
        rows = nn.functional.pad(master, (0, topo.layout.padded_numels[index] - len(master)))
        rows = rows.view(topo.layout.plan.world_size, -1)
        blocks = nn.functional.pad(rows, (0, -rows.shape[1] % 64)).unflatten(1, (-1, 64))
        top = blocks.abs().amax(2, keepdim=True).expand(blocks.shape).flatten(1)[:, : rows.shape[1]]
        limit = (top * (0.5001 / 90)).reshape(-1)[: len(master)] + master.abs() * 2**-8
        assert ((gathered.float() - master).abs() <= limit).all(), (names[param], step)
        found += 1
    assert found >= 1, "no parameter has codes"


def job(dtype: str = "bf16", **more: Any) -> Job:
    """A run whose codes are looked at after every step."""
    return Job(net, block("topo", **CODES), STEPS, dtype=dtype, after_step=follow, **more)


def overflow(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    """In step 2, and every 20 steps, one rank's gradient overflows."""
    output = engine(x)
    if engine.global_steps % 20 == 2 and dist.get_rank() == 3:
        output.register_hook(lambda grad: grad * float("inf"))
    return nn.functional.mse_loss(output.float(), y.float())


SCALING = {
    "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
}
OFFLOAD = {
    **zero(offload_optimizer={"device": "cpu"}, sub_group_size=900),
    "zero_force_ds_cpu_optimizer": False,
}
CASES: dict[str, Job] = {
    "plain": job(),
    "in sub-groups": job(ds=zero(sub_group_size=900, reduce_bucket_size=700)),
    "frozen": replace(job(), model=partial(net, frozen=True)),
    "tied": replace(job(), model=partial(Tied, WIDE)),
    "offloaded": job(micro_batches=2, ds=OFFLOAD),
    "persistent": job(ds=zero(stage3_param_persistence_threshold=800)),
    "every rank stores all": job().under(block("topo", **WHOLE)),
    "steps skipped": job("fp16", ds=SCALING, loss=overflow),
}


@pytest.mark.parametrize("name", cores(("steps skipped",), CASES))
def test_codes_follow_their_masters_in_every_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``debug_checks``: all copies are bit-identical too. The loss is stock ZeRO-3's within
    what INT8 costs.
    """
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    case = CASES[name]
    found = run(case).losses
    assert isinstance(found[-1], float)
    stock = run(replace(case, zero_topo=None, after_step=None)).losses
    assert largest_difference(found, stock) <= 0.03 * max(stock)


def test_saving_changes_no_code_and_an_edit_does(shared_path: Any) -> None:
    """``save_16bit_model`` hands every parameter back as if it were edited; what it saves is
    exact.
    """
    case = job(ds=zero(stage3_gather_16bit_weights_on_model_save=True))
    with running(case) as engine:
        advance(case, engine, 0, 2)
        stored: Weights = engine.optimizer.topo.weights
        before, exact = stored.replicas()[0], weights(engine)
        assert engine.save_16bit_model(str(shared_path), "model.pt")
        assert torch.equal(stored.replicas()[0], before)
        dist.barrier()
        saved = torch.load(shared_path / "model.pt", weights_only=True)
        assert all(torch.equal(saved[name].float(), value) for name, value in exact.items())
        topo = engine.optimizer.topo
        dims, persistent = (
            [getattr(p, name) for p in topo.parameters] for name in ("dims", "persistent")
        )
        kept = coded_params(topo.config.plan, topo.layout.numels, dims, persistent, 64)
        assert sum(kept) == 3
