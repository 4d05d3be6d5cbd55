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
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from tests.launcher.checkpoints import loaded, to_universal
from tests.launcher.training import AGED, Job, advance, block, running, weights
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
TREES = {"2x1x1": (2, 1, 1), "2x2x2": (2, 2, 2), "1x2x2": (1, 2, 2), "2x1x2": (2, 1, 2)}


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
    nodes, gpus, dies = TREES[tree]
    return block(
        scheme,
        topology={"emulated": {"nodes": nodes, "gpus_per_node": gpus, "gcds_per_gpu": dies}},
        **more,
    )


def job(zero_topo: dict[str, Any] | None, ds: dict[str, Any]) -> Job:
    """The run, if sync is sparse with AgedAdamW; ranks' numbers differ only in how many
    micro-batches each takes.
    """
    optimizer = AGED if "sync" in (zero_topo or {}) else {}
    ds = {**ds, **optimizer}
    return Job(
        zero_topo=zero_topo,
        micro_batches=MICRO_BATCHES // dist.get_world_size(),
        ds=ds,
        batch=batch,
    )


def resumed(
    directory: Path,
    zero_topo: dict[str, Any] | None,
    ds: dict[str, Any] = UNIVERSAL,
    then: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Take a checkpoint up from other random weights, train this number of ranks' steps, and
    perhaps save it.
    """
    run, saved = job(zero_topo, ds), torch.load(directory / "weights.pt")
    with loaded(run, directory, **options) as engine:
        different = {
            name: float((saved[name] - tensor).abs().max())
            for name, tensor in weights(engine).items()
        }
        return {"different": different, "losses": advanced(run, engine, STEPS[sys.argv[1]], then)}


def advanced(
    run: Job, engine: Any, steps: tuple[int, int], then: Path | None, residuals: bool = False
) -> list[float]:
    """Losses of these steps, after which the engine may be saved and converted."""
    losses = advance(run, engine, *steps)
    if then:
        convert(then, engine, residuals)
    return losses


def trained(
    run: Job, steps: tuple[int, int], then: Path | None = None, residuals: bool = False
) -> dict[str, Any]:
    """The same of a new engine."""
    with running(run) as engine:
        return {"losses": advanced(run, engine, steps, then, residuals)}


def refused(directory: Path) -> dict[str, Any]:
    """The checkpoint of other ranks as it is: each rank's error, and whether weights stayed."""
    with running(job(on("2x2x2", "topo"), SMALL_SUB_GROUPS)) as engine:
        before = weights(engine)
        try:
            engine.load_checkpoint(str(directory), tag="half-way")
            said = ""
        except ValueError as error:
            said = str(error)
        lines = [None] * dist.get_world_size()
        dist.all_gather_object(lines, said)
        after = weights(engine)
    return {"lines": lines, "kept": all(torch.equal(before[name], after[name]) for name in after)}


def begun(directory: Path, **more: Any) -> dict[str, Any]:
    """Train on two ranks under ``topo``, save and convert."""
    return trained(
        job(on("2x1x1", "topo", **more), SMALL_SUB_GROUPS), STEPS["two"], directory, "sync" in more
    )


def convert(directory: Path, engine: Any, residuals: bool = False) -> None:
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
    unbroken = trained(job(None, SMALL_SUB_GROUPS), (0, STEPS["four"][1]))
    results = {"unbroken": unbroken, "topo": begun(directory / "two/dense")}
    begun(directory / "two/sparse", sync=SPARSE)
    # on the same ranks, from the ordinary checkpoint: each rank gets its own residual back
    run = job(on("2x1x1", "topo", sync=ALL_OF_IT), SMALL_SUB_GROUPS)
    with loaded(run, directory / "two/sparse", tag="half-way") as engine:
        results["sends all"] = {"losses": advance(run, engine, *STEPS["eight"])}
    return results


def eight(directory: Path) -> dict[str, Any]:
    """What two ranks left, under several schemes on three levels; two of them go on to four
    ranks.
    """
    source, sparse = directory / "two/dense", directory / "two/sparse"
    results = {"topo": resumed(source, on("2x2x2", "topo"), then=directory / "eight/dense")}
    results["refused"] = refused(source)
    results["sends all"] = resumed(sparse, on("2x2x2", "topo", sync=ALL_OF_IT))
    return results


def four(directory: Path) -> dict[str, Any]:
    """What eight ranks left; the last two without optimizer states."""
    source = directory / "eight/dense"
    stock: dict[str, Any] = {"checkpoint": {"load_universal": True}}
    weights_only: dict[str, Any] = {"load_optimizer_states": False}
    return {
        "topo": resumed(source, on("1x2x2", "topo")),
        "hsdp": resumed(source, on("2x1x2", "hsdp")),
        "stock": resumed(source, None, stock),
        "hsdp_weights_only": resumed(source, on("2x1x2", "hsdp"), stock, **weights_only),
        "stock_weights_only": resumed(source, None, stock, **weights_only),
    }


if __name__ == "__main__":
    gc.freeze()  # torch's modules: engines collect garbage often
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    verbs: dict[str, Callable[[Path], dict[str, Any]]] = {"two": two, "eight": eight, "four": four}
    found = verbs[sys.argv[1]](Path(sys.argv[2]))
    if dist.get_rank() == 0:
        Path(sys.argv[2], f"{sys.argv[1]}.json").write_text(json.dumps(found))
    leave()
