# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""DeepSpeed JSONs that ship take two steps on CPU ranks: one of each plan they give on the emulated
machine.

That every one of them loads and resolves on its own machine is in `tests/unit/test_configs.py`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import zero_topo
from tests.launcher.training import EMULATED, Job, Net, batch, close, mean, mse, start, train
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
