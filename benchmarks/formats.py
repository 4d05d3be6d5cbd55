# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks formats``: the loss of a training in which only what ranks send is quantized.

All ranks are in one process, in FP32, without DeepSpeed: the only difference between two runs is the format in which
each rank's gradients reach the owners of its node, and in ``paper`` also that of the weights, which the two GCDs of a
GPU send each other. Model, data and optimizer are those of ``benchmarks convergence``,
which trains with the whole engine and takes far longer. ``chaos`` is a run whose initial weights are changed: a
smaller difference from ``stock``, whose gradients are exact, shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.convergence import compare
from benchmarks.convergence_report import CHAOS, STOCK
from benchmarks.records import GrowingRecord, Tick, record
from benchmarks.training_setup import TrainingSetup
from zero_topo.collectives.transport import shard_view
from zero_topo.examples.data import Corpus, batch
from zero_topo.examples.gpt import GPT
from zero_topo.examples.train_gpt import EVALUATION_SEED, warm_up_and_cosine
from zero_topo.plan import Plan
from zero_topo.quant import ops
from zero_topo.quant.operands import View, at_blocks
from zero_topo.quant.operators import select
from zero_topo.quant.spec import NF4, BlockSpec

RANKS, OF_NODE, OF_GPU, EVALUATION_BATCHES = 8, 4, 2, 8
SETUP = TrainingSetup(2, 128, 64, 4, lr=2e-3)
RUNS: dict[str, tuple[BlockSpec | None, BlockSpec | None, float]] = {
    STOCK: (None, None, 0.0),
    CHAOS: (None, None, 1e-3),
    "int8": (BlockSpec(8), None, 0.0),
    "int4": (BlockSpec(4), None, 0.0),
    "int4-64": (BlockSpec(4, 64), None, 0.0),
    "nf4": (NF4, None, 0.0),
    "paper": (BlockSpec(4), BlockSpec(8), 0.0),
}
"""The formats of gradients and of weights, and the standard deviation of a change of the initial weights."""


@dataclass(frozen=True)
class FormatsBench:
    """What to train.

    Attributes:
        runs: names of ``RUNS``; stock is trained in any case.
        steps: optimizer steps of each run.
        seeds: of weights and data, one run each.
        floors: number of seeds that also train ``chaos``.
        warmup: steps until the full learning rate.
    """

    runs: tuple[str, ...]
    steps: int = 300
    seeds: int = 8
    floors: int = 3
    warmup: int = 10

    def __post_init__(self) -> None:
        if unknown := [name for name in self.runs if name not in RUNS]:
            raise ValueError(f"{', '.join(unknown)}: no format of this benchmark; choose of {', '.join(RUNS)}")

    def jobs(self) -> list[tuple[str, int]]:
        """Names and seeds, one seed after the other."""
        return [
            (name, seed)
            for seed in range(self.seeds)
            for name in (STOCK, *([CHAOS] if seed < self.floors else []), *self.runs)
        ]


def run(bench: FormatsBench, tick: Tick) -> GrowingRecord:
    """Train everything; yield the record so far after each seed."""
    select(torch.device("cpu"))
    jobs = [{"scheme": name, "seed": seed} for name, seed in bench.jobs()]
    settings = {"setup": asdict(SETUP), "ranks": RANKS, "node": OF_NODE, **asdict(bench), "jobs": jobs}
    curves: dict[str, dict[int, dict[str, Any]]] = {}
    for name, seed in bench.jobs():
        curves.setdefault(name, {})[seed] = train(*RUNS[name], bench, seed)
        tick(f"{name}, seed {seed}", 1)
        if name == bench.runs[-1]:
            found = {of: {str(s): run["losses"] for s, run in seeds.items()} for of, seeds in curves.items()}
            yield record("formats", settings, {"results": compare(curves), "curves": found})


def train(
    spec: BlockSpec | None, of_weights: BlockSpec | None, change: float, bench: FormatsBench, seed: int
) -> dict[str, Any]:
    """One run: the mean loss of each step, and the evaluation loss at the end."""
    torch.manual_seed(seed)
    model = GPT(SETUP.layers, SETUP.width, SETUP.heads, SETUP.context)
    params, generator = list(model.parameters()), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in params if change else ():
            param.add_(torch.randn(param.shape, generator=generator), alpha=change)
    adam = torch.optim.AdamW(params, SETUP.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    rates = LambdaLR(adam, partial(warm_up_and_cosine, bench.steps, bench.warmup))
    corpus, shape, losses = Corpus.load(None, SETUP.context), (SETUP.batch, SETUP.context), []
    for step in range(bench.steps):
        data = [batch(corpus.train, shape, seed, step, rank) for rank in range(RANKS)]
        if spec is None:  # one batch has the same mean
            data = [(torch.cat(tokens), torch.cat(targets)) for tokens, targets in [zip(*data, strict=True)]]
        total, loss_sum = [torch.zeros_like(param) for param in params], 0.0
        with as_gathered(params, of_weights):
            for tokens, targets in data:
                loss = model(tokens, targets)
                grads = torch.autograd.grad(loss, params)
                total = list(grads) if spec is None else scattered(grads, total, spec)
                loss_sum += float(loss.detach())
        for param, grad in zip(params, total, strict=True):
            param.grad = grad.div_(len(data))
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        adam.step()
        rates.step()
        losses.append(loss_sum / len(data))
    with torch.no_grad(), as_gathered(params, of_weights):
        held = [
            float(model(*batch(corpus.evaluation, shape, EVALUATION_SEED, k, rank)))
            for k in range(EVALUATION_BATCHES)
            for rank in range(RANKS)
        ]
    return {"losses": losses, "evaluation": sum(held) / len(held), "crossing_bytes": None}


def scattered(grads: Sequence[Tensor], total: list[Tensor], spec: BlockSpec) -> list[Tensor]:
    """Add one rank's gradients to the totals, as the owners of its node receive them: each parameter begins a block."""
    read, written = (at_blocks(_shards(tensors, OF_NODE), spec.block_size) for tensors in (grads, total))
    ops.dequantize(ops.quantize(read, spec), spec, written, accumulate=True)
    return total


@contextmanager
def as_gathered(params: Sequence[Tensor], spec: BlockSpec | None) -> Iterator[None]:
    """Within, the weights are those that the GCDs of a GPU gather from each other; afterwards the exact ones again."""
    exact = [] if spec is None else [param.detach().clone() for param in params]
    if spec is not None:
        with torch.no_grad():
            read, written = (at_blocks(_shards(tensors, OF_GPU), spec.block_size) for tensors in (exact, params))
            ops.dequantize(ops.quantize(read, spec), spec, written)
    yield
    with torch.no_grad():
        for param, values in zip(params, exact, strict=False):
            param.copy_(values)


def _shards(tensors: Sequence[Tensor], ranks: int) -> list[View]:
    plan = Plan(OF_NODE, 1, None, OF_NODE, OF_NODE)
    return [shard_view(tensor.detach().contiguous().view(-1), plan, ranks) for tensor in tensors]
