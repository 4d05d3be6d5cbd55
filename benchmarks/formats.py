# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks formats``: the loss of a training in which only what ranks send is
quantized.

All ranks are in one process, in FP32, without DeepSpeed: the only difference between two runs is
the format in which each rank's gradients reach the owners of its node, in ``int4-gpu`` and
``nf4-gpu`` through its GPU (``"two_hop": "gpu"``), and in ``paper`` also that of the weights, which
the two GCDs of a GPU send each other. Model, data and optimizer are those of
``benchmarks convergence``, which trains with the whole engine and takes far longer. ``chaos`` is a
run whose initial weights are changed: a smaller difference from ``stock``, whose gradients are
exact, shows nothing.
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
from zero_topo.quant.operands import View, at_blocks, total_numel
from zero_topo.quant.operators import select
from zero_topo.quant.spec import NF4, BlockSpec

RANKS = 8
OF_NODE = 4
OF_GPU = 2
EVALUATION_BATCHES = 8
SETUP = TrainingSetup(2, 128, 64, 4, lr=2e-3)
RUNS: dict[str, tuple[BlockSpec | None, BlockSpec | None, float]] = {
    STOCK: (None, None, 0.0),
    CHAOS: (None, None, 1e-3),
    "int8": (BlockSpec("int8"), None, 0.0),
    "int4": (BlockSpec("int4"), None, 0.0),
    "int4-64": (BlockSpec("int4", 64), None, 0.0),
    "nf4": (NF4, None, 0.0),
    "int4-gpu": (BlockSpec("int4"), None, 0.0),
    "nf4-gpu": (NF4, None, 0.0),
    "paper": (BlockSpec("int4"), BlockSpec("int8"), 0.0),
    "topo": (NF4, BlockSpec("int8"), 0.0),
    "publish-int4": (None, None, 0.0),
    "publish-nf4": (None, None, 0.0),
}
"""The formats of gradients and of weights, and the standard deviation of a change of the initial
weights.
"""

PUBLISHED = {"publish-int4": BlockSpec("int4"), "publish-nf4": NF4}
"""The format of the differences that reach all ranks after a step; the masters keep the rounding
error.
"""


@dataclass(frozen=True)
class FormatsBench:
    """What to train.

    Attributes:
        runs: names of ``RUNS``; stock is trained in any case.
        steps: optimizer steps of each run.
        seeds: of weights and data, one run each.
        floors: number of seeds that also train ``chaos``.
        warmup: steps until the full learning rate.
        setup: model, batch and learning rate.
    """

    runs: tuple[str, ...]
    steps: int = 300
    seeds: int = 8
    floors: int = 3
    warmup: int = 10
    setup: TrainingSetup = SETUP

    def __post_init__(self) -> None:
        if unknown := [name for name in self.runs if name not in RUNS]:
            raise ValueError(
                f"{', '.join(unknown)}: no format of this benchmark; choose of {', '.join(RUNS)}"
            )

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
    settings = {"ranks": RANKS, "node": OF_NODE, **asdict(bench), "jobs": jobs}
    curves: dict[str, dict[int, dict[str, Any]]] = {}
    for name, seed in bench.jobs():
        summed = OF_GPU if name.endswith("-gpu") else 1
        curves.setdefault(name, {})[seed] = train(
            *RUNS[name], bench, seed, summed, PUBLISHED.get(name)
        )
        tick(f"{name}, seed {seed}", 1)
        if name == bench.runs[-1]:
            found = {
                of: {str(s): run["losses"] for s, run in seeds.items()}
                for of, seeds in curves.items()
            }
            yield record("formats", settings, {"results": compare(curves), "curves": found})


