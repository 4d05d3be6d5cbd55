# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``benchmarks convergence --one-process``: the losses of modes of sync in plain data parallelism,
without DeepSpeed.

Ranks are threads that take turns, and train in FP32. Two runs differ only in what the mode delivers
and in the optimizer. Stock, and any scheme with dense sync, trains the data of all ranks as one
batch: its gradient is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, clamp
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.bare import bare_engine, matrices
from benchmarks.schemes import PLAIN
from benchmarks.training import EVALUATION_BATCHES, build_model, change
from benchmarks.training_setup import TrainingSetup
from tests.harness import run_threads
from zero_topo.config import ZeroTopoConfig, resolve_config
from zero_topo.engine.stage3 import Stage3
from zero_topo.examples.data import Corpus, batch
from zero_topo.examples.gpt import GPT
from zero_topo.examples.train_gpt import EVALUATION_SEED, warm_up_and_cosine
from zero_topo.quant.operators import select
from zero_topo.sync import Moment
from zero_topo.sync.optimizers import AdamS, AgedAdamW
from zero_topo.topology.presets import emulated

OPTIMIZERS: Mapping[str, Any] = MappingProxyType(
    {"AdamW": torch.optim.AdamW, "AdamS": AdamS, "AgedAdamW": AgedAdamW}
)
TIMEOUT_S = 36_000.0
DENSE = "dense"
CLIP = 1.0
text = cache(partial(Corpus.load, None))


def data_parallel(sync: dict[str, Any]) -> dict[str, Any]:
    """The block of plain data parallelism: every rank stores everything, nothing is quantized.

    Where sums stay with their owners (``"sharded"``), the optimizer states are sharded.
    """
    optimizer = "world" if sync.get("sharded") else "rank"
    everything = {"weights": "rank", "gradients": "rank", "optimizer": optimizer}
    return {**everything, "quantize": PLAIN, "sync": sync}


def parts(vector: Tensor, shapes: Sequence[torch.Size]) -> Iterator[Tensor]:
    """Views of consecutive parts of a vector in these shapes."""
    pieces = vector.split([shape.numel() for shape in shapes])
    return (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))


class Mode:
    """Reduces with a mode of sync, in an FP32 engine; its gradient buffer alone is used.

    Attributes:
        engine: the engine.
        optimizer: has ``moments`` and ``step``; set before the first step.
    """

    def __init__(self, shapes: Sequence[torch.Size], block: dict[str, Any]) -> None:
        config = resolve_config(ZeroTopoConfig.parse(block), emulated(dist.get_world_size(), 1, 1))
        parameters = matrices([shape.numel() for shape in shapes])
        parameters = [
            replace(p, dims=len(shape)) for p, shape in zip(parameters, shapes, strict=True)
        ]
        self.optimizer: Any = None
        self.engine = bare_engine(
            config, parameters, moments=lambda: self.optimizer.moments(self.engine)
        )
        self._shapes = shapes

    def reduce(self, gradients: Sequence[Tensor]) -> int:
        """Reduce this rank's gradients and take a step; return the bytes that the mode sent."""
        engine = self.engine
        engine.gradients.scatter(range(len(self._shapes)), gradients, last=False)
        engine.gradients.sync()
        self.optimizer.step(engine, engine.gradients.optimizer_rows())
        engine.end_step(skipped=False)
        sent = engine.meter.last_step.items()
        return sum(nbytes for (phase, _), nbytes in sent if phase == "sync")

    def flat(self, table: Tensor) -> Tensor:
        """The elements of all parameters without padding, ``[n]``, of a table of their shards."""
        shard_ranges = self.engine.layout.shard_ranges(range(len(self._shapes)))
        shards = zip(shard_ranges, self._shapes, strict=True)
        return torch.cat(
            [table[:, begin:end].reshape(-1)[: shape.numel()] for (begin, end), shape in shards]
        )


