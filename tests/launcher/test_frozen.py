# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A model frozen all but its adapters, under DeepSpeed: it follows the plan, and is saved and
loaded exactly.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

from tests.launcher.checkpoints import assert_same_bits
from tests.launcher.models import adapted
from tests.launcher.training import Job, advance, batch, block, mse, running, weights

CODES = block("topo", quantize={})


def job(zero_topo: dict[str, Any] | None, dtype: str = "bf16", **zero: Any) -> Job:
    """A run of a few steps."""
    ds = {
        "zero_optimization": {"stage3_prefetch_bucket_size": 0, "reduce_bucket_size": 10**6, **zero}
    }
    return Job(adapted, zero_topo, 3, micro_batches=2, dtype=dtype, ds=ds)


@pytest.mark.core
def test_exact_weights_are_saved_and_loaded(rank: int, shared_path: Path) -> None:
    """Whatever is gathered: exports have the bits that the model began with, and a load brings
    codes of them back.
    """
    run = job(CODES, stage3_gather_16bit_weights_on_model_save=True)
    with running(run) as engine:
        began = weights(engine)
        advance(run, engine, 0, 1)
        engine.save_checkpoint(str(shared_path))
        assert engine.save_16bit_model(str(shared_path), "model.bin")
        saved, losses = weights(engine), advance(run, engine, 1, 3)
        stored = frozen_codes(engine)
    dist.barrier()
    (fragments,) = (
        torch.load(f, weights_only=False)
        for f in shared_path.glob(f"*/*rank_{rank}_*model_states.pt")
    )
    for fragment in fragments["frozen_param_fragments"].values():
        assert fragment.untyped_storage().nbytes() == fragment.nbytes
    frozen = {
        name: whole for name, whole in began.items() if "down" not in name and "up" not in name
    }
    for export in (
        get_fp32_state_dict_from_zero_checkpoint(str(shared_path)),
        torch.load(shared_path / "model.bin"),
        saved,
    ):
        assert_same_bits({name: export[name].float() for name in frozen}, frozen)
    for options in ({}, {"load_module_only": True}):
        with running(replace(run, model=spoilt)) as engine:
            engine.load_checkpoint(str(shared_path), **options)
            for mine, theirs in zip(frozen_codes(engine), stored, strict=True):
                assert torch.equal(mine, theirs)
            if not options:
                assert advance(run, engine, 1, 3) == losses


def frozen_codes(engine: Any) -> list[Tensor]:
    """What a rank stores of each frozen parameter, copied."""
    forward = engine.optimizer.topo.sets[1].forward
    return [form.data.clone() for form in forward.forms]


def spoilt() -> nn.Module:
    """Other weights."""
    model = adapted()
    for param in model.parameters():
        param.data += 1
    return model


@pytest.mark.core
def test_an_edit_reaches_all_gathers() -> None:
    """One rank edits a frozen weight under ``GatheredParameters``: all gather the new one, as if it
    had begun so.
    """

    def begun() -> nn.Module:
        model = adapted()
        model.blocks[1][1].base.weight.data *= 2  # type: ignore[index]
        return model

    run = job(CODES)
    with running(replace(run, model=begun)) as engine:
        expected = advance(run, engine, 0, 3)
    with running(run) as engine:
        weight = engine.module.blocks[1][1].base.weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=1):
            weight.data.mul_(2.0 if dist.get_rank() == 1 else -7.0)
        assert advance(run, engine, 0, 3) == expected


def thaw(engine: Any, step: int) -> None:
    """As PEFT does where an adapter was frozen by hand: from the second step on, gradients of it
    are computed.
    """
    frozen = [param for name, param in engine.module.named_parameters() if "blocks.0" in name]
    with torch.no_grad():
        mse(engine, *batch(step, 0, torch.float32))
    for param in frozen[::2]:
        param.requires_grad_(step > 0)


def test_unfrozen_parameters_are_not_trained(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    """Stock computes their gradients and trains the others: losses and weights are its own, and one
    line says so.
    """
    found = []
    for zero_topo in (CODES, block("topo"), None):
        run = replace(job(zero_topo, "fp32"), model=two_adapters, steps=4, each_step=thaw)
        with running(run) as engine:
            began = weights(engine)
            found.append((advance(run, engine, 0, run.steps), weights(engine)))
        trained = {
            name for name, whole in found[-1][1].items() if not torch.equal(whole, began[name])
        }
        assert trained == {"blocks.1.1.down.weight", "blocks.1.1.up.weight"}
    (_, _), (mine, my_weights), (stock, its_weights) = found
    assert mine == pytest.approx(stock, rel=0, abs=1e-6)
    torch.testing.assert_close(my_weights, its_weights, rtol=0, atol=1e-6)
    said = [line for line in caplog.messages if "no optimizer has them" in line]
    assert len(said) == (2 if rank == 0 else 0)
    assert all("such as blocks.0." in line and "\n" not in line for line in said)


def two_adapters() -> nn.Module:
    """The first block's adapter is frozen, the second one's is trained."""
    net = adapted()
    net.blocks[0].requires_grad_(False)
    return net
