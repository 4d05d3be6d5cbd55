# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``benchmarks sparse`` runs: one mode of sync after another on the same gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bare import bare_engine, matrices
from benchmarks.control import Control
from benchmarks.records import Spread
from benchmarks.sparse import ALL_REDUCE
from zero_topo.config import ZeroTopoConfig, resolve_config
from zero_topo.config.sparse_config import share
from zero_topo.engine.stage3 import Stage3
from zero_topo.examples.data import Corpus, batch
from zero_topo.examples.gpt import GPT, GPTConfig
from zero_topo.examples.process import behave
from zero_topo.hook.leaving import leave
from zero_topo.quant.operators import select
from zero_topo.sync import Moment
from zero_topo.sync.sparse import Sparse
from zero_topo.topology.presets import emulated

WORD = 4
RATE = 0.05
BETA = 0.9
LAYERS, HEAD, CONTEXT = 2, 16, 64
Source = Callable[[int], list[Tensor]]


def prepare() -> None:
    """Load the kernels once for all ranks."""
    select(torch.device("cpu"))


def measure_all(settings: dict[str, Any], control: Control) -> None:
    """Measure every job of the settings; the program of ``benchmarks sparse``."""
    behave()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    control.send_results(settings["jobs"], partial(measure, settings))
    leave()


class Synthetic:
    """Gradients with heavy tails: cubes of normal numbers, half of them common to all ranks and lasting."""

    def __init__(self, numel: int) -> None:
        self.numels, self.dims = (numel,), (2,)
        self._common = torch.randn(numel, generator=torch.Generator().manual_seed(1)) ** 3

    def gradients(self, step: int) -> list[Tensor]:
        """Of this rank."""
        generator = torch.Generator().manual_seed(1000 * (step + 1) + dist.get_rank())
        return [self._common + torch.randn(self._common.numel(), generator=generator) ** 3]

    def update(self, synced: Sequence[Tensor]) -> None:
        """They do not depend on the weights."""


def model_for(numel: int) -> GPTConfig:
    """A GPT of two layers with about so many parameters, in heads of 16."""
    heads = max(1, round((numel / (12 * LAYERS)) ** 0.5 / HEAD))
    return GPTConfig(LAYERS, HEAD * heads, heads, CONTEXT)


