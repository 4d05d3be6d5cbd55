# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``benchmarks convergence`` runs: one training run after another, all of the same data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import zero_topo
from benchmarks.training import build_model, engine_of, prepare
from benchmarks.training_setup import TrainingSetup
from zero_topo.bench.control import Control
from zero_topo.examples.data import Corpus, batch
from zero_topo.examples.gpt import GPT
from zero_topo.examples.process import behave, leave

__all__ = ["prepare", "train_all"]

EVALUATION_SEED = 1_000_000  # evaluation draws the same windows every time
EVALUATION_BATCHES = 8


def train_all(settings: dict[str, Any], control: Control | None) -> None:
    """Train every job of the settings; the program of ``benchmarks convergence``.

    Args:
        settings: ``setup``, ``steps``, ``warmup``, ``micro_batches``, and ``jobs``: objects of ``scheme``, ``block``,
            ``seed`` and ``change`` (of the initial weights).
        control: rank 0's line to the benchmark.
    """
    behave()
    deepspeed.init_distributed("gloo", verbose=False)
    corpus = Corpus.load(None, settings["setup"]["context"])
    for job in settings["jobs"]:
        try:
            curve = train(settings, job, corpus, control)
        except ValueError as error:  # the same on every rank: a block or a config that is refused
            if control is not None:
                control.send({"event": "refused", "scheme": job["scheme"], "reason": str(error)})
            break
        if control is not None:
            control.send({"event": "trained", "scheme": job["scheme"], "seed": job["seed"], **curve})
    leave()


def train(settings: dict[str, Any], job: dict[str, Any], corpus: Corpus, control: Control | None) -> dict[str, Any]:
    """One run: the mean loss of each step over ranks and micro-batches, and the evaluation loss at the end."""
    setup, steps, count = TrainingSetup(**settings["setup"]), settings["steps"], settings["micro_batches"]
    model = build_model(setup, job["seed"])
    change(model, job["change"], job["seed"])
    schedule = warm_up_and_cosine(steps, settings["warmup"])
    shape, rank = (setup.batch, setup.context), dist.get_rank()
    losses = torch.zeros(steps, dtype=torch.float64)
    with engine_of(model, setup.deepspeed(job["block"], count, job["optimizer"]), schedule) as engine:
        for step in range(steps):
            for micro in range(step * count, (step + 1) * count):
                loss = engine(*batch(corpus.train, shape, job["seed"], micro, rank))
                engine.backward(loss)
                engine.step()
                losses[step] += loss.detach().double() / count
            if control is not None:
                control.send({"event": "step"})
        evaluation = evaluate(engine, corpus, shape)
        sent = None if job["block"] is None else crossing(engine)
    every = torch.cat([losses, torch.tensor([evaluation, sent or 0], dtype=torch.float64)])
    dist.all_reduce(every)
    *curve, last, mean_sent = (every / dist.get_world_size()).tolist()
    return {"losses": curve, "evaluation": last, "crossing_bytes": None if sent is None else mean_sent}


def crossing(engine: Any) -> float:
    """Bytes a step that this rank sent out of its node for sync and publish."""
    stats = zero_topo.stats(engine)
    return sum(stats.total_bytes.get((phase, "world"), 0) for phase in ("sync", "publish")) / stats.steps


@torch.no_grad()
def evaluate(engine: Any, corpus: Corpus, shape: tuple[int, int]) -> float:
    """Mean loss of this rank on text that the training never sees."""
    engine.eval()
    numbers = range(EVALUATION_BATCHES)
    data = [batch(corpus.evaluation, shape, EVALUATION_SEED, number, dist.get_rank()) for number in numbers]
    losses = [float(engine(tokens, targets)) for tokens, targets in data]
    engine.train()
    return sum(losses) / len(losses)


@torch.no_grad()
def change(model: GPT, size: float, seed: int) -> None:
    """Move every weight by a normal random number of that size; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters() if size else ():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)


def warm_up_and_cosine(steps: int, warmup: int) -> Callable[[int], float]:
    """The example's schedule: linear warm-up, then a cosine down to a tenth."""

    def factor(step: int) -> float:
        done = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
        return min(1.0, (step + 1) / max(1, warmup)) * (0.55 + 0.45 * math.cos(math.pi * done))

    return factor
