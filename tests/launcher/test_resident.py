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
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param

from tests.launcher.features import SCALING, STEPS, overflow, zero
from tests.launcher.training import CODES, Job, Net, block, largest_difference, run


def follow(engine: Any, step: int) -> None:
    """Exact weights are the masters, and gathered ones too but for a code's half width, where there
    are codes.
    """
    topo = engine.optimizer.topo
    assert any(topo.weights.coded)
    for name, param in engine.module.named_parameters():
        index = engine.optimizer.param_indices[param.ds_id]
        master = safe_get_full_fp32_param(param).view(-1)
        (exact,) = topo.weights.gather([index], "gather_exact").wait()
        assert torch.equal(exact, master.to(exact.dtype)), name
        if topo.weights.coded[index]:
            (gathered,) = topo.weights.gather([index], "gather_forward").wait()
            limit = master.abs().max() * (0.5001 / 90 + 2**-8)
            assert (gathered.float() - master).abs().max() <= limit, (name, step)


def job(dtype: str = "bf16", **more: Any) -> Job:
    """A run whose codes are looked at after every step."""
    wide = partial(Net, width=64, depth=2)  # whole blocks on every rank
    codes = block("topo", quantize=CODES)
    return Job(wide, codes, STEPS, micro_batches=2, dtype=dtype, after_step=follow, **more)


CASES: dict[str, Job] = {
    "in sub-groups": job(ds=zero(sub_group_size=900, reduce_bucket_size=700)),
    "offloaded": job(ds=zero(offload_optimizer={"device": "cpu"}, sub_group_size=900)),
    "persistent": job(ds=zero(stage3_param_persistence_threshold=800)),
    "steps skipped": job("fp16", ds=SCALING, loss=overflow),
}


@pytest.mark.parametrize("name", CASES)
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
