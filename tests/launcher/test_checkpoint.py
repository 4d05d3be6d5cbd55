# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints are stock ZeRO-3's: same files, loadable by it and from it; a resumed run repeats the
unbroken one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

from tests.launcher.checkpoints import (
    SAVED_AT,
    STEPS,
    Saved,
    assert_same_bits,
    common_directory,
    files_of,
    job,
    loaded,
    net,
    resume,
    save,
)
from tests.launcher.training import (
    ADAMS,
    AGED,
    Job,
    advance,
    batch,
    block,
    largest_difference,
    mse,
    running,
    weights,
)
from tests.marks import core, cores

CLOSE = {"fp32": 1e-6, "bf16": 3e-3}

OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
Q4: dict[str, Any] = {
    "quantize": {},
    "sync": {"mode": "quantized"},
}
OKTOPK = {"mode": "oktopk", "tau_prime": 4, "sharded": True, "density": 0.1}
RADIUS = {"mode": "radius", "density": 0.25, "interval": 4}
SCAPE = {"mode": "scape", "density": 0.1, "warmup": 5}
CODES: dict[str, Any] = {"quantize": {"resident": "int8"}}
WIDE = replace(job(block("topo", **CODES), "bf16"), model=partial(net, 64), steps=6)
RESUMED: dict[str, Job] = {
    "codes": WIDE,
    "codes_whole": WIDE.under(
        block("topo", weights="rank", secondary=None, optimizer="node", **CODES)
    ),
    "topo_offload": job(block("topo", quantize={}), "bf16", **OFFLOAD),
    "zero++": job(block("zero++", quantize={}), pipeline_loading_checkpoint=True),
    "hsdp_bf16": job(block("hsdp"), "bf16"),
    "hsdp_offload": job(block("hsdp"), **OFFLOAD),
    "quantized": job(block("topo", **Q4), "bf16"),
    "quantized_replicated": job(block("topo", optimizer="node", **Q4)),
    "oktopk": job(block("topo", sync=OKTOPK), "bf16"),
    "radius": replace(job(block("topo", optimizer="node", sync=RADIUS), "bf16"), steps=6),
    "scape": replace(job(block("topo", optimizer="node", sync=SCAPE), "bf16", **OFFLOAD), steps=5),
    "aged": replace(job(block("topo", sync=OKTOPK), "bf16", **OFFLOAD), steps=6),
    "aged_replicated": replace(
        job(block("topo", optimizer="node", sync={"mode": "oktopk", "density": 0.1})), steps=6
    ),
}
"""DeepSpeed's masters and ours, next to the weights and offloaded; a captured secondary, published
differences, what each kind of sync has not sent in the middle of its interval; files in either
precision.
"""
RESUMED["scape"].ds.update(ADAMS)
for name in ("aged", "aged_replicated"):
    RESUMED[name].ds.update(AGED)


@pytest.fixture(scope="module")
def saved_by_stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Saved]]:
    """A run of stock ZeRO-3 in a dtype, with its checkpoint; made when first asked for, the same on
    every rank.
    """
    made: dict[str, Saved] = {}

    def get(dtype: str) -> Saved:
        if dtype not in made:
            path = common_directory(tmp_path_factory.mktemp(f"stock_{dtype}"))
            made[dtype] = save(job(None, dtype), path)
        return made[dtype]

    yield get
    made.clear()


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [core("topo", "bf16"), ("topo", "fp32"), ("hsdp", "bf16"), ("hsdp", "fp32")],
)
def test_stock_zero3_goes_on_from_our_checkpoint(
    scheme: str, dtype: str, shared_path: Path, saved_by_stock: Callable[[str], Saved]
) -> None:
    """Stock loads the very weights we saved, and trains on as our run did."""
    saved = save(job(block(scheme), dtype), shared_path)
    with loaded(job(None, dtype), shared_path) as engine:
        assert_same_bits(weights(engine), saved.weights)
        losses = advance(saved.job, engine, SAVED_AT, saved.job.steps)
    assert largest_difference(losses, saved.losses) <= CLOSE[dtype]


