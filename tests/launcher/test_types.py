# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Types of parameters, of what is sent and of what is summed: each mix trains, or is refused in a
line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator

from tests.launcher.training import Job, Net, block, train
from tests.marks import cores
from zero_topo.quant.operands import DTYPES

MODELS = [(torch.float32, "fp32"), (torch.float32, "bf16"), (torch.float32, "fp16")]
MODELS += [(torch.bfloat16, "fp32"), (torch.float16, "fp32")]
TYPES = [None, *DTYPES]
MIXES = [(row, column) for row in range(len(MODELS)) for column in range(len(TYPES))]


def net(dtype: torch.dtype) -> Net:
    """Takes inputs of any type."""
    made = Net(width=13, depth=1).to(dtype)
    made.register_forward_pre_hook(
        lambda module, args: (args[0].to(next(module.parameters()).dtype),)
    )
    return made


def job(row: int, mixed: dict[str, Any], zero_topo: dict[str, Any]) -> Job:
    """Two short steps of one of the models."""
    dtype, mode = MODELS[row]
    scale: dict[str, Any] = (
        {"fp16": {"enabled": True, "initial_scale_power": 4}} if mode == "fp16" else {}
    )
    return Job(
        partial(net, dtype), zero_topo, steps=2, micro_batches=2, dtype=mode, ds={**scale, **mixed}
    )


@cache
def plain(row: int) -> list[float]:
    """Losses of one of the models, trained in its own dtype."""
    return train(job(row, {}, block("topo")))


@pytest.mark.parametrize(("row", "column"), cores([(2, 1)], MIXES))
def test_every_mix_of_types_trains(row: int, column: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each type of the model with each in which gradients are sent and are summed."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    travels, summed = (TYPES[(step * row + column) % len(TYPES)] for step in (0, 1))
    mixed: dict[str, Any] = {"data_types": {"grad_accum_dtype": summed}} if summed else {}
    mixed |= {"communication_data_type": travels} if travels else {}
    mine = train(job(row, mixed, block("topo")))
    torch.testing.assert_close(mine, plain(row), rtol=1e-2, atol=1e-3)


def with_complex() -> Net:
    """A model with a trained complex parameter."""
    model = net(torch.float32)
    model.turn = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return model


def mixed() -> Net:
    """A model of two types."""
    model = net(torch.float32)
    model.out.bfloat16()
    return model


@pytest.mark.core
@pytest.mark.parametrize(
    ("model", "keys", "match"),
    [
        *(
            (partial(net, torch.float64), {"init": init}, r"inp\.weight is torch\.float64: .* call")
            for init in (0, 1)
        ),
        (with_complex, {}, r"turn is torch\.complex64: .* torch\.view_as_real\(weight\) "),
        (
            mixed,
            {},
            r"such as inp\.weight \(torch\.float32\) and out\.weight \(torch\.bfloat16\): .* "
            r"freeze",
        ),
        (
            partial(net, torch.float32),
            {"data_types": {"grad_accum_dtype": "int8"}},
            r'data_types\.grad_accum_dtype = "int8": .* "fp32"',
        ),
    ],
    ids=(
        "FP64",
        "FP64, partitioned before",
        "complex",
        "two types in one optimizer",
        "sums of whole numbers",
    ),
)
def test_what_cannot_train_is_refused(
    model: Callable[[], Net], keys: dict[str, Any], match: str
) -> None:
    """In a line, whatever stock would do: it trains FP64, fails of two types without words, and
    rounds sums.
    """
    made = model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "zero_topo": block("topo"),
    }
    if keys.pop("init", False):
        deepspeed.zero.Init(module=made, config_dict_or_path=config)
    with pytest.raises(ValueError, match=match) as caught:
        deepspeed.initialize(
            model=made, model_parameters=list(made.parameters()), config=config | keys
        )
    assert "\n" not in str(caught.value)
