# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of a benchmark runs: the example's GPT under one scheme after another, in one process.

``measure_all`` times optimizer steps for ``benchmarks cluster``. Its rank 0 asks the benchmark to read the kernel's
counters while every rank stands still, before and after the measured steps.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import zero_topo
from benchmarks.emulated_cluster.ring import ring_under_deepspeed
from benchmarks.emulated_cluster.spec import Spec
from benchmarks.floors import Load, floors, loads, phases, stock_loads, uplink_bytes
from benchmarks.training_setup import TrainingSetup
from zero_topo.bench.control import Control
from zero_topo.examples.data import Corpus, batch
from zero_topo.examples.gpt import GPT, GPTConfig
from zero_topo.examples.process import behave, leave
from zero_topo.quant.registry import select_quantizer

COMPUTE_REPEATS = 3


def prepare() -> None:
    """Import and compile, once for all ranks, what each would otherwise import or wait for with its first engine."""
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # torch's compiler with it
    torch.optim.AdamW([torch.zeros(1)])
    select_quantizer(torch.device("cpu"))
    get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)


def build_model(setup: TrainingSetup, seed: int) -> GPT:
    """The GPT, with the same weights on every rank."""
    torch.manual_seed(seed)
    return GPT(GPTConfig(setup.layers, setup.width, setup.heads, setup.context))


@contextmanager
def engine_of(model: GPT, config: dict[str, Any], schedule: Callable[[int], float] | None = None) -> Iterator[Any]:
    """The DeepSpeed engine of a run; destroyed at the end, so that runs in one process do not disturb each other.

    Args:
        model: on every rank.
        config: DeepSpeed's.
        schedule: factor of the learning rate at each step; None keeps it.

    Raises:
        ValueError: for a config that is refused.
    """
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config,
        lr_scheduler=None if schedule is None else lambda optimizer: LambdaLR(optimizer, schedule),
    )
    try:
        if "zero_topo" in config:
            zero_topo.stats(engine)  # raises for a stock engine: else stock would be compared with itself
        yield engine
    finally:
        engine.destroy()
        del engine
        gc.collect()


