# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu.one_rank FOLDER`: one rank trains under stock ZeRO-3 and under zero_topo, and is looked at.

Losses must be equal; host synchronizations that our own lines cause, launches and allocated memory are recorded, also
what is left of that while the states are on the host.
"""

from __future__ import annotations

import os
import sys
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.profiler import ProfilerActivity, profile

import zero_topo
from benchmarks import records
from tests.device import DEVICE, ON_GPU
from tests.launcher.training import Job, Net, advance, block, largest_difference, running
from tests.launching import free_port

STEPS = 6
WIDTH = 1024 if ON_GPU else 37
ONE = {"emulated": {"nodes": 1, "gpus_per_node": 1, "gcds_per_gpu": 1}}
SHOWN = ("launches", "host_syncs", "allocated", "allocated_while_offloaded")
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
DTYPES = ("bf16", "fp16") if ON_GPU else ("bf16",)  # DeepSpeed refuses FP16 on a CPU


def join() -> None:
    """A process group of this process alone."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone | {"MASTER_PORT": str(free_port())})
    deepspeed.init_distributed("nccl" if ON_GPU else "gloo", auto_mpi_discovery=False, verbose=False)


def look(job: Job) -> dict[str, Any]:
    """Train, then one step more under torch's warnings and one under its profiler."""
    with running(job) as engine:
        losses = advance(job, engine, 0, STEPS)
        held = torch.cuda.memory_allocated() if ON_GPU else None
        syncs = own_syncs(job, engine)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
        with profile(activities=activities) as seen:
            advance(job, engine, STEPS + 1, STEPS + 2)
        counted = {event.key: event.count for event in seen.key_averages()}
        launches = sum(n for name, n in counted.items() if "LaunchKernel" in name or (not ON_GPU and "aten::" in name))
        told = zero_topo.stats(engine).memory if job.zero_topo else None
        left = left_of(engine) if job.zero_topo else None
        losses += advance(job, engine, STEPS + 2, STEPS + 3)
        allocated = {"allocated": held, "allocated_while_offloaded": left}
        return {"losses": losses, "launches": launches, "host_syncs": syncs, **allocated, "formulas": told}


def left_of(engine: Any) -> int | None:
    """Bytes that are allocated while all states are on the host; None without a GPU."""
    engine.offload_states()
    left = torch.cuda.memory_allocated() if ON_GPU else None
    engine.reload_states()
    return left


def own_syncs(job: Job, engine: Any) -> int | None:
    """How often a line of zero_topo's waits for the GPU in one step; None without one."""
    if not ON_GPU:
        advance(job, engine, STEPS, STEPS + 1)
        return None
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        advance(job, engine, STEPS, STEPS + 1)
    torch.cuda.set_sync_debug_mode("default")
    return sum(f"{os.sep}zero_topo{os.sep}" in warning.filename for warning in told)


def main(words: list[str]) -> int:
    """Every case; 1 if the losses of one differ."""
    join()
    found, wrong = [], 0
    for dtype, offload, overlap in product(DTYPES, (False, True), (False, True)):
        ds = {"zero_optimization": {"overlap_comm": overlap, **(OFFLOAD if offload else {})}}
        stock = Job(model=lambda: Net(width=WIDTH), dtype=dtype, micro_batches=2, ds=ds)
        case: dict[str, Any] = {"dtype": dtype, "offload": offload, "overlap_comm": overlap}
        try:
            case |= {"stock": look(stock), "topo": look(stock.under(block("topo", topology=ONE)))}
            apart = largest_difference(case["stock"]["losses"], case["topo"]["losses"])
        except (ValueError, RuntimeError) as error:  # the other cases are worth knowing
            case, apart = case | {"error": str(error)}, float("inf")
        wrong += apart != 0
        found.append(case | {"losses_apart": apart})
        ours = {name: case.get("topo", {}).get(name) for name in SHOWN}
        print(dtype, f"offload={offload} overlap_comm={overlap}: losses {apart} apart;", ours, case.get("error", ""))
    settings = {"device": str(DEVICE), "steps": STEPS, "width": WIDTH}
    records.write(Path(words[0]) / "gpu-one-rank.json", records.record("gpu-one-rank", settings, {"cases": found}))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
