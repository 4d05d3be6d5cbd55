# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints are stock ZeRO-3's: same files, loadable by it and from it; a resumed run repeats the
unbroken one.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

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
from zero_topo.quant.operands import DTYPES

CLOSE = {"fp32": 1e-6, "bf16": 3e-3}

OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
OKTOPK = {"mode": "oktopk", "tau_prime": 4, "sharded": True, "density": 0.1}
SCAPE = {"mode": "scape", "density": 0.1, "warmup": 5}
QUANTIZED = block("topo", quantize={}, sync={"mode": "quantized"})
CODES = job(block("topo", quantize={"resident": "int8"}), "bf16")
RESUMED: dict[str, Job] = {
    "codes": replace(CODES, model=partial(net, 64), steps=6),
    "topo_offload": job(block("topo", quantize={}), "bf16", **OFFLOAD),
    "zero++": job(block("zero++", quantize={}), pipeline_loading_checkpoint=True),
    "quantized": job(QUANTIZED, "bf16"),
    "scape": replace(job(block("topo", optimizer="node", sync=SCAPE), "bf16", **OFFLOAD), steps=5),
    "aged": replace(job(block("topo", sync=OKTOPK), "bf16", **OFFLOAD), steps=6),
}
"""DeepSpeed's masters and ours, next to the weights and offloaded; a captured secondary, what sync
has not sent in the middle of its interval; files in either precision. That each mode and plan
resumes is a property of the phases (`tests/ranks/test_phases.py`).
"""
RESUMED["scape"].ds.update(ADAMS)
RESUMED["aged"].ds.update(AGED)


@pytest.fixture(scope="module")
def saved_by_stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """A run of stock ZeRO-3 in a dtype, with its checkpoint; made when first asked for, the same on
    every rank.
    """

    @cache
    def saved(dtype: str) -> Saved:
        path = common_directory(tmp_path_factory.mktemp(f"stock_{dtype}"))
        return save(job(None, dtype), path)

    return saved


@pytest.mark.parametrize(
    ("zero_topo", "dtype", "close"),
    [
        core(block("zero++"), "fp32", 1e-6),
        (block("topo"), "bf16", 3e-3),
        (block("hsdp"), "fp32", 1e-6),
        (QUANTIZED, "bf16", 0.02),
    ],
    ids=["zero++", "topo", "hsdp", "quantized"],
)
def test_checkpoints_are_exchanged_with_stock_zero3(
    zero_topo: dict[str, Any],
    dtype: str,
    close: float,
    shared_path: Path,
    saved_by_stock: Callable[[str], Saved],
) -> None:
    """Each loads the very weights that the other saved, and trains on as the other did; what sync
    has not sent is ours alone.
    """
    ours = save(job(zero_topo, dtype), shared_path)
    for saved, other in ((ours, None), (saved_by_stock(dtype), zero_topo)):
        with loaded(job(other, dtype), saved.path) as engine:
            assert_same_bits(weights(engine), saved.weights)
            losses = advance(saved.job, engine, SAVED_AT, saved.job.steps)
        assert largest_difference(losses, saved.losses) <= close


@pytest.mark.parametrize("name", cores(("codes",), RESUMED))
def test_a_resumed_run_repeats_the_unbroken_one(
    name: str, rank: int, shared_path: Path, saved_by_stock: Callable[[str], Saved]
) -> None:
    """Bit for bit, quantized or not, from files whose every tensor has the type, shape and size
    that stock's has.

    The engine has trained: its secondary copies and optimizer states go, as do gradients on which
    it has not stepped.
    """
    saved = save(RESUMED[name], shared_path)
    with running(saved.job) as engine:
        advance(saved.job, engine, 10, 12)
        engine.backward(mse(engine, *batch(12, 0, DTYPES[saved.job.dtype])))
        engine.load_checkpoint(str(shared_path))
        assert_same_bits(weights(engine), saved.weights)
        residual = engine.optimizer.topo.gradients.state_dict().get("residual")
        assert residual is None or residual.any()
        assert advance(saved.job, engine, SAVED_AT, saved.job.steps) == saved.losses
    if residual is None and "offload" not in name and saved.job.model is net:
        assert files_of(shared_path, rank) == files_of(saved_by_stock(saved.job.dtype).path, rank)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"load_optimizer_states": False}, "fp32"),
        ({"load_module_only": True}, "bf16"),
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


@pytest.mark.core
def test_weights_alone_are_those_of_the_named_tag(shared_path: Path) -> None:
    """On every rank, and not of the latest, as in stock."""
    run = job(block("hsdp"), "bf16")
    with running(run) as engine:
        advance(run, engine, 0, SAVED_AT)
        engine.save_checkpoint(str(shared_path), tag="first")
        first = weights(engine)
        advance(run, engine, SAVED_AT, STEPS)
        engine.save_checkpoint(str(shared_path), tag="second")
        second = weights(engine)
    for tag, expected in (("first", first), (None, second)):
        with loaded(run, shared_path, load_optimizer_states=False, tag=tag) as engine:
            assert_same_bits(weights(engine), expected)


@pytest.mark.parametrize("dtype", [core("bf16"), "fp32"])
def test_exports_hold_the_weights_and_masters(dtype: str, shared_path: Path) -> None:
    """`zero_to_fp32` gives the masters, `save_16bit_model` the gathered weights, both bit for
    bit.
    """
    run = job(QUANTIZED, dtype, stage3_gather_16bit_weights_on_model_save=True)
    with running(run) as engine:
        advance(run, engine, 0, SAVED_AT)
        engine.save_checkpoint(str(shared_path))
        assert engine.save_16bit_model(str(shared_path))
        gathered = weights(engine)
        masters = dict(gathered)  # of a frozen parameter, which has none, the weight itself
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                masters[name] = safe_get_full_fp32_param(param).clone()
        assert {n: p.shape for n, p in masters.items()} == {n: p.shape for n, p in gathered.items()}
    converted = get_fp32_state_dict_from_zero_checkpoint(str(shared_path))
    assert_same_bits(converted, masters)
    half = torch.load(shared_path / "pytorch_model.bin")
    assert {tensor.dtype for tensor in half.values()} == {DTYPES[dtype]}
    assert_same_bits(half, gathered)


FULL_AT = 1000  # bytes of a file
UNLUCKY = 1


@contextmanager
def full_disk(rank: int) -> Iterator[None]:
    """Files of one rank end after some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == UNLUCKY:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def whole(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, when all ranks have come here. Collective."""
    dist.barrier()
    files = [path for path in folder.rglob("*") if path.is_file()]
    found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    dist.barrier()
    return found


def test_a_full_disk_costs_one_checkpoint(rank: int, shared_path: Path) -> None:
    """Every rank reads whose file and what to do; the same tag's older files stay; training goes on
    bit for bit.
    """
    run = job(block("topo", quantize={}), "bf16")
    with running(run) as engine:
        undisturbed = advance(run, engine, 0, run.steps)
    with running(run) as engine:
        losses = advance(run, engine, 0, 2)
        engine.save_checkpoint(str(shared_path), tag="good")
        before = whole(shared_path)
        assert before["latest"] == b"good"
        for tag in ("good", "bad"):
            said = rf"rank {UNLUCKY} of host .*/{tag}/.*_{UNLUCKY}_.*delete older"
            with full_disk(rank), pytest.raises(OSError, match=said):
                engine.save_checkpoint(str(shared_path), tag=tag)
            assert whole(shared_path) == before and not (shared_path / "bad").exists()
        assert losses + advance(run, engine, 2, run.steps) == undisturbed
