# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""DeepSpeed JSONs that ship train on CPU ranks, one of each plan they give on the emulated machine;
so does each mix of types of parameters, of what is sent and of what is summed.

That every JSON loads and resolves on its own machine is in `tests/unit/test_configs.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import zero_topo
from tests.launcher.training import (
    EMULATED,
    Job,
    Net,
    batch,
    block,
    close,
    ds_config,
    mean,
    mse,
    start,
    train,
)
from tests.launching import ROOT
from tests.marks import cores
from zero_topo.config import ZeroTopoConfig, load_deepspeed_config, resolve_config
from zero_topo.topology import resolve_topology


def on_cpu(path: Path) -> dict[str, Any]:
    """The config on 2 nodes x 2 GPUs x 2 GCDs, with an Adam that needs no compiler, and less to
    print.
    """
    config = load_deepspeed_config(path)
    config["zero_topo"] = config["zero_topo"] | {"topology": EMULATED}
    config["steps_per_print"] = 10**9
    if config.pop("fp16", None):  # which DeepSpeed refuses on CPUs
        config["bf16"] = {"enabled": True}
    config["gradient_accumulation_steps"] = min(2, config["gradient_accumulation_steps"])
    if config["optimizer"]["type"] == "AdamW":
        config["optimizer"]["params"]["torch_adam"] = True
    return config


def plan(path: Path) -> tuple[object, ...]:
    """What an engine would run on, but for what it says of it."""
    block = ZeroTopoConfig.from_ds_config(on_cpu(path))
    assert block is not None
    found = resolve_config(block, resolve_topology(block.topology, dist.get_world_size()))
    formats = (found.weights_spec, found.secondary_spec, found.gradients_spec)
    return found.plan, *formats, found.sync


CONFIGS = {plan(path): path for path in sorted((ROOT / "configs").glob("*.json"), reverse=True)}


@pytest.mark.parametrize(
    "path",
    cores([ROOT / "configs/default.json"], CONFIGS.values()),
    ids=[path.stem for path in CONFIGS.values()],
)
def test_configs_train(path: Path) -> None:
    """Two optimizer steps: finite losses, weights that move, and zero_topo's engine under it."""
    torch.manual_seed(0)
    config = on_cpu(path)
    model = Net(width=64)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for micro in range(2 * config["gradient_accumulation_steps"]):
        loss = mse(engine, *batch(0, micro, torch.bfloat16))
        engine.backward(loss)
        engine.step()
        assert math.isfinite(mean(loss))
    assert zero_topo.stats(engine).steps == 2
    assert type(engine.optimizer.optimizer).__name__ == config["optimizer"]["type"]
    close(engine)


def test_a_block_of_the_environment_trains_as_that_of_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, and an engine is ours that a framework configured without a block; with
    ``zero.Init`` too.
    """
    own = {"topology": EMULATED, "scheme": "topo"}
    written = train(Job(zero_topo=own, steps=2, zero_init=True))
    monkeypatch.setenv("ZERO_TOPO_BLOCK", json.dumps(own))
    assert train(Job(steps=2, zero_init=True)) == written
    engine = start(Job())
    assert zero_topo.stats(engine).config.scheme == "topo"
    close(engine)


MODELS = [(torch.float32, "fp32"), (torch.float32, "bf16"), (torch.float32, "fp16")]
MODELS += [(torch.bfloat16, "fp32"), (torch.float16, "fp32")]
# In which gradients are sent and are summed
PAIRS = [(None, "fp32"), ("bf16", None), ("fp16", "bf16"), ("fp32", "fp16")]
MIXES = [(row, *pair) for row in range(len(MODELS)) for pair in PAIRS]


def net(dtype: torch.dtype) -> Net:
    """Takes inputs of any type."""
    made = Net(width=13, depth=1).to(dtype)
    made.register_forward_pre_hook(
        lambda module, args: (args[0].to(next(module.parameters()).dtype),)
    )
    return made


def job(row: int, mixed: dict[str, Any]) -> Job:
    """Two short steps of one of the models."""
    dtype, mode = MODELS[row]
    scale: dict[str, Any] = (
        {"fp16": {"enabled": True, "initial_scale_power": 4}} if mode == "fp16" else {}
    )
    ds = {**scale, **mixed}
    return Job(partial(net, dtype), block("topo"), 2, micro_batches=2, dtype=mode, ds=ds)


@cache
def plain(row: int) -> list[float]:
    """Losses of one of the models, trained in its own dtype."""
    return train(job(row, {}))


@pytest.mark.parametrize(("row", "travels", "summed"), cores([(2, "bf16", None)], MIXES))
def test_every_mix_of_types_trains(
    row: int, travels: str | None, summed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each type of the model with types in which gradients are sent and are summed."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    mixed: dict[str, Any] = {"data_types": {"grad_accum_dtype": summed}} if summed else {}
    mixed |= {"communication_data_type": travels} if travels else {}
    mine = train(job(row, mixed))
    torch.testing.assert_close(mine, plain(row), rtol=1e-2, atol=1e-3)


def with_complex() -> Net:
    """A model with a trained complex parameter."""
    model = net(torch.float32)
    model.turn = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return model


def partitioned() -> Net:
    """A model in FP64 that `zero.Init` takes apart after it was built."""
    model = net(torch.float64)
    deepspeed.zero.Init(module=model, config_dict_or_path=ds_config(Job(zero_topo=block("topo"))))
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
        (partial(net, torch.float64), {}, r"inp\.weight is torch\.float64: .* call"),
        (partitioned, {}, r"inp\.weight is torch\.float64: .* call"),
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
    with pytest.raises(ValueError, match=match) as caught:
        start(Job(model, block("topo"), ds=keys))
    assert "\n" not in str(caught.value)
