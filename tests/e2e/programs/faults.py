# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A short training in which rank 1 meets a fault; started again in the same directory it goes on from its checkpoint.

Usage: faults.py DIRECTORY FAULT PHASE TREE. Rank 0 adds each step's loss and a digest of the weights to
DIRECTORY/steps.jsonl; the rank with the fault writes its process id to DIRECTORY/faulty.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist

from tests.launcher.training import Job, advance, block, close, start, weights
from zero_topo.collectives.meter import Meter
from zero_topo.examples.process import leave

STEPS, SAVED_EVERY, FAULTY_STEP = 5, 2, 3
FAULTY_RANK = 1
SLOW_S = 8.0
TREES = {"dies": (1, 1, 2), "nodes": (2, 1, 1)}


def nothing() -> None:
    """No fault."""


def fault(kind: str, directory: Path) -> Callable[[], None]:
    """What happens to this rank, once."""
    if kind in ("none", "nan") or dist.get_rank() != FAULTY_RANK:
        return nothing

    def happen() -> None:
        path = directory / "faulty"
        if path.exists():
            return
        path.write_text(str(os.getpid()))
        if kind == "slow":
            time.sleep(SLOW_S)
        else:
            os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[kind])

    return happen


def place(engine: Any, phase: str, happen: Callable[[], None]) -> Any:
    """Where it happens: in the module's forward or backward pass, one of the meter's phases, or while it saves."""
    layer, steps = engine.module.blocks[1], lambda: engine.global_steps

    def at(*_: Any) -> None:
        if steps() >= FAULTY_STEP:
            happen()

    if phase == "forward":
        layer.register_forward_pre_hook(at)
    if phase == "backward":
        layer.register_full_backward_hook(at)
    timing, save = Meter.timing, torch.save

    def timed(meter: Meter, named: str) -> Any:
        if named == phase:
            at()
        return timing(meter, named)

    def saved(*args: Any, **kwargs: Any) -> None:
        if phase == "save":
            at()
        save(*args, **kwargs)

    return patch.multiple(Meter, timing=timed), patch.object(torch, "save", saved)


def main(directory: Path, kind: str, phase: str, tree: str) -> None:
    """Train from the last checkpoint, if there is one, to the end."""
    nodes, gpus, dies = TREES[tree]
    topology = {"emulated": {"nodes": nodes, "gpus_per_node": gpus, "gcds_per_gpu": dies}}
    job = Job(zero_topo=block("topo", topology=topology, sync={"mode": "quantized"}), steps=STEPS)
    engine = start(job)
    if (directory / "latest").exists():
        engine.load_checkpoint(str(directory))
    timing, saving = place(engine, phase, fault(kind, directory))
    if kind == "nan" and dist.get_rank() == FAULTY_RANK:
        engine.module.blocks[1].register_forward_pre_hook(
            lambda module, args: (args[0] * torch.nan,) if engine.global_steps == FAULTY_STEP else None
        )
    with timing, saving:
        for step in range(engine.global_steps, STEPS):
            (loss,) = advance(job, engine, step, step + 1)
            note(directory, step, loss, engine)
            if (step + 1) % SAVED_EVERY == 0:
                engine.save_checkpoint(str(directory))
    close(engine)


def note(directory: Path, step: int, loss: float, engine: Any) -> None:
    """A line of the step's bits."""
    digest = hashlib.sha256(b"".join(value.cpu().numpy().tobytes() for value in weights(engine).values())).hexdigest()
    if dist.get_rank() == 0:
        with open(directory / "steps.jsonl", "a") as file:
            file.write(json.dumps([step, loss, digest]) + "\n")


if __name__ == "__main__":
    gc.freeze()  # torch's modules: engines collect garbage often
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    main(Path(sys.argv[1]), *sys.argv[2:])
    leave()
