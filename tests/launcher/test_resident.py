# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Weights stored as INT8, under DeepSpeed: they follow the masters exactly in every step, whatever
the run does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from tests.launcher.features import STEPS, zero
from tests.launcher.training import Job, Net, block, largest_difference, run
from tests.marks import cores

CODES: dict[str, Any] = {
    "quantize": {
        "weights": "int8",
        "secondary": "int8",
        "gradients": None,
        "resident": "int8",
    }
}


def follow(engine: Any, step: int) -> None:
    """Exact weights are the masters, and gathered ones too but for a code's half width, where there
    are codes.
    """
    topo, names = engine.optimizer.topo, {p: n for n, p in engine.module.named_parameters()}
    found = 0
    for param in names:
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
    wide = partial(Net, width=64, depth=2)  # whole blocks on every rank
    return Job(wide, block("topo", **CODES), STEPS, dtype=dtype, after_step=follow, **more)


def overflow(engine: Any, x: Tensor, y: Tensor) -> Tensor:
    """In step 2 one rank's gradient overflows."""
    output = engine(x)
    if engine.global_steps == 2 and dist.get_rank() == 3:
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
    "in sub-groups": job(ds=zero(sub_group_size=900, reduce_bucket_size=700)),
    "offloaded": job(micro_batches=2, ds=OFFLOAD),
    "persistent": job(ds=zero(stage3_param_persistence_threshold=800)),
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