class Trained:
    """The optimizer of a job, on flat FP32 weights in the layout of their gradients, with clipping
    and a schedule.
    """

    def __init__(
        self, settings: Mapping[str, Any], job: Mapping[str, Any], weights: Tensor
    ) -> None:
        setup = TrainingSetup(**settings["setup"])
        params = {
            **setup.deepspeed(None, 1, "AdamS")["optimizer"]["params"],
            "lr": job.get("lr", setup.lr),
        }
        self._weights = weights.requires_grad_()
        self._adam = OPTIMIZERS[job["optimizer"]]([weights], **params)
        self._schedule = LambdaLR(
            self._adam, partial(warm_up_and_cosine, settings["steps"], settings["warmup"])
        )

    def moments(self, engine: Stage3) -> list[Moment]:
        """As an engine asks for them."""
        mean = self._adam.state.get(self._weights, {}).get("exp_avg")
        beta = self._adam.param_groups[0]["betas"][0]
        return [] if mean is None else [Moment(0, engine.masters.table(mean), beta)]

    def step(self, engine: Stage3, rows: Tensor) -> None:
        """One step, shown to the mode."""
        self._weights.grad = rows.reshape(-1).clone()
        if rows.shape[0] == 1 and dist.get_world_size() > 1:
            squares = self._weights.grad.square().sum()
            dist.all_reduce(squares)  # each rank has the gradients of its own row
            self._weights.grad.mul_(clamp(CLIP / (squares.sqrt() + 1e-6), max=1.0))
        else:
            clip_grad_norm_([self._weights], CLIP)
        with engine.watched(self._weights, 0, self._schedule.get_last_lr()[0]):
            self._adam.step()
        self._schedule.step()


def train(
    settings: Mapping[str, Any], ranks: int, stepped: Callable[..., None], job: Mapping[str, Any]
) -> dict[str, Any]:
    """One run, as ``training.train`` returns it; of the bytes, those that a rank sends in a step
    for sync.
    """
    select(torch.device("cpu"))
    setup = TrainingSetup(**settings["setup"])
    seed = job["seed"]
    corpus = text(setup.context)
    shape = (setup.batch, setup.context)
    start = build_model(setup, seed)
    change(start, job["change"], seed)
    sync = (job["block"] or {}).get("sync", {"mode": DENSE})
    threads = 1 if sync["mode"] == DENSE else ranks

    def loss_of(model: GPT, data: Tensor, seed: int, step: int, of: Iterable[int]) -> Tensor:
        batches = [batch(data, shape, seed, step, rank) for rank in of]
        return model(*map(torch.cat, zip(*batches, strict=True)))

    def train_rank(rank: int) -> tuple[list[float], GPT, float]:
        model = deepcopy(start)
        losses = []
        sent = 0.0
        params = list(model.parameters())
        shapes = [param.shape for param in params]
        mode = Mode(shapes, data_parallel(sync))
        rows = mode.engine.gradients.optimizer_rows()
        shape = (threads, rows.shape[1])
        places = mode.flat(torch.arange(threads * rows.shape[1]).view(shape))
        values = torch.cat([p.detach().view(-1) for p in params])
        table = torch.zeros(shape)
        table.view(-1).index_copy_(0, places, values)
        sharded = rows.shape[0] < threads
        weights = table[rank].clone() if sharded else table.view(-1)
        mode.optimizer = Trained(settings, job, weights)
        for step in range(settings["steps"]):
            loss = loss_of(
                model, corpus.train, seed, step, range(ranks) if threads == 1 else [rank]
            )
            sent += mode.reduce(torch.autograd.grad(loss, params)) / settings["steps"]
            losses.append(float(loss.detach()))
            with torch.no_grad():
                if sharded:
                    dist.all_gather_into_tensor(table, weights.detach().view(1, -1))
                for param, values in zip(
                    params, parts(table.view(-1)[places], shapes), strict=True
                ):
                    param.copy_(values)
            if rank == 0:
                stepped(job, "step")
        return losses, model, sent

    curves, (model, *_), sent = zip(
        *run_threads(threads, train_rank, timeout=TIMEOUT_S), strict=True
    )
    with torch.no_grad():
        last = [
            float(loss_of(model, corpus.evaluation, EVALUATION_SEED, number, range(ranks)))
            for number in range(EVALUATION_BATCHES)
        ]
    return {
        "losses": [sum(of) / threads for of in zip(*curves, strict=True)],
        "evaluation": sum(last) / len(last),
        "crossing_bytes": None if threads == 1 else sum(sent) / threads,
    }