@pytest.mark.parametrize("name", cores(("codes", "zero++", "aged"), RESUMED))
def test_a_resumed_run_repeats_the_unbroken_one(
    name: str, rank: int, shared_path: Path, saved_by_stock: Callable[[str], Saved]
) -> None:
    """Bit for bit, quantized or not, from files whose every tensor has the type, shape and size
    that stock's has.
    """
    saved = save(RESUMED[name], shared_path)
    with loaded(saved.job, shared_path) as engine:
        assert_same_bits(weights(engine), saved.weights)
        residual = engine.optimizer.topo.gradients.state_dict().get("residual")
        assert residual is None or residual.any()
        assert advance(saved.job, engine, SAVED_AT, saved.job.steps) == saved.losses
    if residual is None and "offload" not in name and saved.job.model is net:
        assert files_of(shared_path, rank) == files_of(saved_by_stock(saved.job.dtype).path, rank)


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [core("zero++", "fp32"), ("topo", "bf16"), ("hsdp", "fp32"), ("hsdp", "bf16")],
)
def test_a_stock_checkpoint_goes_on_under_a_block(
    scheme: str, dtype: str, saved_by_stock: Callable[[str], Saved]
) -> None:
    """A run begun with stock ZeRO-3 goes on as stock's own does."""
    saved = saved_by_stock(dtype)
    with loaded(job(block(scheme), dtype), saved.path) as engine:
        assert_same_bits(weights(engine), saved.weights)
        losses = advance(saved.job, engine, SAVED_AT, saved.job.steps)
    assert largest_difference(losses, saved.losses) <= CLOSE[dtype]


@pytest.mark.parametrize("scheme", [core("topo"), "zero++"])
def test_a_load_replaces_all_an_engine_holds(scheme: str, shared_path: Path) -> None:
    """Secondary copies and optimizer states of an engine that has trained, gradients it has not
    stepped on: all go.
    """
    saved = save(job(block(scheme, quantize={})), shared_path)
    with running(saved.job) as engine:
        advance(saved.job, engine, 10, 12)
        engine.backward(mse(engine, *batch(12, 0, torch.float32)))
        engine.load_checkpoint(str(shared_path))
        assert advance(saved.job, engine, SAVED_AT, saved.job.steps) == saved.losses


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"load_optimizer_states": False}, "fp32"),
        ({"load_optimizer_states": False}, "bf16"),
        ({"load_module_only": True, "load_optimizer_states": False}, "fp32"),
        core({"load_module_only": True}, "bf16"),
    ],
    ids=str,
)
def test_a_partial_load_does_what_stock_does(
    options: dict[str, bool], dtype: str, saved_by_stock: Callable[[str], Saved]
) -> None:
    """Weights without optimizer states: masters are refilled from the weights, on every rank that
    holds a copy.

    With ``load_module_only`` stock has to be asked, else it loads none.
    """
    saved = saved_by_stock(dtype)
    theirs = resume(job(None, dtype), saved.path, **{**options, "load_optimizer_states": False})
    for scheme in ("topo", "hsdp"):
        mine = resume(job(block(scheme), dtype), saved.path, **options)
        assert largest_difference(mine, theirs) <= CLOSE[dtype], scheme


@pytest.mark.parametrize(
    "options", [core({"load_optimizer_states": False}), {"load_module_only": True}], ids=str
)
def test_weights_alone_are_those_of_the_named_tag(
    options: dict[str, bool], shared_path: Path
) -> None:
    """On every rank, and not of the latest, as in stock."""
    run = job(block("hsdp"), "bf16")
    with running(run) as engine:
        advance(run, engine, 0, SAVED_AT)
        engine.save_checkpoint(str(shared_path), tag="first")
        first = weights(engine)
        advance(run, engine, SAVED_AT, STEPS)
        engine.save_checkpoint(str(shared_path), tag="second")
        second = weights(engine)
    for tag, expected in (dict[str, Any](tag="first"), first), (dict[str, Any](), second):
        with loaded(run, shared_path, **options, **tag) as engine:
            assert_same_bits(weights(engine), expected)


@pytest.mark.parametrize(
    ("scheme", "dtype"), [core("topo", "bf16"), ("topo", "fp32"), ("hsdp", "bf16")]
)
def test_exports_hold_the_weights_and_masters(scheme: str, dtype: str, shared_path: Path) -> None:
    """`zero_to_fp32` gives the masters, `save_16bit_model` the gathered weights, both bit for
    bit.
    """
    run = job(block(scheme, quantize={}), dtype, stage3_gather_16bit_weights_on_model_save=True)
    with running(run) as engine:
        advance(run, engine, 0, SAVED_AT)
        engine.save_checkpoint(str(shared_path))
        assert engine.save_16bit_model(str(shared_path))
        gathered, masters = weights(engine), full_masters(engine)
        assert {n: p.shape for n, p in masters.items()} == {n: p.shape for n, p in gathered.items()}
    converted = get_fp32_state_dict_from_zero_checkpoint(str(shared_path))
    assert_same_bits(converted, masters)
    half = torch.load(shared_path / "pytorch_model.bin")
    assert {tensor.dtype for tensor in half.values()} == {
        torch.float32 if dtype == "fp32" else torch.bfloat16
    }
    assert_same_bits(half, gathered)


def full_masters(engine: Any) -> dict[str, Tensor]:
    """Whole FP32 masters by name; of a frozen parameter, which has none, the weight itself."""
    whole = weights(engine)
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    return {**whole, **{name: safe_get_full_fp32_param(p).clone() for name, p in trained.items()}}
