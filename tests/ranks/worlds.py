# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Plans, models and engines for tests whose ranks are threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.bare import bare_engine, matrices
from tests.device import DEVICE
from tests.harness import R, run_threads
from zero_topo.config import SPARSE_MODES, ResolvedConfig, ZeroTopoConfig, resolve_config
from zero_topo.engine.stage3 import Stage3
from zero_topo.plan import Plan
from zero_topo.sync import Moment
from zero_topo.sync.scape import Scape
from zero_topo.sync.sparse import Sparse
from zero_topo.topology.model import Topology
from zero_topo.topology.presets import emulated

NUMELS = (1, 7, 64, 501, 1280)
"""Parameter sizes: one element, smaller than the world, odd, and larger than a block."""

PARAM_INDICES = tuple(range(len(NUMELS)))
PLAIN = {"weights": None, "secondary": None, "gradients": None}
"""The block ``quantize`` that quantizes nothing."""

SCHEMES = ("zero3", "zero++", "hsdp", "paper", "topo")
Q4: dict[str, Any] = {"mode": "quantized"}
OKTOPK: dict[str, Any] = {"mode": "oktopk", "tau": 2, "tau_prime": 2}
SPARSE: dict[str, dict[str, Any]] = {
    **{kind.MODE: {"mode": kind.MODE} for kind in SPARSE_MODES if kind.MODE != "scape"},
    "oktopk": OKTOPK,
    "sharded": {**OKTOPK, "sharded": True},
    "radius": {"mode": "radius", "start": 1, "interval": 2},
}
"""Settings of the sparse modes that any plan may have: a new mode is tested by all rules."""

CODES: dict[str, Any] = {"scheme": "topo", "quantize": {"resident": "int8"}}
BLOCKS: dict[str, dict[str, Any]] = {
    **{scheme: {"scheme": scheme, "quantize": PLAIN} for scheme in SCHEMES},
    "quantized": {"scheme": "topo", "quantize": {"weights": "int8", "secondary": "int8"}},
    "zero++ quantized": {
        "scheme": "zero++",
        "quantize": {"weights": "int8", "gradients": "int4"},
    },
    "q4": {"scheme": "topo", "sync": Q4},
    "two groups": {"scheme": "topo", "gradients": "gpu", "quantize": PLAIN},
    "two groups, q4": {"scheme": "topo", "gradients": "gpu", "optimizer": "node", "sync": Q4},
    "ring": {"scheme": "topo", "quantize": PLAIN, "sync": {"mode": "dense", "reduce": "ring"}},
    "two groups, ring": {
        "scheme": "topo",
        "gradients": "gpu",
        "quantize": PLAIN,
        "sync": {"reduce": "ring"},
    },
    "all-reduce": {"scheme": "topo", "sync": {"mode": "dense", "reduce": "all_reduce"}},
    "scape": {"scheme": "topo", "optimizer": "node", "sync": {"mode": "scape", "warmup": 0}},
    "scape, by parameter": {
        "scheme": "topo",
        "optimizer": "node",
        "sync": {"mode": "scape", "warmup": 0, "select": "parameter"},
    },
    "codes": CODES,
    "topo-zero2": {**CODES, "scheme": "topo-zero2"},
    "codes, q4": {**CODES, "sync": Q4},
    "codes, oktopk": {**CODES, "sync": OKTOPK},
    **{name: {"scheme": "topo", "sync": sync} for name, sync in SPARSE.items()},
}
"""Every scheme and mode, in the tests of what they all must keep."""

COMBINED = (
    "all-reduce",
    "ring",
    "topo-zero2",
    "codes, q4",
    "codes, oktopk",
)
"""Those that differ from others in what these tests do not look at."""


