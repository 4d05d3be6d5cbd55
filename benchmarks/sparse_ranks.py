# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What each rank of ``benchmarks sparse`` runs: one mode of sync after another on the same
gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import isqrt
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from benchmarks.bare import bare_engine, matrices
from benchmarks.control import Control
from benchmarks.records import Spread
from benchmarks.sparse import ALL_REDUCE, POWER_SGD, UNBALANCED
from zero_topo.config import ZeroTopoConfig, resolve_config
from zero_topo.config.sparse_config import share
from zero_topo.engine.stage3 import Stage3
from zero_topo.examples.data import Corpus, batch
from zero_topo.examples.gpt import GPT
from zero_topo.examples.process import behave
from zero_topo.leaving import leave
from zero_topo.quant.operators import select
from zero_topo.sync import Moment, oktopk
from zero_topo.sync.oktopk import OkTopk
from zero_topo.sync.selection import Selected
from zero_topo.sync.sparse import Sparse
from zero_topo.topology.presets import emulated

WORD = 4
RATE = 0.05
BETA = 0.9
LAYERS = 2
HEAD = 16
CONTEXT = 64


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
    """Gradients with heavy tails: cubes of normal numbers, half of them common to all ranks and
    lasting.
    """

    def __init__(self, numel: int) -> None:
        rows = next(rows for rows in range(isqrt(numel), 0, -1) if numel % rows == 0)
        self.shapes = [torch.Size((rows, numel // rows))]
        self._common = torch.randn(numel, generator=torch.Generator().manual_seed(1)) ** 3

    def gradients(self, step: int) -> list[Tensor]:
        """Of this rank."""
        generator = torch.Generator().manual_seed(1000 * (step + 1) + dist.get_rank())
        return [self._common + torch.randn(self._common.numel(), generator=generator) ** 3]

    def update(self, synced: Tensor) -> None:
        """They do not depend on the weights."""


def model_for(numel: int) -> GPT:
    """A GPT of two layers with about so many parameters, in heads of 16."""
    heads = max(1, round((numel / (12 * LAYERS)) ** 0.5 / HEAD))
    return GPT(LAYERS, HEAD * heads, heads, CONTEXT)


class Model:
    """Gradients of the example's GPT, trained by plain SGD with what the mode delivers."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(1)
        self._model = model_for(numel)
        self._parameters = list(self._model.parameters())
        self._text = Corpus.load(None, CONTEXT).train
        self.shapes = [p.shape for p in self._parameters]

    def gradients(self, step: int) -> list[Tensor]:
        """Of this rank, on its own text."""
        self._model.zero_grad()
        self._model(*batch(self._text, (4, CONTEXT), 0, step, dist.get_rank())).backward()
        return [p.grad.reshape(-1) for p in self._parameters if p.grad is not None]

    @torch.no_grad()
    def update(self, synced: Tensor) -> None:
        """One step of SGD."""
        for parameter, gradient in zip(self._parameters, parts(synced, self.shapes), strict=True):
            parameter.sub_(gradient, alpha=RATE)


class AllReduce:
    """Torch's all-reduce of one vector with the gradients of all parameters.

    Attributes:
        words: the numbers that a rank passes to all-reduces in a step.
        residual: what this rank has not sent yet, FP32 ``[n]``.
        exchange: seconds that the last reduction spent in collectives; None if all of it counts.
    """

    exchange: float | None = None

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        self.words = sum(shape.numel() for shape in shapes)
        self.residual, self._vector = torch.zeros(self.words), torch.zeros(self.words)

    def add(self, gradients: Sequence[Tensor]) -> Tensor:
        """Take this rank's gradients of a step; return its part of their mean, FP32 ``[n]``."""
        self._vector = torch.cat(list(gradients)) / dist.get_world_size()
        return self._vector.clone()

    def reduce(self) -> None:
        """Sum over the ranks what :meth:`add` returned on each."""
        dist.all_reduce(self._vector)

    def end(self) -> tuple[Tensor, float]:
        """End a step; return the sum, FP32 ``[n]``, and the bytes that this rank sent for it."""
        return self._vector, 2 * WORD * self.words * (1 - 1 / dist.get_world_size())


class PowerSgd(AllReduce):
    """Torch's communication hook PowerSGD, which takes all gradients as one bucket of
    DistributedDataParallel.
    """

    def __init__(self, shapes: Sequence[torch.Size], rank: int) -> None:
        super().__init__(shapes)
        self._shapes = shapes
        # The hook reduces the first two steps uncompressed, which is the least it accepts with
        # error feedback.
        self._state = PowerSGDState(None, rank, start_powerSGD_iter=2)

    def reduce(self) -> None:
        """Sum low-rank factors of the matrices, and the vectors."""
        before = self._state.total_numel_after_compression
        gradients = list(parts(self._vector, self._shapes))
        bucket: Any = SimpleNamespace(
            buffer=lambda: self._vector,
            gradients=lambda: gradients,
            index=lambda: 0,
            is_last=lambda: True,
        )
        powerSGD_hook(self._state, bucket).wait()
        self._vector *= dist.get_world_size()  # the hook computes the mean
        self.words = self._state.total_numel_after_compression - before
        self.residual = self._state.error_dict.get(0, self.residual)


class Mode:
    """Reduces with a mode of sync, in an FP32 engine; its gradient buffer alone is used.

    It has the methods and attributes of :class:`AllReduce`.
    """

    def __init__(self, shapes: Sequence[torch.Size], block: dict[str, Any]) -> None:
        config = resolve_config(ZeroTopoConfig.parse(block), emulated(dist.get_world_size(), 1, 1))
        parameters = matrices([shape.numel() for shape in shapes])
        parameters = [
            replace(p, dims=len(shape)) for p, shape in zip(parameters, shapes, strict=True)
        ]
        self.optimizer = Optimizer()
        self.engine = bare_engine(
            config, parameters, moments=lambda: self.optimizer.moments(self.engine)
        )
        self._shapes = shapes
        self._sparse = (
            self.engine.gradients.mode if isinstance(self.engine.gradients.mode, Sparse) else None
        )
        self.exchange = 0.0
        if self._sparse is not None:
            for name in ("gather", "gather_known", "all_to_all", "all_to_all_known"):
                setattr(self._sparse.peers, name, self._timed(getattr(self._sparse.peers, name)))

    def add(self, gradients: Sequence[Tensor]) -> Tensor:
        """Add this rank's gradients to its shard."""
        self.engine.gradients.scatter(range(len(self._shapes)), gradients, last=False)
        return self.flat(self.engine.gradients.buffer)

    @property
    def residual(self) -> Tensor:
        """What this rank has not sent yet, FP32 ``[n]``."""
        table = self.engine.gradients.buffer
        return self.flat(
            torch.zeros_like(table) if self._sparse is None else self._sparse.residual_table()
        )

    def reduce(self) -> None:
        """Run the mode."""
        self.exchange = 0.0
        self.engine.gradients.sync()

    def end(self) -> tuple[Tensor, float]:
        """Show the mode an optimizer's step, and end the engine's."""
        rows = self.engine.gradients.optimizer_rows()
        synced = self.flat(rows)
        self.optimizer.step(self.engine, rows)
        self.engine.end_step(skipped=False)
        return synced, sum(
            n for (phase, _), n in self.engine.meter.last_step.items() if phase == "sync"
        )

    def flat(self, table: Tensor) -> Tensor:
        """The elements of all parameters without padding, ``[n]``, of a table of their shards."""
        shard_ranges = self.engine.layout.shard_ranges(range(len(self._shapes)))
        shards = zip(shard_ranges, self._shapes, strict=True)
        return torch.cat(
            [table[:, begin:end].reshape(-1)[: shape.numel()] for (begin, end), shape in shards]
        )

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            self.exchange += time.perf_counter() - began
            return result

        return timed


class Unbalanced(OkTopk):
    """Ok-Topk without its balancing, which its Figure 7 compares: regions are equally wide, and all
    chosen sums of a region are sent by its owner.
    """

    def _balanced(self, selected: Selected) -> Tensor:
        return self.fresh().bounds

    def _spread(self, own: Selected, counts: list[int]) -> tuple[Selected, list[int]]:
        return own, counts


def reducer(job: dict[str, Any], shapes: Sequence[torch.Size]) -> AllReduce | Mode:
    """What reduces the gradients of a job."""
    scheme = job["scheme"]
    if scheme == ALL_REDUCE:
        return AllReduce(shapes)
    if scheme in POWER_SGD:
        return PowerSgd(shapes, POWER_SGD[scheme])
    with patch.object(oktopk, "OkTopk", Unbalanced if scheme == UNBALANCED else OkTopk):
        return Mode(shapes, job["block"])


def measure(settings: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """One mode; the same numbers on every rank."""
    source = (Synthetic if job["source"] == "synthetic" else Model)(settings["numel"])
    reduces = reducer(job, source.shapes)
    sparse = torch.cat([torch.full((shape.numel(),), len(shape) > 1) for shape in source.shapes])
    k = share(job["density"], int(sparse.sum()))
    numel = len(sparse)
    rows = []
    for step in range(settings["warmup"] + settings["steps"]):
        sums = torch.stack([reduces.add(source.gradients(step)), reduces.residual]).double()
        dist.all_reduce(sums)
        gradient = sums[0]
        wanted = sums.sum(dim=0)
        took = _timed(reduces.reduce)
        exchange = took if reduces.exchange is None else reduces.exchange
        synced, sent = reduces.end()
        source.update(synced)
        error = float((synced - wanted).norm() / wanted.norm())
        rows.append(
            [took, exchange, sent, error, xi(synced[sparse], gradient[sparse], wanted[sparse], k)]
        )
    if isinstance(reduces, Mode):
        reduces.engine.mesh.destroy()
    most = torch.tensor(rows[settings["warmup"] :], dtype=torch.float64).T
    mean = most.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(mean)
    _, _, sent, error, difference = (mean.mean(dim=1) / dist.get_world_size()).tolist()
    return {
        "mode": job["scheme"],
        "density": job["density"],
        "source": job["source"],
        "ranks": dist.get_world_size(),
        "numel": numel,
        "bytes_per_rank": sent,
        "bytes_busiest": float(most[2].mean()),
        "words_per_k": sent / WORD / share(job["density"], numel),
        "seconds": Spread.of(most[0].tolist()).to_json(),
        "exchange_s": Spread.of(most[1].tolist()).median,
        "error": error,
        "xi": difference,
    }


def xi(synced: Tensor, gradient: Tensor, wanted: Tensor, k: int) -> float:
    """Return the ratio that Assumption 1 of Ok-Topk bounds by xi (its Figure 5): L2 norms of two
    vectors, of

    - the difference between the sums that a mode delivers and the ``k`` largest of the sums that it
      could deliver,
    - the sum of the ranks' gradients.

    Args:
        synced: the delivered sums.
        gradient: the sum over the ranks of their gradients, FP64.
        wanted: the sum over the ranks of gradient and residual, FP64.
        k: the number of elements to select.
    """
    best = wanted.abs().topk(k).indices
    return float(
        (synced - torch.zeros_like(wanted).index_copy_(0, best, wanted[best])).norm()
        / gradient.norm()
    )


def parts(vector: Tensor, shapes: Sequence[torch.Size]) -> Iterator[Tensor]:
    """Views of consecutive parts of a vector in these shapes."""
    pieces = vector.split([shape.numel() for shape in shapes])
    return (piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))


class Optimizer:
    """SGD on weights that nobody reads, and a momentum: for the modes that look at an optimizer's
    updates and state.
    """

    def __init__(self) -> None:
        self._weights = self._mean = torch.empty(0)

    def moments(self, engine: Stage3) -> list[Moment]:
        """As an engine asks for them."""
        return [Moment(0, self._mean, BETA)] if self._mean.numel() else []

    def step(self, engine: Stage3, rows: Tensor) -> None:
        """One step, shown to the mode."""
        if not self._mean.numel():
            self._weights, self._mean = torch.zeros_like(rows), torch.zeros_like(rows)
        with engine.watched(self._weights.view(-1), 0, RATE):
            self._mean.mul_(BETA).add_(rows, alpha=1 - BETA)
            self._weights.sub_(rows, alpha=RATE)


def _timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes, which all ranks begin together."""
    dist.barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