@dataclass(frozen=True)
class Bench:
    """What the runs of one start have in common on this rank."""

    setup: TrainingSetup
    spec: Spec
    steps: int
    warmup: int
    control: Control | None
    fence: dist.ProcessGroup
    text: Tensor

    def stand_still(self, event: str) -> None:
        """Every rank waits here while the benchmark reads the counters."""
        dist.barrier(self.fence)
        if self.control is not None:
            self.control.ask({"event": event})
        dist.barrier(self.fence)

    def tell(self, **message: Any) -> None:
        """Rank 0 tells the benchmark something."""
        if self.control is not None:
            self.control.send(message)

    def micro_batches(self, step: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's data of a step."""
        shape = (self.setup.batch, self.setup.context)
        return [batch(self.text, shape, 0, step * count + k, dist.get_rank()) for k in range(count)]


def measure_all(settings: dict[str, Any], control: Control | None) -> None:
    """Measure every job of the settings, one after the other; the program of ``benchmarks cluster``.

    Args:
        settings: ``setup``, ``spec``, ``steps``, ``warmup``, and ``jobs``: objects of ``scheme``, ``block``, ``ring``
            and ``micro_batches``.
        control: rank 0's line to the benchmark.
    """
    behave()
    deepspeed.init_distributed("gloo", verbose=False)
    setup = TrainingSetup(**settings["setup"])
    bench = Bench(
        setup=setup,
        spec=Spec.from_json("spec", settings["spec"]),
        steps=settings["steps"],
        warmup=settings["warmup"],
        control=control,
        fence=dist.new_group(),
        text=Corpus.load(None, setup.context).train,
    )
    bench.tell(event="compute", seconds=compute_seconds(bench))
    for job in settings["jobs"]:
        try:
            result = measure(bench, job)
        except ValueError as error:  # the same on every rank: a block or a config that is refused
            bench.tell(event="refused", scheme=job["scheme"], reason=str(error))
            break
        bench.tell(event="measured", **result)
    leave()


def compute_seconds(bench: Bench) -> float:
    """Forward and backward pass of one micro-batch without any communication, all ranks at once."""
    model = build_model(bench.setup, 0).bfloat16()
    seconds = []
    for step in range(1 + COMPUTE_REPEATS):
        ((tokens, targets),) = bench.micro_batches(step, 1)
        dist.barrier(bench.fence)
        began = time.perf_counter()
        model(tokens, targets).backward()
        dist.barrier(bench.fence)
        seconds.append(time.perf_counter() - began)
        model.zero_grad()
    return statistics.median(seconds[1:])


def measure(bench: Bench, job: dict[str, Any]) -> dict[str, Any]:
    """One scheme with one number of micro-batches; the same result on every rank.

    While the engine is built, which broadcasts the model, the links are fast. Steps follow each other without a
    barrier, as in real training, and a step ends when the last rank has ended it (clocks of processes on one host
    agree). What one step leaves under way (publish) is paid for by the next, so the first one is not timed.
    """
    config = bench.setup.deepspeed(job["block"], job["micro_batches"], job["optimizer"])
    bench.stand_still("build")
    with engine_of(build_model(bench.setup, 0), config) as engine, ring_under_deepspeed(job["ring"]):
        bench.stand_still("built")
        for step in range(bench.warmup):
            train_step(bench, engine, step)
        bench.stand_still("begin")
        own = _measured_steps(bench, engine)
        bench.stand_still("end")
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        last = [max(moments) for moments in zip(*(rank["ends"] for rank in ranks), strict=True)]
        return {
            "scheme": job["scheme"],
            "micro_batches": job["micro_batches"],
            "counted_steps": len(last),
            "step_seconds": [after - before for before, after in pairwise(last)],
            "cpu_s": sum(rank["cpu_s"] for rank in ranks),
            "loss": sum(rank["loss"] for rank in ranks) / len(ranks),
            **_expected(bench, engine, job),
        }


def _measured_steps(bench: Bench, engine: Any) -> dict[str, Any]:
    """One step more than are timed: when each ended, CPU seconds of a step, and the last loss, on this rank."""
    ends, busy, loss = [], time.process_time(), 0.0
    for step in range(bench.warmup, bench.warmup + 1 + bench.steps):
        loss = train_step(bench, engine, step)
        ends.append(time.perf_counter())
        bench.tell(event="step")
    return {"ends": ends, "cpu_s": (time.process_time() - busy) / len(ends), "loss": loss}


def train_step(bench: Bench, engine: Any, step: int) -> float:
    """One optimizer step; the mean loss of its micro-batches on this rank."""
    total = 0.0
    data = bench.micro_batches(step, engine.gradient_accumulation_steps())
    for tokens, targets in data:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        total += float(loss.detach())
    return total / len(data)


def _expected(bench: Bench, engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    """What the formulas say of the job, and what our own meter and clock, if any, counted on this rank."""
    stats = None if job["block"] is None else zero_topo.stats(engine)
    expected = _loads(bench, engine, job, stats)
    table = phases(expected, bench.spec)
    for (phase, domain), nbytes in ({} if stats is None else stats.step_bytes).items():
        table.setdefault(phase, {}).setdefault("metered", {})[domain] = nbytes
    for phase, seconds in ({} if stats is None else stats.phase_seconds).items():
        table.setdefault(phase, {})["seconds"] = seconds
    return {"formula": uplink_bytes(expected), "floor_s": floors(expected, bench.spec), "phases": table}


def _loads(bench: Bench, engine: Any, job: dict[str, Any], stats: Any) -> list[Load]:
    if stats is not None:
        return loads(stats.config, stats.work, bench.spec)
    numels = [parameter.ds_numel for parameter in engine.module.parameters()]
    return stock_loads(numels, job["micro_batches"], bench.spec, job["ring"])