def train(
    spec: BlockSpec | None,
    of_weights: BlockSpec | None,
    change: float,
    bench: FormatsBench,
    seed: int,
    summed: int,
    published: BlockSpec | None = None,
) -> dict[str, Any]:
    """One run: the mean loss of each step, and the evaluation loss at the end.

    Args:
        spec: format of the gradients; None is exact.
        of_weights: format of the weights; None is exact.
        change: standard deviation of a change of the initial weights.
        bench: steps and warm-up.
        seed: of weights and data.
        summed: ranks whose gradients are summed, and quantized again, before they are sent on.
        published: format of the differences that reach all ranks after a step; None sends exact
            weights.
    """
    torch.manual_seed(seed)
    setup = bench.setup
    model = GPT(setup.layers, setup.width, setup.heads, setup.context)
    params = list(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in params if change else ():
            param.add_(torch.randn(param.shape, generator=generator), alpha=change)
    masters = params if published is None else [param.detach().clone() for param in params]
    adam = torch.optim.AdamW(masters, setup.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    rates = LambdaLR(adam, partial(warm_up_and_cosine, bench.steps, bench.warmup))
    corpus = Corpus.load(None, setup.context)
    shape = (setup.batch, setup.context)
    losses = []
    for step in range(bench.steps):
        data = [batch(corpus.train, shape, seed, step, rank) for rank in range(RANKS)]
        if spec is None:  # one batch has the same mean
            data = [
                (torch.cat(tokens), torch.cat(targets))
                for tokens, targets in [zip(*data, strict=True)]
            ]
        total = [torch.zeros_like(param) for param in params]
        loss_sum = 0.0
        messages = list[Tensor]()
        with as_gathered(params, of_weights):
            for tokens, targets in data:
                loss = model(tokens, targets)
                grads = torch.autograd.grad(loss, params)
                loss_sum += float(loss.detach())
                if spec is None:
                    total = list(grads)
                    continue
                messages.append(
                    ops.quantize(at_blocks(_shards(grads, OF_NODE), spec.block_size), spec)
                )
                if len(messages) == summed:
                    scatter(messages, total, spec)
                    messages.clear()
        for master, grad in zip(masters, total, strict=True):
            master.grad = grad.div_(len(data))
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        adam.step()
        if published is not None:
            publish(masters, params, published)
        rates.step()
        losses.append(loss_sum / len(data))
    with torch.no_grad(), as_gathered(params, of_weights):
        stored = [
            float(model(*batch(corpus.evaluation, shape, EVALUATION_SEED, k, rank)))
            for k in range(EVALUATION_BATCHES)
            for rank in range(RANKS)
        ]
    return {"losses": losses, "evaluation": sum(stored) / len(stored), "crossing_bytes": None}


def scatter(messages: Sequence[Tensor], total: Sequence[Tensor], spec: BlockSpec) -> None:
    """Add the gradients of one rank, or of the ranks of a GPU, to the totals, as the owners of
    their node receive them.

    Args:
        messages: of each rank, ``[owners, bytes]``; each parameter begins a block.
        total: the sums, changed in place.
        spec: their format.
    """
    written = at_blocks(_shards(total, OF_NODE), spec.block_size)
    found = messages[0]
    if len(messages) > 1:
        found = ops.requantize(
            torch.stack(list(messages)), spec, torch.empty_like(found), total_numel(written)
        )
    ops.dequantize(found, spec, written, accumulate=True)


@torch.no_grad()
def publish(masters: Sequence[Tensor], params: Sequence[Tensor], spec: BlockSpec) -> None:
    """Move the weights that all ranks store by their quantized differences from the masters, as
    ``publish.delta``.
    """
    changes = [master - param for master, param in zip(masters, params, strict=True)]
    read, written = (
        at_blocks(_shards(tensors, OF_NODE), spec.block_size) for tensors in (changes, params)
    )
    ops.dequantize(ops.quantize(read, spec), spec, written, accumulate=True)


@contextmanager
def as_gathered(params: Sequence[Tensor], spec: BlockSpec | None) -> Iterator[None]:
    """Within, the weights are those that the GCDs of a GPU gather from each other; afterwards the
    exact ones again.
    """
    exact = [] if spec is None else [param.detach().clone() for param in params]
    if spec is not None:
        with torch.no_grad():
            read, written = (
                at_blocks(_shards(tensors, OF_GPU), spec.block_size) for tensors in (exact, params)
            )
            ops.dequantize(ops.quantize(read, spec), spec, written)
    yield
    with torch.no_grad():
        for param, values in zip(params, exact, strict=False):
            param.copy_(values)


def _shards(tensors: Sequence[Tensor], ranks: int) -> list[View]:
    plan = Plan(OF_NODE, 1, None, OF_NODE, OF_NODE)
    return [shard_view(tensor.detach().contiguous().view(-1), plan, ranks) for tensor in tensors]
