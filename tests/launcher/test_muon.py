# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Muon on nested shards: the losses and weights of DeepSpeed's own, under stock ZeRO-3 and on one
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_topo
from tests.launcher import checkpoints
from tests.launcher.features import STEPS, small, zero
from tests.launcher.models import Tied, partly_frozen
from tests.launcher.training import (
    EMULATED,
    Job,
    Result,
    advance,
    assert_equal,
    block,
    run,
    running,
)
from tests.marks import core
from zero_topo.cost import memory_bytes, step_bytes

PARAMS = {
    "lr": 2e-2,
    "momentum": 0.9,
    "weight_decay": 0.1,
    "adam_lr": 1e-2,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
}


def muon(torch_adam: bool = True, **keys: Any) -> dict[str, Any]:
    """The DeepSpeed keys of a Muon training, as stock ZeRO-3 wants them.

    The other parameters are updated by torch's Adam or by DeepSpeed's, which a fresh checkout
    compiles for a minute.
    """
    optimizer = {"type": "Muon", "params": {**PARAMS, "torch_adam": torch_adam}}
    return {"optimizer": optimizer, **zero(reduce_scatter=False, **keys)}


JOBS: dict[str, Callable[[], Job]] = {
    "sub-groups": lambda: small(ds=muon(sub_group_size=200), micro_batches=3),
    "tied": lambda: Job(model=Tied, steps=STEPS, ds=muon()),
    "frozen": lambda: Job(model=partly_frozen, steps=STEPS, ds=muon()),
    "partitioned as built": lambda: small(ds=muon(), zero_init=True),
    "on the host": lambda: small(ds=muon(offload_optimizer={"device": "cpu"})),
    "DeepSpeed's Adam on the host": lambda: small(
        ds=muon(torch_adam=False, offload_optimizer={"device": "cpu"})
    ),
}


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """DeepSpeed compiles Muon's functions, which takes minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


@cache
def stock(name: str) -> Result:
    """Trained once by unmodified ZeRO-3."""
    return run(JOBS[name]())


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        core("topo", "on the host"),
        *(("topo", name) for name in JOBS if name != "on the host"),
        *(("hsdp", "sub-groups"), ("zero3", "sub-groups"), ("hsdp", "tied")),
    ],
)
def test_losses_and_weights_are_stocks(scheme: str, name: str) -> None:
    """Wherever the optimizer is sharded; clipping is of the updates' norm, as stock's is."""
    assert_equal(run(JOBS[name]().under(block(scheme))), stock(name))


@pytest.mark.parametrize(
    ("saving", "loading"),
    [("", "topo"), ("hsdp", "topo"), ("topo", "hsdp")],
)
def test_a_checkpoint_keeps_the_momentum(saving: str, loading: str, shared_path: Path) -> None:
    """Of the same scheme, of another, or of stock ZeRO-3: training goes on as if it had not
    stopped.
    """
    job = replace(checkpoints.job(None), ds=muon(), groups=None)
    saved = checkpoints.save(job.under(block(saving) if saving else None), shared_path)
    with checkpoints.loaded(job.under(block(loading)), shared_path) as engine:
        losses = advance(job, engine, checkpoints.SAVED_AT, job.steps)
    torch.testing.assert_close(losses, saved.losses, rtol=1e-5, atol=1e-5)


def test_quantized_weights_and_gradients() -> None:
    """INT8 weights, INT4 gradients in the node and between nodes, BF16: all copies stay alike, the
    loss is near.
    """
    quantized = {
        "topology": EMULATED,
        "scheme": "topo",
        "sync": {"mode": "quantized"},
        "debug_checks": True,
    }
    job = small(ds=muon(), dtype="bf16")
    exact, found = run(job), run(job.under(quantized))
    torch.testing.assert_close(found.losses, exact.losses, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("scheme", ["topo", "hsdp"])
def test_bytes_and_memory_are_the_formulas(scheme: str) -> None:
    """On the mean of the ranks; with the optimizer sharded over a node, no matrix crosses nodes."""
    with running(small(ds=muon()).under(block(scheme))) as engine:
        advance(small(ds=muon()), engine, 0, 2)
        stats = zero_topo.stats(engine)
        formula = {
            key: n
            for key, n in step_bytes(stats.config, stats.work).items()
            if key[0] == "matrices"
        }
        sent = {key: n for key, n in stats.step_bytes.items() if key[0] == "matrices"}
        assert sent.keys() == formula.keys() and len(sent) == 1
        assert (("matrices", "world") in sent) == (scheme == "topo")
        total = torch.tensor([*sent.values()])
        dist.all_reduce(total)
        assert int(total) == dist.get_world_size() * sum(formula.values())
        sizes = stats.accumulation_itemsize, stats.optimizer_itemsize
        assert (
            stats.memory["optimizer"] == memory_bytes(stats.config, stats.work, *sizes)["optimizer"]
        )
