# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``benchmarks soak`` runs: the example's GPT with everything on, and its
counts.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import zero_topo
from benchmarks import training
from benchmarks.control import Control
from benchmarks.training import Bench, build_model, engine_of, evaluate
from zero_topo.leaving import leave

MICRO_BATCHES = 2
MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


def prepare() -> None:
    """As for all trainings, called before ranks are forked; and torch keeps no record of its last
    2,000 collectives.

    It would fill for 1,400 steps, a kilobyte a step.
    """
    os.environ |= dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "0")
    training.prepare()


def soak(settings: dict[str, Any], control: Control) -> None:
    """Train with everything on; the program of ``benchmarks soak``.

    Args:
        settings: ``setup``, ``steps``, ``every`` and ``saved_every`` (steps from one count, and
            from one checkpoint, to the next), ``folder`` for checkpoints, and one job.
        control: the line to the benchmark.
    """
    bench = Bench.start(settings, control)
    control.send_results(settings["jobs"], partial(train, bench, settings))
    leave()


def train(bench: Bench, settings: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """The whole run; the last evaluation's loss."""
    every = settings["every"]
    folder = Path(settings["folder"])
    config = bench.setup.deepspeed(job["block"], MICRO_BATCHES)
    config["zero_optimization"] |= {"overlap_comm": True, "stage3_prefetch_bucket_size": 20_000}
    config |= {"wall_clock_breakdown": True, "steps_per_print": 10 * every}
    config["csv_monitor"] = {"enabled": True, "output_path": str(folder), "job_name": "soak"}
    model = build_model(bench.setup, 0)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    loss = 0.0
    with engine_of(model, config, lambda step: 1.0) as engine:
        for step in range(1, bench.steps + 1):
            bench.train_step(engine, step)
            bench.control.send({"event": "step"})
            if step % every == 0:
                count(bench, step)
                loss = in_between(bench, engine)
            if step % settings["saved_every"] == 0:
                save(engine, folder, step)
    return {"loss": loss}


def in_between(bench: Bench, engine: Any) -> float:
    """What scripts do between steps: evaluate, look at weights, edit some, ask for statistics."""
    loss = evaluate(bench, engine)
    with deepspeed.zero.GatheredParameters(list(engine.module.norm.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            engine.module.norm.weight.data.clamp_(-4, 4)
    deepspeed.utils.safe_get_full_fp32_param(engine.module.lm_head.weight)
    deepspeed.utils.safe_get_full_optimizer_state(engine.module.lm_head.weight, "exp_avg")
    assert zero_topo.stats(engine).steps > 0
    return loss


def save(engine: Any, folder: Path, step: int) -> None:
    """Save a checkpoint, take it up again, and remove it."""
    engine.save_checkpoint(str(folder), tag=str(step))
    engine.load_checkpoint(str(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / str(step))


def count(bench: Bench, step: int) -> None:
    """Send the benchmark the present counts of each rank."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, stored(), bench.fence)
    bench.control.send({"event": "held", "step": step, "ranks": ranks})


class MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: bytes mapped for single allocations, and bytes in use of all
    others.
    """

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO.split())


def in_use() -> int:
    """Bytes that C and C++ hold of ``malloc``."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo
    info = mallinfo()
    return int(info.hblkhd + info.uordblks)


def stored() -> dict[str, int]:
    """The counts of this rank, by the names of ``soak.ALLOWED``."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "store_keys": dist.distributed_c10d._get_default_store().num_keys(),
        "tensors": len(tensors),
        "tensor_bytes": sum(
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
        ),
        "objects": len(gc.get_objects()) - len(tensors),
        "blocks": sys.getallocatedblocks(),
        "malloc_bytes": in_use(),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }
