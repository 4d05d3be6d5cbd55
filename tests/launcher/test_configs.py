# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Every DeepSpeed JSON that ships takes two steps on CPU ranks, on an emulated machine in place of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import zero_topo
from tests.launcher.training import EMULATED, Net, batch, close, mean, mse
from tests.launching import ROOT
from zero_topo.config import load_deepspeed_config

CONFIGS = sorted((ROOT / "configs").glob("*.json"))


def on_cpu(path: Path) -> dict[str, Any]:
    """The config on 2 nodes x 2 GPUs x 2 dies, with an Adam that needs no compiler, and less to print."""
    config = load_deepspeed_config(path)
    config["zero_topo"] = config["zero_topo"] | {"topology": EMULATED}
    config["steps_per_print"] = 10**9
    if config["optimizer"]["type"] == "AdamW":
        config["optimizer"]["params"]["torch_adam"] = True
    return config


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_configs_train(path: Path) -> None:
    """Two optimizer steps: finite losses, weights that move, and zero_topo's engine under it."""
    torch.manual_seed(0)
    config = on_cpu(path)
    model = Net(width=64)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for micro in range(2 * config["gradient_accumulation_steps"]):
        loss = mse(engine, *batch(0, micro, torch.bfloat16))
        engine.backward(loss)
        engine.step()
        assert math.isfinite(mean(loss))
    assert zero_topo.stats(engine).steps == 2
    assert type(engine.optimizer.optimizer).__name__ == config["optimizer"]["type"]
    close(engine)
