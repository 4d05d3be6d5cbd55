# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of a benchmark that trains runs: the example's GPT under one scheme after another,
in one process.

``measure_all`` times optimizer steps for ``benchmarks cluster``. Its rank 0 asks the benchmark to
read the kernel's counters while every rank stands still, before and after the measured steps.
``train_all`` trains on for ``benchmarks convergence``, every run on the same data.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import zero_topo
from benchmarks.control import Control
from benchmarks.emulated_cluster.ring import ring_under_deepspeed
from benchmarks.emulated_cluster.spec import Spec
from benchmarks.engine_groups import clean_groups
from benchmarks.fsdp_training import FsdpEngine
from benchmarks.training_setup import TrainingSetup
from benchmarks.uplink import all_reduce_uplink, stock_uplink, uplink
from zero_topo.examples.data import Corpus, batch
from zero_topo.examples.gpt import GPT
from zero_topo.examples.process import behave
from zero_topo.examples.train_gpt import EVALUATION_SEED, warm_up_and_cosine
from zero_topo.leaving import leave
from zero_topo.observe.report import Stats
from zero_topo.quant.operators import select

COMPUTE_REPEATS = 3
EVALUATION_BATCHES = 64


def prepare() -> None:
    """Import and compile, once for all ranks, what each would otherwise import or wait for with its
    first engine.
    """
    # torch's compiler with it
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    torch.compiler.set_stance("force_eager")  # each rank would compile Muon's functions for minutes
    torch.optim.AdamW([torch.zeros(1)])
    select(torch.device("cpu"))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in train_gpt.py


def build_model(setup: TrainingSetup, seed: int) -> GPT:
    """The GPT, with the same weights on every rank."""
    torch.manual_seed(seed)
    return GPT(setup.layers, setup.width, setup.heads, setup.context)


@contextmanager
def engine_of(
    model: GPT, config: dict[str, Any], schedule: Callable[[int], float] | None = None
) -> Iterator[Any]:
    """The DeepSpeed engine of a run; destroyed at the end, so that runs in one process do not
    disturb each other.

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
            # Raises for a stock engine: else stock would be compared with itself
            zero_topo.stats(engine)
        yield engine
    finally:
        engine.destroy()
        del engine
        gc.collect()


@dataclass(frozen=True)
class Bench:
    """What the runs of one start have in common on this rank.

    Attributes:
        setup: model and DeepSpeed config.
        steps, warmup: of each run.
        control: the line to the benchmark.
        corpus: the text.
        fence: a process group that no run uses.
    """

    setup: TrainingSetup
    steps: int
    warmup: int
    control: Control
    corpus: Corpus
    fence: dist.ProcessGroup

    @classmethod
    def start(cls, settings: dict[str, Any], control: Control) -> Bench:
        """Join the other ranks; ``settings`` are those of the benchmark."""
        behave()
        deepspeed.init_distributed("gloo", verbose=False)
        setup = TrainingSetup(**settings["setup"])
        corpus = Corpus.load(None, setup.context)
        return cls(setup, settings["steps"], settings["warmup"], control, corpus, dist.new_group())

    def stand_still(self, event: str) -> None:
        """Every rank waits here while the benchmark reads the counters."""
        dist.barrier(self.fence)
        self.control.ask({"event": event})
        dist.barrier(self.fence)

    def micro_batches(
        self, step: int, count: int, seed: int, shared: int = 1
    ) -> list[tuple[Tensor, Tensor]]:
        """This rank's data of a step; that of each of ``shared`` ranks if they share each layer."""
        first = dist.get_rank() // shared * shared
        found = []
        for number in range(step * count, (step + 1) * count):
            shape = (self.setup.batch, self.setup.context)
            parts = [
                batch(self.corpus.train, shape, seed, number, rank)
                for rank in range(first, first + shared)
            ]
            tokens, targets = zip(*parts, strict=True)
            found.append((torch.cat(tokens), torch.cat(targets)))
        return found

    def train_step(self, engine: Any, step: int, seed: int = 0, shared: int = 1) -> float:
        """One optimizer step; the mean loss of its micro-batches on this rank."""
        total = 0.0
        data = self.micro_batches(step, engine.gradient_accumulation_steps(), seed, shared)
        for tokens, targets in data:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach())
        return total / len(data)