@dataclass(frozen=True)
class World:
    """A machine, a config on it, the parameters' elements, those that a run may have at most, and
    the type of weights and gradients.
    """

    config: ResolvedConfig
    numels: tuple[int, ...]
    chunk: int = 1 << 20
    dtype: torch.dtype = torch.float32

    def engine(
        self,
        dtype: torch.dtype | None = None,
        chunk: int | None = None,
        loss_scale: Callable[[], float] = lambda: 1.0,
        moments: Callable[[], Sequence[Moment]] = tuple,
        persistent: Sequence[int] = (),
        order: tuple[int, ...] = (),
        whole: Sequence[int] = (),
    ) -> Stage3:
        """This rank's engine, weights still zero; some parameters are persistent, some are updated
        as whole matrices.
        """
        parameters = [
            replace(
                p,
                persistent=param_index in persistent,
                place=order[param_index] if order else param_index,
                whole=param_index in whole,
            )
            for param_index, p in enumerate(matrices(self.numels))
        ]
        return bare_engine(
            self.config,
            parameters,
            dtype or self.dtype,
            chunk or self.chunk,
            loss_scale,
            moments,
            device=DEVICE,
        )

    def on_ranks(self, work: Callable[..., R], *args: Any) -> list[R]:
        """What ``work(rank, *args)`` returns on every rank, each a thread."""
        return run_threads(self.size, work, *args)

    def params(self) -> list[Tensor]:
        """The same whole parameters on every rank; not to be written to."""
        return drawn(self.numels, 7)

    def grads(self, rank: int, step: int = 0, dtype: torch.dtype | None = None) -> list[Tensor]:
        """A rank's own whole gradients; of a world of FP16 with so few bits that a loss scale
        changes none.
        """
        grads = drawn(self.numels, 1000 * step + rank)
        if self.dtype == torch.float16:
            grads = [grad.bfloat16() for grad in grads]
        return [grad.to(dtype or self.dtype, copy=True) for grad in grads]

    def own_columns(self, rank: int, grads: list[Tensor]) -> Tensor:
        """A rank's own row of whole gradients."""
        return torch.cat([shards(self.config.plan, grad)[rank] for grad in grads])

    def own_mean(self, rank: int, step: int) -> Tensor:
        """A rank's own row of the mean over all ranks' gradients of a step."""
        rounded = torch.float32 if self.dtype == torch.float32 else torch.bfloat16
        return self.own_columns(rank, mean(self.numels, self.size, step, rounded))

    @property
    def columns(self) -> int:
        """Of a gradient shard."""
        return sum(self.config.plan.shard_numel(n) for n in self.numels)

    @property
    def size(self) -> int:
        """Ranks."""
        return self.config.plan.world_size


def shards(plan: Plan, x: Tensor) -> Tensor:
    """A whole tensor, padded, as a row for each rank."""
    width = plan.shard_numel(x.numel())
    return torch.cat([x, x.new_zeros(plan.world_size * width - x.numel())]).view(
        plan.world_size, width
    )


@lru_cache(maxsize=128)
def drawn(numels: tuple[int, ...], seed: int) -> list[Tensor]:
    """Normal values of these sizes; not to be written to."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator, dtype=torch.float32).to(DEVICE) for n in numels]


@lru_cache(maxsize=16)
def mean(
    numels: tuple[int, ...], ranks: int, step: int, rounded: torch.dtype = torch.float32
) -> list[Tensor]:
    """Of all ranks' whole gradients of a step, of some type; not to be written to."""
    sums = [torch.zeros(())] * len(numels)
    for rank in range(ranks):
        grads = drawn(numels, 1000 * step + rank)
        sums = [total + grad.to(rounded).float() for total, grad in zip(sums, grads, strict=True)]
    return [total / ranks for total in sums]


def world(
    block: dict[str, object], machine: Topology | None = None, numels: tuple[int, ...] = NUMELS
) -> World:
    """A world from a ``zero_topo`` block; by default on 2 nodes x 2 GPUs x 2 GCDs."""
    return World(resolve_config(ZeroTopoConfig.parse(block), machine or emulated(2, 2, 2)), numels)


def shuffled(machine: Topology, seed: int = 3) -> Topology:
    """The same machine with ranks placed at random."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(machine.world_size, generator=generator).tolist()
    return replace(machine, order=tuple(order))


def loaded(w: World) -> Stage3:
    """An engine that has put the rank's own shard of each parameter where DeepSpeed keeps it,
    published.
    """
    engine = w.engine()
    row = engine.weights.own_row[None]
    for index, param in enumerate(w.params()):
        own = shards(w.config.plan, param)[engine.layout.rank]
        engine.layout.parameter(row, index)[0].copy_(own)
    engine.weights.publish_world()
    return engine


def synced(engine: Stage3, grads: Sequence[Tensor], peeks: bool = False) -> Tensor:
    """One last micro-batch, perhaps a read of the synced gradient, and sync; what the optimizer
    gets, ``[R, F]``.
    """
    engine.gradients.scatter(range(len(grads)), grads, last=True)
    if peeks:
        engine.gradients.peek()
    engine.gradients.sync()
    return engine.gradients.optimizer_rows().clone()


def owned(engine: Stage3) -> Tensor:
    """The rank's own row, synced."""
    return engine.gradients.buffer[engine.layout.row(engine.layout.plan.gradients)].clone()


def residual_table(mode: Sparse) -> Tensor:
    """The residual in the columns of a gradient shard, FP32 ``[P, F]``, zero in other columns; of
    SCAPE with the momentum that waits at its owner.
    """
    table = mode._zeros(mode.context.columns)
    rows = mode.residual_rows()
    for parameter, (first, past) in zip(mode._included, mode._places, strict=True):
        begin, end = parameter.shard_range
        if rows is not None:
            table[:, begin:end] = rows[:, first:past]
        if isinstance(mode, Scape):
            table[mode.peers.index, begin:end] += mode._state.momentum[first:past]
    return table
