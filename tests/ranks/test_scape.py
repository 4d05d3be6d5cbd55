# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""SCAPE: step by step what the paper's formulas give, in its own units; at density 1, AdamS with
the dense gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bare import fake_world
from tests.harness import run_threads
from tests.marks import late, often
from tests.ranks.sync_cases import PLACES, residuals_of, summed
from tests.ranks.trainer import Trainer
from tests.ranks.worlds import NUMELS, PLAIN, World, owned, world
from zero_topo import AdamS
from zero_topo.config.sparse_config import ScapeSync
from zero_topo.topology.presets import emulated

BETAS = (0.9, 0.95)
RATE, DECAY, EPS = 0.02, 0.1, 1e-8
CLIP = 0.7
SETTINGS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "hierarchy": (PLACES["replicated optimizer"], (2, 2, 2)),
    "three nodes": (PLACES["replicated optimizer"], (3, 1, 2)),
    "algorithm 2": (PLACES["owned"], (4, 1, 1)),
    "optimizer over the world": ({"scheme": "topo", "gradients": "gpu"}, (2, 2, 2)),
    "gradients in a gpu": ({"scheme": "topo", "gradients": "gpu", "optimizer": "node"}, (2, 2, 2)),
    "a group in the node first": (PLACES["gradients in a GPU"], (2, 2, 2)),
    "data parallel": (PLACES["data parallel"], (4, 1, 1)),
    "data parallel over nodes": (PLACES["data parallel"], (2, 2, 1)),
}
FEW = ("hierarchy", "algorithm 2", "a group in the node first")


def scape_world(setting: str, numels: tuple[int, ...] = NUMELS, **sync: Any) -> World:
    """A world with the mode and nothing quantized."""
    block, shape = SETTINGS[setting]
    block = {**block, "quantize": PLAIN, "sync": {"mode": "scape", **sync}}
    return world(block, emulated(*shape), numels)


def gradient_rows(w: World, step: int, ranks: Sequence[int]) -> Tensor:
    """The mean over the world of some ranks' gradients, FP64 ``[N, F]``, row ``t`` that of tree
    position ``t``.
    """
    total = torch.zeros(w.size, w.columns, dtype=torch.float64)
    for rank in ranks:
        grads = w.grads(rank, step)
        total += torch.stack([w.own_columns(owner, grads) for owner in w.config.plan.rank_at])
    return total / w.size