class Model:
    """Gradients of the example's GPT, trained by plain SGD with what the mode delivers."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(1)
        self._model = GPT(model_for(numel))
        self._parameters = list(self._model.parameters())
        self._text = Corpus.load(None, CONTEXT).train
        self.numels = tuple(p.numel() for p in self._parameters)
        self.dims = tuple(p.dim() for p in self._parameters)

    def gradients(self, step: int) -> list[Tensor]:
        """Of this rank, on its own text."""
        self._model.zero_grad()
        self._model(*batch(self._text, (4, CONTEXT), 0, step, dist.get_rank())).backward()
        return [p.grad.reshape(-1) for p in self._parameters if p.grad is not None]

    @torch.no_grad()
    def update(self, synced: Sequence[Tensor]) -> None:
        """One step of SGD."""
        for parameter, gradient in zip(self._parameters, synced, strict=True):
            parameter.sub_(gradient.view_as(parameter), alpha=RATE)


def measure(settings: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """One mode; the same numbers on every rank."""
    source = (Synthetic if job["source"] == "synthetic" else Model)(settings["numel"])
    engine, optimizer = build(job["block"], source.numels, source.dims)
    clock = _Clock(engine)
    times, exchanges, errors, sent = [], [], [], 0.0
    for step in range(settings["warmup"] + settings["steps"]):
        engine.gradients.scatter(range(len(source.numels)), source.gradients(step), last=False)
        wanted = _wanted(engine)
        if job["scheme"] == ALL_REDUCE:
            plain = engine.gradients.buffer.clone()
            took = exchange = _timed(partial(dist.all_reduce, plain))
            engine.gradients.sync()
        else:
            clock.seconds = 0.0
            took = _timed(engine.gradients.sync)
            plain, exchange = engine.gradients.optimizer_rows(), clock.seconds
        rows = engine.gradients.optimizer_rows()
        synced = [rows[:, begin:end].reshape(-1) for begin, end in engine.layout.spans(range(len(source.numels)))]
        source.update([flat[:n] for flat, n in zip(synced, source.numels, strict=True)])
        optimizer.step(engine, rows)
        if step >= settings["warmup"]:
            times.append(took)
            exchanges.append(exchange)
            errors.append(float((plain.double() - wanted).norm() / wanted.norm()))
        engine.end_step(skipped=False)
        if step >= settings["warmup"]:
            sent += sum(n for (phase, _), n in engine.meter.last_step.items() if phase == "sync")
    found = {
        "mode": job["scheme"],
        "density": job["density"],
        "source": job["source"],
        "ranks": dist.get_world_size(),
        "numel": sum(source.numels),
        **_over_ranks(times, exchanges, errors, sent / settings["steps"]),
    }
    k = share(job["density"], found["numel"])
    engine.mesh.destroy()
    return {**found, "words_per_k": found["bytes_per_rank"] / WORD / k}


class Optimizer:
    """SGD on weights that nobody reads, and a momentum: for the modes that look at an optimizer's updates and state."""

    def __init__(self) -> None:
        self._weights = self._mean = torch.empty(0)

    def moments(self) -> list[Moment]:
        """As an engine asks for them."""
        return [Moment(0, self._mean, BETA)] if self._mean.numel() else []

    def step(self, engine: Stage3, rows: Tensor) -> None:
        """One step, shown to the mode."""
        if not self._mean.numel():
            self._weights, self._mean = torch.zeros_like(rows), torch.zeros_like(rows)
        with engine.watched(self._weights.view(-1), 0, RATE):
            self._mean.mul_(BETA).add_(rows, alpha=1 - BETA)
            self._weights.sub_(rows, alpha=RATE)


def build(block: dict[str, Any], numels: tuple[int, ...], dims: tuple[int, ...]) -> tuple[Stage3, Optimizer]:
    """An engine in FP32 without weights worth the name, of which only the gradients are used; and its optimizer."""
    optimizer = Optimizer()
    config = resolve_config(ZeroTopoConfig.parse(block), emulated(dist.get_world_size(), 1, 1))
    parameters = [replace(p, dims=of) for p, of in zip(matrices(numels), dims, strict=True)]
    return bare_engine(config, parameters, moments=optimizer.moments), optimizer


def _timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes, which all ranks begin together."""
    dist.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _wanted(engine: Stage3) -> Tensor:
    """The sum over ranks of gradient plus residual, FP64 ``[N, F]``."""
    total = engine.gradients.buffer.double()
    mode = engine.gradients.mode
    if isinstance(mode, Sparse):
        total += mode.residual_table()
    dist.all_reduce(total)
    return total


def _over_ranks(times: list[float], exchanges: list[float], errors: list[float], sent: float) -> dict[str, Any]:
    """The slowest rank's times, everybody's mean bytes."""
    table = torch.tensor([times, exchanges], dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    total = torch.tensor([sent], dtype=torch.float64)
    dist.all_reduce(total)
    return {
        "bytes_per_rank": float(total) / dist.get_world_size(),
        "seconds": Spread.of(table[0].tolist()).to_json(),
        "exchange_s": Spread.of(table[1].tolist()).median,
        "error": sum(errors) / len(errors),
    }


class _Clock:
    """Seconds spent in a sparse mode's collectives."""

    def __init__(self, engine: Stage3) -> None:
        self.seconds = 0.0
        mode = engine.gradients.mode
        if isinstance(mode, Sparse):
            for name in ("gather", "gather_known", "scatter", "scatter_known"):
                setattr(mode.peers, name, self._timed(getattr(mode.peers, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            self.seconds += time.perf_counter() - began
            return result

        return timed
