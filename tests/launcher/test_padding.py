# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed leaves beyond the ends of parameters in the last world shards never reaches a weight.

Stock ZeRO-3 neither sets nor reads that memory; quantized in one block with real weights, it would set their scale.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.launcher.checkpoints import SAVED_AT, STEPS, TAG, job, loaded, save
from tests.launcher.training import Job, advance, block, train


def poison(flat: torch.Tensor, numel: int) -> None:
    """Fill what lies beyond a parameter's end in this rank's world shard ``[ceil(numel / N)]`` with NaN."""
    held = max(0, min(flat.numel(), numel - dist.get_rank() * flat.numel()))
    flat[held:] = torch.nan


def poisoned_groups(model: nn.Module) -> list[dict[str, Any]]:
    """All parameters, their padding poisoned before DeepSpeed builds an engine of them."""
    for param in model.parameters():
        poison(param.ds_tensor.data, param.ds_numel)  # type: ignore[attr-defined]
    return [{"params": list(model.parameters())}]


@pytest.mark.parametrize("scheme", ["topo", "zero++"])
def test_garbage_at_the_start_does_no_harm(scheme: str) -> None:
    """Parameters partitioned by `zero.Init` come with whatever their memory held."""
    clean = Job(zero_topo=block(scheme, quantize={}), zero_init=True, steps=2)
    assert train(replace(clean, groups=poisoned_groups)) == train(clean)


@pytest.mark.parametrize("scheme", ["topo", "zero++"])
def test_garbage_in_a_checkpoint_does_no_harm(scheme: str, rank: int, shared_path: Path) -> None:
    """Stock saves it with masters and optimizer states, and loads it."""
    saved = save(job(block(scheme, quantize={})), shared_path)
    poison_file(next((shared_path / TAG).glob(f"*zero_pp_rank_{rank}_*optim_states.pt")))
    dist.barrier()
    with loaded(saved.job, shared_path) as engine:
        assert advance(saved.job, engine, SAVED_AT, STEPS) == saved.losses


def poison_file(path: Path) -> None:
    """Poison the padding in this rank's file: every parameter's, in each flat tensor of every sub-group."""
    state = torch.load(path, weights_only=False)
    shapes = torch.load(path.with_name(path.name.replace("optim", "model")), weights_only=False)["param_shapes"]
    inner = state["optimizer_state_dict"]
    for group, names in enumerate(shapes):
        entry = inner["optimizer_state_dict"]["state"][group]
        for flat in (inner["fp32_flat_groups"][group].detach(), entry["exp_avg"], entry["exp_avg_sq"]):
            begin = 0
            for shape in names.values():
                width = -(-shape.numel() // dist.get_world_size())
                poison(flat[begin : begin + width], shape.numel())
                begin += width
    torch.save(state, path)
