# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One run on two, then eight, then four ranks: saved as a universal checkpoint by each, taken up by
the next.

Usage: universal.py two | eight | four DIRECTORY. Rank 0 writes DIRECTORY/<verb>.json: name of the
run -> losses of its steps, and how far its weights right after the load are from those saved.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.launcher.checkpoints import to_universal
from tests.launcher.training import AGED, Job, advance, block, running, start, weights
from zero_topo.cli.residuals import carry
from zero_topo.leaving import leave
from zero_topo.quant import spec

spec.BLOCK = 64  # layers are small
STEPS = {"two": (0, 2), "eight": (2, 4), "four": (4, 6)}
"""The steps that each number of ranks takes."""
MICRO_BATCHES = 8
SPARSE = {"mode": "oktopk", "density": 0.05}
ALL_OF_IT = {"mode": "oktopk", "density": 1.0}
"""Sends all residuals in the first step; the losses show whether they and the ages of all sums were
restored.
"""
SMALL_SUB_GROUPS = {"zero_optimization": {"sub_group_size": 250}}
UNIVERSAL = {**SMALL_SUB_GROUPS, "checkpoint": {"load_universal": True}}


def batch(step: int, micro: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one of the step's eight micro-batches, the same eight on any number of
    ranks.
    """
    index = micro * dist.get_world_size() + dist.get_rank()
    generator = torch.Generator().manual_seed(10007 * step + index)
    x = torch.randn(4, 11, generator=generator)
    return x.to(dtype), torch.sin(2 * x[:, :5]).to(dtype)


def on(tree: str, scheme: str, **more: Any) -> dict[str, Any]:
    """An unquantized block on one of the machines."""
    names = ("nodes", "gpus_per_node", "gcds_per_gpu")
    emulated = dict(zip(names, map(int, tree.split("x")), strict=True))
    return block(scheme, topology={"emulated": emulated}, **more)


def job(zero_topo: dict[str, Any] | None, ds: dict[str, Any]) -> Job:
    """The run, if sync is sparse with AgedAdamW; ranks' numbers differ only in how many
    micro-batches each takes.
    """
    if "sync" in (zero_topo or {}):
        ds = {**ds, **AGED}
    micro_batches = MICRO_BATCHES // dist.get_world_size()
    return Job(zero_topo=zero_topo, micro_batches=micro_batches, ds=ds, batch=batch)


def run(
    zero_topo: dict[str, Any] | None,
    ds: dict[str, Any] = UNIVERSAL,
    source: Path | None = None,
    then: Path | None = None,
    steps: tuple[int, int] = (0, 0),
    **options: Any,
) -> dict[str, Any]:
    """Train this number of ranks' steps.

    Args:
        zero_topo: the block.
        ds: keys of the DeepSpeed config.
        source: the checkpoint from which to go on, in an engine of other random weights.
        then: where to save and convert the run.
        steps: others than those of this number of ranks.
        options: of the load.

    Returns:
        Losses, and how far weights right after the load are from those saved.
    """
    train = job(zero_topo, ds)
    different = {}
    with running(train, partial(start, seed=99 if source else 0)) as engine:
        if source:
            engine.load_checkpoint(str(source), **options)
            saved = torch.load(source / "weights.pt")
            for name, whole in weights(engine).items():
                different[name] = float((saved[name] - whole).abs().max())
        losses = advance(train, engine, *(steps if any(steps) else STEPS[sys.argv[1]]))
        if then:
            convert(then, engine, "sync" in (zero_topo or {}))
    return {"different": different, "losses": losses}


def refused(directory: Path) -> dict[str, Any]:
    """The checkpoint of other ranks as it is: each rank's error, and whether weights stayed."""
    with running(job(on("2x2x2", "topo"), SMALL_SUB_GROUPS)) as engine:
        before = weights(engine)
        with pytest.raises(ValueError, match="") as error:
            engine.load_checkpoint(str(directory), tag="half-way")
        lines = [None] * dist.get_world_size()
        dist.all_gather_object(lines, str(error.value))
        after = weights(engine)
    return {"lines": lines, "kept": all(torch.equal(before[name], after[name]) for name in after)}


def convert(directory: Path, engine: Any, residuals: bool) -> None:
    """Save, have DeepSpeed make a universal checkpoint of it, and add the residuals of sync if
    there are any.
    """
    engine.save_checkpoint(str(directory), tag="half-way")
    whole = weights(engine)
    if dist.get_rank() == 0:
        torch.save(whole, directory / "weights.pt")
        saved, universal = directory / "half-way", directory / "universal"
        to_universal(saved, universal)
        if residuals:
            carry(saved, universal)
    dist.barrier()


def two(directory: Path) -> dict[str, Any]:
    """The run that is to be equalled, the one to be taken up, and one whose sync stores
    residuals.
    """
    dense, sparse = directory / "two/dense", directory / "two/sparse"
    run(on("2x1x1", "topo"), SMALL_SUB_GROUPS, then=dense)
    run(on("2x1x1", "topo", sync=SPARSE), SMALL_SUB_GROUPS, then=sparse)
    all_of_it = on("2x1x1", "topo", sync=ALL_OF_IT)
    return {
        "unbroken": run(None, SMALL_SUB_GROUPS, steps=(0, STEPS["four"][1])),
        # on the same ranks, from the ordinary checkpoint: each rank gets its own residual back
        "sends all": run(all_of_it, SMALL_SUB_GROUPS, sparse, steps=STEPS["eight"], tag="half-way"),
    }


def eight(directory: Path) -> dict[str, Any]:
    """What two ranks left, on three levels; one run goes on to four ranks."""
    dense, sparse = directory / "two/dense", directory / "two/sparse"
    return {
        "topo": run(on("2x2x2", "topo"), source=dense, then=directory / "eight/dense"),
        "refused": refused(dense),
        "sends all": run(on("2x2x2", "topo", sync=ALL_OF_IT), source=sparse),
    }


def four(directory: Path) -> dict[str, Any]:
    """What eight ranks left; the last two without optimizer states."""
    source = directory / "eight/dense"
    hsdp = on("2x1x2", "hsdp")
    stock: dict[str, Any] = {"checkpoint": {"load_universal": True}}
    return {
        "hsdp": run(hsdp, source=source),
        "stock": run(None, stock, source),
        "hsdp_weights_only": run(hsdp, stock, source, load_optimizer_states=False),
        "stock_weights_only": run(None, stock, source, load_optimizer_states=False),
    }


if __name__ == "__main__":
    gc.freeze()  # torch's modules: engines collect garbage often
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    verbs: dict[str, Callable[[Path], dict[str, Any]]] = {"two": two, "eight": eight, "four": four}
    found = verbs[sys.argv[1]](Path(sys.argv[2]))
    if dist.get_rank() == 0:
        Path(sys.argv[2], f"{sys.argv[1]}.json").write_text(json.dumps(found))
    leave()