class Reference:
    """SCAPE as printed, on whole rows of the world in FP64: residuals in units of the momentum,
    clipping rebuilt.
    """

    def __init__(self, w: World, mode: ScapeSync, clip: float) -> None:
        plan = w.config.plan
        self.w, self.mode, self.clip = w, mode, clip
        inner = plan.stages(plan.gradients, plan.world_size)
        self.width = inner[-1][0]  # ranks of one peer
        self.peers = plan.world_size // self.width
        vectors = sum(plan.shard_numel(n) for n in w.numels if n == 1)
        shape = (w.size, w.columns)
        self.takes = torch.ones(shape, dtype=torch.bool)
        self.takes[:, :vectors] = False
        self.mask = torch.ones(shape, dtype=torch.bool)
        self.residual = torch.zeros(self.peers, *shape, dtype=torch.float64)
        self.m, self.weights, self.count = (
            torch.zeros(shape).double(),
            torch.ones(shape).double(),
            0,
        )

    def step(self, step: int) -> None:
        """Steps 1 to 7 of the paper's algorithm."""
        b1, b2 = BETAS
        self.count += 1
        plan = self.w.config.plan
        parts = [
            [plan.rank_at[p * self.width + i] for i in range(self.width)] for p in range(self.peers)
        ]
        local = torch.stack([gradient_rows(self.w, step, ranks) * self.peers for ranks in parts])
        mt = b1 * self.m + (1 - b1) * local + self.residual
        b = mt.mean(dim=0)
        g = torch.where(self.mask, (b - b1 * self.m) / (1 - b1), 0.0)
        norm = float(g.norm())
        g *= min(1.0, self.clip / norm) if self.clip else 1.0
        after = torch.where(self.mask, b1 * self.m + (1 - b1) * g, 0.0)
        v = torch.where(self.mask, b2 * self.m**2 + (1 - b2) * g**2, 0.0)
        update = after / (1 - b1**self.count) / ((v / (1 - b2**self.count)).sqrt() + EPS)
        self.weights -= RATE * (update + DECAY * self.weights)
        self.residual = torch.where(self.mask, 0.0, mt)
        self.m, self.mask = after, self._choose(mt)

    def _choose(self, mt: Tensor) -> Tensor:
        chosen = ~self.takes
        for row in range(self.w.size):
            columns = self.takes[row].nonzero()[:, 0]
            for part in columns.split(self._widths()):
                score = mt[row // self.width, row, part].abs()
                count = max(1, -int(-self.mode.density_at(self.count) * len(part) // 1))
                chosen[row, part[torch.topk(score, count).indices]] = True
        return chosen

    def _widths(self) -> list[int]:
        """The columns of each part that selects the same share; a run has all parameters but the
        last.
        """
        widths = [self.w.config.plan.shard_numel(n) for n in self.w.numels if n > 1]
        runs = {"parameter": widths, "run": [sum(widths[:-1]), widths[-1]], "all": [sum(widths)]}
        return runs[self.mode.select]


class Seen(NamedTuple):
    """After a step of one rank: optimizer rows ``[R, F]`` of weights and momentum."""

    weights: Tensor
    momentum: Tensor


class Run(Trainer):
    """With AdamS, clipped by the global norm as the hook does it."""

    def __init__(self, w: World, rank: int, clip: float = 0.0) -> None:
        super().__init__(
            w, rank, lambda masters: AdamS(masters, RATE, BETAS, eps=EPS, weight_decay=DECAY), 1.0
        )
        self.clip = clip

    def step(self, step: int) -> Seen:
        """A whole step."""
        rows = self.sync(step)
        self.update(rows * self._clipping(), lambda group: RATE)
        self.engine.end_step(skipped=False)
        return Seen(self.table(self.masters), self.table([m.mean for m in self.moments()]))

    def _clipping(self) -> float:
        """The factor, of the norm over distinct rows, of which each rank counts its own."""
        total = (owned(self.engine).double() ** 2).sum().view(1)
        dist.all_reduce(total)
        return min(1.0, self.clip / float(total.sqrt())) if self.clip else 1.0


def train(w: World, steps: int, clip: float = 0.0) -> list[list[Seen]]:
    """Steps of every rank."""

    def rank_main(rank: int) -> list[Seen]:
        trainer = Run(w, rank, clip)
        return [trainer.step(step) for step in range(steps)]

    return run_threads(w.size, rank_main)


def check_against_reference(w: World, results: list[list[Seen]], clip: float) -> None:
    """Weights and momentum of an implementation in the paper's own units."""
    assert isinstance(w.config.sync, ScapeSync)
    reference, plan = Reference(w, w.config.sync, clip), w.config.plan
    for step in range(6):
        reference.step(step)
        for rank, found in enumerate(results):
            rows = [plan.position(r) for r in plan.rows(rank, plan.optimizer)]
            expected = reference.weights[rows].float()
            real = [i for i, n in enumerate(expected.abs().sum(dim=1)) if n]
            torch.testing.assert_close(
                found[step].momentum[real], reference.m[rows].float()[real], atol=2e-6, rtol=1e-5
            )
            torch.testing.assert_close(
                found[step].weights[real], expected[real], atol=2e-5, rtol=2e-5
            )


@pytest.mark.parametrize(
    ("setting", "clip"),
    [*((setting, CLIP) for setting in SETTINGS), *((setting, 0.0) for setting in FEW)],
)
def test_every_step_is_the_papers(setting: str, clip: float) -> None:
    """Delay, feedback, rebuild, clipping, decay; the density of the first two steps is higher."""
    w = scape_world(setting, density=0.1, start_density=0.5, warmup=2)
    check_against_reference(w, train(w, 6, clip), clip)


@pytest.mark.parametrize("select", ["parameter", "run"])
@pytest.mark.parametrize("setting", often(FEW, SETTINGS))
def test_each_parameter_or_run_may_have_a_share_of_its_own(setting: str, select: str) -> None:
    """However small its momentum is next to the others'; two runs are synced one by one."""
    w = replace(scape_world(setting, density=0.1, select=select), chunk=1024)
    check_against_reference(w, train(w, 6), 0.0)


@pytest.mark.parametrize(
    ("numel", "density", "value_dtype"),
    [(2, 0.5, "fp32"), late(1000, 0.01, "bf16"), (30_000, 0.3, "bf16")],
)
@pytest.mark.parametrize("setting", often(FEW, SETTINGS))
def test_nothing_is_lost(setting: str, numel: int, density: float, value_dtype: str) -> None:
    """``m' + sum of e' = b m + (1 - b) mean of g + sum of e`` in every element, rounding of values
    included.
    """
    w = scape_world(setting, (numel,), density=density, value_dtype=value_dtype)
    b1 = BETAS[0]

    def rank_main(rank: int) -> list[tuple[Tensor, list[tuple[int, Tensor]]]]:
        trainer, found = Run(w, rank), []
        row = trainer.engine.layout.row(w.config.plan.optimizer)
        for step in range(4):
            own = trainer.step(step).momentum[row]
            found.append((own, residuals_of(trainer.engine)))
        return found

    results = run_threads(w.size, rank_main)
    before = [torch.zeros(w.columns) for _ in range(w.size)]
    for step in range(4):
        every = summed(w, [found[step][1] for found in results])
        residuals = [(1 - b1) * residual for residual in every]
        for rank in range(w.size):
            now = results[rank][step][0] + residuals[rank]
            torch.testing.assert_close(
                now, b1 * before[rank] + (1 - b1) * w.own_mean(rank, step), atol=1e-5, rtol=1e-5
            )
            # The momentum decays at the next step, the residual does not.
            before[rank] = results[rank][step][0] + residuals[rank] / b1


def test_another_optimizer_is_refused() -> None:
    """By the mode, whoever built the optimizer."""
    w = scape_world("data parallel")
    with (
        fake_world(w.size),
        pytest.raises(ValueError, match="AdamS"),
    ):
        w.engine().gradients.mode.check_optimizer(
            torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
        )