# -- benchmarks cluster ----------------------------------------------------------------------------


def products_in_fp32() -> torch.library.Library | None:
    """Compute BF16 matrix products in FP32 and round them, as a GPU does, while the result is kept;
    None on a CPU with AVX-512.

    Without it torch computes them element by element, which takes eight times as long.
    """
    if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return None

    def product(left: Tensor, right: Tensor) -> Tensor:
        dtype = torch.promote_types(left.dtype, torch.float32)
        wide = left.new_empty(left.shape[0], right.shape[1], dtype=dtype)
        # With `out` it is another operator than the one that this function replaces.
        torch.mm(left.to(dtype), right.to(dtype), out=wide)
        return wide.to(left.dtype)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about an operator that is replaced
        library.impl("mm", product, "CPU")
    return library


def measure_all(settings: dict[str, Any], control: Control) -> None:
    """Measure every job of the settings, one after the other; the program of
    ``benchmarks cluster``.

    Args:
        settings: ``setup``, ``spec``, ``steps``, ``warmup``, and ``jobs``: objects of ``scheme``,
            ``block``, ``ring``, ``stage``, ``tensor`` and ``micro_batches``.
        control: the line to the benchmark.
    """
    bench = Bench.start(settings, control)
    products = products_in_fp32()
    seconds = compute_seconds(bench)
    control.send({"event": "compute", "seconds": seconds, "fp32": products is not None})
    control.send_results(
        settings["jobs"], partial(measure, bench, Spec.from_json("spec", settings["spec"]))
    )
    leave()


def compute_seconds(bench: Bench) -> float:
    """Forward and backward pass of one micro-batch without any communication, all ranks at once."""
    model = build_model(bench.setup, 0)
    if bench.setup.bf16:
        model.bfloat16()
    seconds = []
    for step in range(1 + COMPUTE_REPEATS):
        ((tokens, targets),) = bench.micro_batches(step, 1, 0)
        dist.barrier(bench.fence)
        began = time.perf_counter()
        model(tokens, targets).backward()
        dist.barrier(bench.fence)
        seconds.append(time.perf_counter() - began)
        model.zero_grad()
    return statistics.median(seconds[1:])


def measure(bench: Bench, spec: Spec, job: dict[str, Any]) -> dict[str, Any]:
    """One scheme with one number of micro-batches; the same result on every rank.

    While the engine is built, which broadcasts the model, and in all but the last step of the
    warm-up, the links are fast. Steps follow each other without a barrier, as in real training, and
    a step ends when the last rank has ended it (clocks of processes on one host agree). What one
    step leaves under way (publish) is paid for by the next, so the first one is not timed.
    """
    config = bench.setup.of_job(job, job["micro_batches"])
    bench.stand_still("build")
    model = build_model(bench.setup, 0)
    started = ring_under_deepspeed(job["ring"])
    building = (
        nullcontext(FsdpEngine(model, bench.setup, job))
        if "host" in job
        else engine_of(model, config)
    )
    shared = job.get("tensor", 1)
    with clean_groups(), building as engine, started:
        for step in range(bench.warmup - 1):
            bench.train_step(engine, step, shared=shared)
        bench.stand_still("built")
        bench.train_step(engine, bench.warmup - 1, shared=shared)
        bench.stand_still("begin")
        own = _measured_steps(bench, engine, shared)
        bench.stand_still("end")
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        last = [max(moments) for moments in zip(*(rank["ends"] for rank in ranks), strict=True)]
        return {
            "scheme": job["scheme"],
            "micro_batches": job["micro_batches"],
            "counted_steps": len(last),
            "step_seconds": [after - before for before, after in pairwise(last)],
            "loss": sum(rank["loss"] for rank in ranks) / len(ranks),
            **_expected(spec, engine, job),
        }


def _measured_steps(bench: Bench, engine: Any, shared: int) -> dict[str, Any]:
    """One step more than are timed: when each ended, and the last loss, on this rank."""
    ends = []
    loss = 0.0
    for step in range(bench.warmup, bench.warmup + 1 + bench.steps):
        loss = bench.train_step(engine, step, shared=shared)
        ends.append(time.perf_counter())
        bench.control.send({"event": "step"})
    return {"ends": ends, "loss": loss}


