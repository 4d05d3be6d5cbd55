# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Training the way GPT-NeoX calls DeepSpeed, with zero_topo put around it as
`python -m zero_topo.neox` does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_topo
from tests.launcher.neox_like import Args, Pipe, setup
from tests.launcher.training import EMULATED, Job, advance, close, ds_config, weights
from tests.marks import core
from zero_topo.neox.adapt import partitioned

TOPO = {"topology": EMULATED, "scheme": "topo"}
SCAPE = TOPO | {"optimizer": "node", "sync": {"mode": "scape", "density": 0.5}}


class Adapted(Pipe):
    """NeoX's pipe as zero_topo.neox wraps it."""

    to_sequential = partitioned(Pipe.to_sequential)


def args_of(block: dict[str, Any] | None, optimizer_type: str = "adam") -> Args:
    """NeoX's arguments: its config names an optimizer, which the caller builds, and repeats the
    clipping.
    """
    config = ds_config(Job(zero_topo=block, dtype="bf16", micro_batches=2))
    config["optimizer"] = {
        "type": "AdamS" if optimizer_type == "adams" else "Adam",
        "params": {"lr": 1e-2},
    }
    return Args(config, optimizer_type, local_rank=int(os.environ["LOCAL_RANK"]))


JOB = Job(dtype="bf16", micro_batches=2)


@pytest.mark.core
def test_every_parameter_is_partitioned_when_it_is_built() -> None:
    """NeoX's second build has whole weights; wrapped, it has none, and the engine is ours."""
    plain = Pipe(args_of(TOPO)).to_sequential()
    assert not any(hasattr(parameter, "ds_id") for parameter in plain.parameters())
    engine, model = setup(args_of(TOPO), Adapted)
    assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
    stats = zero_topo.stats(engine)
    assert stats.config.plan.weights == 2
    assert stats.config.weights_spec is not None and stats.config.gradients_spec is not None
    close(engine)


@pytest.mark.parametrize(
    ("block", "optimizer_type"), [(TOPO, "adam"), core(SCAPE, "adams")], ids=["topo", "scape"]
)
def test_a_resumed_run_goes_on_as_if_never_stopped(
    block: dict[str, Any], optimizer_type: str, shared_path: Path
) -> None:
    """Weights after 2 steps, save, 2 more equal those after load and the same 2, bit for bit."""
    engine, _ = setup(args_of(block, optimizer_type), Adapted)
    advance(JOB, engine, 0, 2)
    engine.save_checkpoint(str(shared_path), tag="global_step2", client_state={"iteration": 2})
    losses = advance(JOB, engine, 2, 4)
    expected = weights(engine)
    close(engine)
    engine, _ = setup(args_of(block, optimizer_type), Adapted)
    _, client = engine.load_checkpoint(str(shared_path))
    assert client["iteration"] == 2
    assert advance(JOB, engine, 2, 4) == losses
    assert all(torch.equal(value, expected[name]) for name, value in weights(engine).items())
    close(engine)
