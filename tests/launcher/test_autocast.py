# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ``torch_autocast``: FP32 weights, of which some are sent and used in a lower
dtype.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from torch import nn

import zero_topo
from tests.launcher.features import MOMENTUM, lower_dtypes
from tests.launcher.training import (
    DATA_PARALLEL,
    Job,
    Net,
    Result,
    advance,
    assert_equal,
    block,
    run,
    running,
)
from tests.marks import core
from zero_topo.cost import step_bytes

LOWER = ["torch.nn.Linear", "torch.nn.LayerNorm"]
"""Autocast computes norms in FP32; in this list they are sent, and so rounded, in the lower dtype
all the same.
"""

PLANS = {
    "topo": block("topo"),
    "weights everywhere": block("topo", **DATA_PARALLEL),
    "captured secondary": block("zero++"),
    "hsdp": block("hsdp"),
}


def net() -> Net:
    """With norms whose weights have no exact BF16 value, and frozen parameters of both kinds."""
    model = Net(width=24)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    model.blocks[1].requires_grad_(False)
    return model


def job(
    zero_topo: dict[str, Any] | None, dtype: str = "bfloat16", kept: int = 0, **autocast: Any
) -> Job:
    """Steps of SGD, which turns a small difference of gradients into a small one of weights."""
    ds = {
        "torch_autocast": {"enabled": True, "dtype": dtype, **autocast},
        **MOMENTUM,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage3_param_persistence_threshold": kept},
    }
    return Job(net, zero_topo, steps=4, micro_batches=2, ds=ds)


@cache
def stock(dtype: str, kept: int, norms: bool) -> Result:
    """Of stock ZeRO-3."""
    return run(job(None, dtype, kept, **listed(norms)))


def listed(norms: bool) -> dict[str, Any]:
    """The modules that are sent in the lower dtype: DeepSpeed's own list, or norms too."""
    return {"lower_precision_safe_modules": LOWER} if norms else {}


@pytest.mark.parametrize(
    ("name", "dtype", "kept", "norms"),
    [
        core("topo", "bfloat16", 0, True),
        ("topo", "bfloat16", 30, False),
        ("weights everywhere", "bfloat16", 0, True),
        ("captured secondary", "bfloat16", 0, True),
        ("hsdp", "bfloat16", 0, False),
        ("topo", "float16", 0, False),
    ],
)
def test_it_trains_as_under_stock(name: str, dtype: str, kept: int, norms: bool) -> None:
    """The first loss is stock's, with weights rounded as it rounds them; it sums gradients in the
    lower dtype.
    """
    with lower_dtypes():
        expected = stock(dtype, kept, norms)
        mine = run(job(PLANS[name], dtype, kept, **listed(norms)))
    assert mine.losses[0] == pytest.approx(expected.losses[0], rel=0, abs=1e-6)
    assert mine.losses[-1] < 0.95 * mine.losses[0]
    assert_equal(mine, expected, 2e-3)


def test_residuals_know_the_scale_of_fp16() -> None:
    """DeepSpeed's own loss scale is 1 next to the scaler of FP16, and gradients are 65536 times too
    large.
    """
    sync = {"mode": "quantized", "bits": 8}
    with lower_dtypes():
        mine = run(job(block("topo", sync=sync), "float16"))
        with running(job(block("topo", sync=sync), "float16")) as engine:
            advance(job(None), engine, 0, 1)
            residual = engine.optimizer.topo.gradients.mode.residual
        assert residual.abs().max() < 0.1
        assert_equal(mine, stock("float16", 0, False), 2e-2)


def test_what_is_sent_has_half_the_bytes() -> None:
    """The meter and the formula count gathers and the scatter of each dtype."""
    with lower_dtypes():
        sent = list[Counter[str]]()
        switched_off: dict[str, Any] = {"enabled": False}
        for autocast in ({}, switched_off):
            run = job(block("topo"), **autocast)
            run.ds["zero_optimization"] |= {
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_live_parameters": 0,
            }
            with running(run) as engine:
                advance(run, engine, 0, 2)
                stats = zero_topo.stats(engine)
            assert stats.step_bytes == step_bytes(stats.config, stats.work)
            phases = Counter[str]()
            for (phase, _), nbytes in stats.step_bytes.items():
                phases[phase] += nbytes
            sent.append(phases)
    lower, usual = sent
    for phase in ("gather_forward", "scatter"):
        assert 0.5 * usual[phase] < lower[phase] < 0.6 * usual[phase]
    assert lower["publish"] == usual["publish"] and lower["sync"] == usual["sync"]
