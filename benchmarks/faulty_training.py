# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A short training in which a rank meets a fault; started again in the same directory it goes on
from its checkpoint.

Its words: DIRECTORY KIND PHASE STEP RANK TREE. Rank 0 adds each step's loss and a digest of the
weights to DIRECTORY/steps.jsonl; the rank with the fault writes its process id to DIRECTORY/faulty.
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
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist

from benchmarks.control import Control
from benchmarks.training import Bench, build_model, engine_of
from benchmarks.training_setup import TrainingSetup
from zero_topo.collectives.meter import Meter
from zero_topo.leaving import leave

STEPS = 5
SAVED_EVERY = 2
SLOW_S = 8.0
TREES = {"dies": (1, 1, 2), "nodes": (2, 1, 1), "both": (2, 1, 2)}
SETUP = TrainingSetup(layers=2, width=64, context=8, batch=1, lr=1e-2)


def fault(kind: str, directory: Path) -> Callable[[], None]:
    """What happens to this rank, once."""

    def happen() -> None:
        path = directory / "faulty"
        if path.exists():
            return
        path.write_text(str(os.getpid()))
        if kind == "slow":
            time.sleep(SLOW_S)
        elif kind == "raised":
            raise RuntimeError("a fault")
        elif kind == "cut":
            while not (directory / "cut").exists():  # whoever started us takes the network down
                time.sleep(0.01)
        else:
            os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[kind])

    return happen


def place(engine: Any, phase: str, step: int, happen: Callable[[], None]) -> ExitStack:
    """Where it happens: in the module's forward or backward pass, one of the meter's phases, or
    while it saves.
    """
    layer = engine.module.blocks[1]

    def at(*_: Any) -> None:
        if engine.global_steps >= step:
            happen()

    if phase == "forward":
        layer.register_forward_pre_hook(at)
    if phase == "backward":
        layer.register_full_backward_hook(at)
    timing = Meter.timing
    save = torch.save

    def timed(meter: Meter, named: str) -> Any:
        if named == phase:
            at()
        return timing(meter, named)

    def saved(*args: Any, **kwargs: Any) -> None:
        if phase == "save":
            at()
        save(*args, **kwargs)

    placed = ExitStack()
    placed.enter_context(patch.multiple(Meter, timing=timed))
    placed.enter_context(patch.object(torch, "save", saved))
    return placed


def start(words: list[str]) -> None:
    """Train from the last checkpoint, if there is one, to the end, and end this process."""
    directory = Path(words[0])
    kind, phase, step, rank, tree = words[1:]
    nodes, gpus, dies = TREES[tree]
    topology = {"emulated": {"nodes": nodes, "gpus_per_node": gpus, "gcds_per_gpu": dies}}
    block = {
        "scheme": "topo",
        "topology": topology,
        "sync": {"mode": "quantized"},
        "debug_checks": True,
    }
    bench = Bench.start({"setup": asdict(SETUP), "steps": STEPS, "warmup": 0}, Control(None))
    with (
        engine_of(build_model(SETUP, 0), SETUP.deepspeed(block, 1)) as engine,
        ExitStack() as placed,
    ):
        if (directory / "latest").exists():
            engine.load_checkpoint(str(directory))
        if int(rank) == dist.get_rank() and kind == "nan":
            engine.module.blocks[1].register_forward_pre_hook(
                lambda module, args: (
                    (args[0] * torch.nan,) if engine.global_steps == int(step) else None
                )
            )
        elif int(rank) == dist.get_rank() and kind != "none":
            placed.enter_context(place(engine, phase, int(step), fault(kind, directory)))
        for number in range(engine.global_steps, STEPS):
            note(directory, number, bench.train_step(engine, number), engine)
            if (number + 1) % SAVED_EVERY == 0:
                engine.save_checkpoint(str(directory))
    leave()


def note(directory: Path, step: int, loss: float, engine: Any) -> None:
    """A line of the step's bits: the mean loss over ranks, and all weights."""
    mean = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(mean)
    weights = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(weights):
        digest = hashlib.sha256(
            b"".join(weight.detach().float().numpy().tobytes() for weight in weights)
        ).hexdigest()
    if dist.get_rank() == 0:
        with open(directory / "steps.jsonl", "a") as file:
            file.write(json.dumps([step, float(mean / dist.get_world_size()), digest]) + "\n")


if __name__ == "__main__":
    gc.freeze()  # torch's modules: engines collect garbage often
    start(sys.argv[1:])
