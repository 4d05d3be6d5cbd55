# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Save a run as a universal checkpoint, or take one up under several plans on however many ranks there are.

Usage: universal.py save DIRECTORY | universal.py load DIRECTORY. Rank 0 writes DIRECTORY/<verb>.json: name of the run
-> losses of the steps after the save, and how far its weights right after the load are from those saved.
"""

from __future__ import annotations

import gc
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from torch import Tensor

from tests.launcher.training import Job, advance, block, close, start, weights
from zero_topo.engine.residual_transfer import carry
from zero_topo.examples.process import leave

SAVED_AT, STEPS = 2, 4
MICRO_BATCHES = 8
SPARSE = {"mode": "topk_a", "density": 0.05}
SMALL_SUB_GROUPS = {"zero_optimization": {"sub_group_size": 250}}
TREES = {"2x2x2": (2, 2, 2), "1x2x2": (1, 2, 2), "2x1x2": (2, 1, 2)}


def batch(step: int, micro: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one of the step's eight micro-batches, the same eight on any number of ranks."""
    index = micro * dist.get_world_size() + dist.get_rank()
    generator = torch.Generator().manual_seed(10007 * step + index)
    x = torch.randn(4, 11, generator=generator)
    return x.to(dtype), torch.sin(2 * x[:, :5]).to(dtype)


def on(tree: str, scheme: str, **more: Any) -> dict[str, Any]:
    """An unquantized block on one of the machines."""
    nodes, gpus, dies = TREES[tree]
    return block(scheme, topology={"emulated": {"nodes": nodes, "gpus_per_node": gpus, "gcds_per_gpu": dies}}, **more)


def job(zero_topo: dict[str, Any] | None, ds: dict[str, Any]) -> Job:
    """The run; what differs between ranks' numbers is only how many micro-batches each takes."""
    micro_batches = MICRO_BATCHES // dist.get_world_size()
    return Job(zero_topo=zero_topo, steps=STEPS, micro_batches=micro_batches, ds=ds, batch=batch)


def resumed(
    directory: Path, zero_topo: dict[str, Any] | None, ds: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Take the checkpoint up from other random weights, and train on."""
    run = job(zero_topo, {**(ds or {}), "checkpoint": {"load_universal": True}})
    engine = start(run, seed=99)
    engine.load_checkpoint(str(directory), **options)
    saved = torch.load(directory / "weights.pt")
    different = {name: float((saved[name] - tensor).abs().max()) for name, tensor in weights(engine).items()}
    losses = advance(run, engine, SAVED_AT, STEPS)
    close(engine)
    return {"losses": losses, "different": different}


def unbroken(directory: Path) -> dict[str, Any]:
    """Train under ``topo``, save and convert half-way, train on."""
    run = job(on("2x2x2", "topo"), SMALL_SUB_GROUPS)
    engine = start(run)
    advance(run, engine, 0, SAVED_AT)
    convert(directory, engine)
    losses = advance(run, engine, SAVED_AT, STEPS)
    close(engine)
    return {"losses": losses, "different": {}}


def convert(directory: Path, engine: Any) -> None:
    """Save, and have DeepSpeed make a universal checkpoint of it."""
    engine.save_checkpoint(str(directory), tag="half-way")
    whole = weights(engine)
    if dist.get_rank() == 0:
        torch.save(whole, directory / "weights.pt")
        folders = {"input_folder": f"{directory}/half-way", "output_folder": f"{directory}/universal"}
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        ds_to_universal.main(Namespace(**folders, **options, inject_missing_state=False))


def sparse(directory: Path) -> dict[str, Any]:
    """Train with a sparse sync, save, convert, and carry along what it owes."""
    run = job(on("2x2x2", "topo", sync=SPARSE), SMALL_SUB_GROUPS)
    engine = start(run)
    advance(run, engine, 0, SAVED_AT)
    convert(directory, engine)
    if dist.get_rank() == 0:
        carry(directory / "half-way", directory / "universal")
    total = owed(engine)
    close(engine)
    return {"owed": total}


def taken_over(directory: Path) -> dict[str, Any]:
    """What ranks on other nodes owe right after the load."""
    run = job(on("2x1x2", "topo", sync=SPARSE), {**SMALL_SUB_GROUPS, "checkpoint": {"load_universal": True}})
    engine = start(run, seed=99)
    engine.load_checkpoint(str(directory))
    total = owed(engine)
    close(engine)
    return {"owed": total}


def owed(engine: Any) -> float:
    """The sum over all ranks and elements."""
    total = engine.optimizer.topo.gradients.mode.residual.double().sum().view(1)
    dist.all_reduce(total)
    return float(total)


def save(directory: Path) -> dict[str, Any]:
    """The unbroken run, and others taken up from it on the same ranks."""
    (directory / "sparse").mkdir(exist_ok=True)
    results = {"unbroken": unbroken(directory), "sparse": sparse(directory / "sparse")}
    dist.barrier()
    results["stock"] = resumed(directory, None)
    for scheme in ("hsdp", "zero++", "topo"):
        results[scheme] = resumed(directory, on("2x2x2", scheme), SMALL_SUB_GROUPS)
    return results


def load(directory: Path) -> dict[str, Any]:
    """The run taken up on other ranks; the last two without optimizer states."""
    return {
        "topo": resumed(directory, on("1x2x2", "topo"), SMALL_SUB_GROUPS),
        "hsdp": resumed(directory, on("2x1x2", "hsdp"), SMALL_SUB_GROUPS),
        "stock": resumed(directory, None),
        "hsdp_weights_only": resumed(directory, on("2x1x2", "hsdp"), load_optimizer_states=False),
        "sparse": taken_over(directory / "sparse"),
        "stock_weights_only": resumed(directory, None, load_optimizer_states=False),
    }


if __name__ == "__main__":
    gc.freeze()  # torch's modules: engines collect garbage often
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    verbs: dict[str, Callable[[Path], dict[str, Any]]] = {"save": save, "load": load}
    found = verbs[sys.argv[1]](Path(sys.argv[2]))
    if dist.get_rank() == 0:
        Path(sys.argv[2], f"{sys.argv[1]}.json").write_text(json.dumps(found))
    leave()