def _expected(spec: Spec, engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    """What the formulas say of the job, and what our own meter and clock, if any, counted on this
    rank.
    """
    stats: Stats | None = None
    parameters = list(engine.module.parameters())
    shared = job.get("tensor", 1)
    if isinstance(engine, FsdpEngine):
        formula, stats = engine.expected(spec)
    elif job.get("stage", 3) == 0:
        sizes = [parameter.numel() for parameter in parameters]
        formula = all_reduce_uplink(sizes, spec, parameters[0].element_size())
    elif job["block"] is None:
        numels = [parameter.ds_numel for parameter in parameters]
        matrices = [
            parameter.ds_numel for parameter in parameters if getattr(parameter, "use_muon", False)
        ]
        formula = stock_uplink(numels, job["micro_batches"], spec, job["ring"], matrices, shared)
    else:
        stats = zero_topo.stats(engine)
        formula = uplink(stats.config, stats.work, spec, shared)
    phases: dict[str, dict[str, Any]] = {}
    if stats is not None:
        for (phase, domain), nbytes in stats.step_bytes.items():
            phases.setdefault(phase, {}).setdefault("metered", {})[domain] = nbytes
        for phase, seconds in stats.phase_seconds.items():
            phases.setdefault(phase, {})["seconds"] = seconds
    return {"formula": formula, "phases": phases}


# -- benchmarks convergence ------------------------------------------------------------------------


def train_all(settings: dict[str, Any], control: Control) -> None:
    """Train every job of the settings; the program of ``benchmarks convergence``.

    Args:
        settings: ``setup``, ``steps``, ``warmup``, ``micro_batches``, and ``jobs``: objects of
            ``scheme``, ``block``, ``seed`` and ``change`` (of the initial weights).
        control: the line to the benchmark.
    """
    bench = Bench.start(settings, control)
    control.send_results(settings["jobs"], partial(train, bench, settings["micro_batches"]))
    leave()


def train(bench: Bench, micro_batches: int, job: dict[str, Any]) -> dict[str, Any]:
    """One run: the mean loss of each step over ranks and micro-batches, and the evaluation loss at
    the end.
    """
    model = build_model(bench.setup, job["seed"])
    change(model, job["change"], job["seed"])
    config = bench.setup.of_job(job, micro_batches)
    values = []
    with engine_of(model, config, partial(warm_up_and_cosine, bench.steps, bench.warmup)) as engine:
        for step in range(bench.steps):
            values.append(bench.train_step(engine, step, job["seed"]))
            bench.control.send({"event": "step"})
        values.append(evaluate(bench, engine))
        sent = None if job["block"] is None else crossing(engine)
    every = torch.tensor([*values, sent or 0], dtype=torch.float64)
    dist.all_reduce(every)
    *curve, last, mean_sent = (every / dist.get_world_size()).tolist()
    return {
        "losses": curve,
        "evaluation": last,
        "crossing_bytes": None if sent is None else mean_sent,
    }


def crossing(engine: Any) -> float:
    """Bytes a step that this rank sent out of its node for sync and publish."""
    stats = zero_topo.stats(engine)
    return (
        sum(stats.total_bytes.get((phase, "world"), 0) for phase in ("sync", "publish"))
        / stats.steps
    )


@torch.no_grad()
def evaluate(bench: Bench, engine: Any) -> float:
    """Mean loss of this rank on text that the training never sees."""
    engine.eval()
    shape = (bench.setup.batch, bench.setup.context)
    text = bench.corpus.evaluation
    data = [
        batch(text, shape, EVALUATION_SEED, number, dist.get_rank())
        for number in range(EVALUATION_BATCHES)
    ]
    losses = [float(engine(tokens, targets)) for tokens, targets in data]
    engine.train()
    return sum(losses) / len(losses)


@torch.no_grad()
def change(model: GPT, size: float, seed: int) -> None:
    """Move every weight by a normal random number of that size; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters() if size else ():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)
