# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Each sparse paper's algorithm, written line by line from the paper in FP64, and the engine next
to it for 30 steps.

The references have all workers in one process and no communication. `docs/sparse.md` names this
file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from tests.harness import run_threads
from tests.ranks.sync_cases import mode_of, sync_world
from tests.ranks.trainer import Trainer
from tests.ranks.worlds import World, synced
from zero_topo.config.tagc_config import LEAST_BLOCKS

STEPS, LR = 30, 0.05
LAYERS = (2048, 512)
Building = Callable[[list[Tensor]], Optimizer]


def gradients_of(w: World, rank: int, step: int) -> list[Tensor]:
    """A worker's gradient: one that all share for five steps, and noise, so that workers select
    some in common.
    """
    return [
        g + 0.5 * noise
        for g, noise in zip(w.grads(999, step // 5), w.grads(rank, step), strict=True)
    ]


class Algorithm:
    """A model of all workers in one process: FP64 weights ``[owners, columns]``, an optimizer,
    clipping.
    """

    def __init__(self, w: World, optimizer: Building, clip: float, **sync: Any) -> None:
        self.w, self.clip, self.sync = w, clip, sync
        self.weights = torch.ones(w.size, w.columns, dtype=torch.float64, requires_grad=True)
        self.optimizer = optimizer([self.weights])
        self.residual = torch.zeros(w.size, w.size, w.columns, dtype=torch.float64)

    def gradients(self, step: int) -> Tensor:
        """All workers' gradients, FP64 ``[workers, owners, columns]``, divided by the number of
        workers.
        """
        workers = [gradients_of(self.w, rank, step) for rank in range(self.w.size)]
        rows = [
            [self.w.own_columns(owner, grads) for owner in range(self.w.size)] for grads in workers
        ]
        return torch.stack([torch.stack(row) for row in rows]).double() / self.w.size

    def update(self, gradient: Tensor) -> Tensor:
        """Step the optimizer with ``[owners, columns]``; return how far each weight moved."""
        before = self.weights.detach().clone()
        norm = float(gradient.norm())
        self.weights.grad = gradient * min(1.0, self.clip / norm) if self.clip else gradient
        self.optimizer.step()
        return (self.weights.detach() - before).abs()

    def step(self, step: int) -> None:
        """One optimizer step of the paper."""
        raise NotImplementedError


class RadiusAlgorithm(Algorithm):
    """Radius, Algorithms 1 and 2. The score is AdamW's own update, and the mask is chosen in each
    owner's slices.
    """

    def step(self, step: int) -> None:
        start, interval = self.sync["start"], self.sync["interval"]
        gradient = self.gradients(step)
        if step < start:
            self.update(gradient.sum(dim=0))
        elif (step - start) % interval == 0:
            moved = self.update((gradient + self.residual).sum(dim=0))
            self.residual.zero_()
            self.mask = torch.zeros_like(moved, dtype=torch.bool)
            widths = [numel // self.w.size for numel in LAYERS]
            for scores, mask in zip(
                moved.split(widths, dim=1), self.mask.split(widths, dim=1), strict=True
            ):
                count = int(self.sync["density"] * scores.shape[1])
                mask.scatter_(1, scores.topk(count, dim=1).indices, True)
        else:
            self.residual += torch.where(self.mask, 0.0, gradient)
            self.update(torch.where(self.mask, gradient, 0.0).sum(dim=0))


class TagcAlgorithm(Algorithm):
    """TAGC, Algorithm 1: accumulation, a threshold at the share theta, the sum of what workers
    selected.
    """

    def step(self, step: int) -> None:
        self.residual += self.gradients(step)
        count = round((1 - self.sync["theta"]) * self.residual[0].numel())
        least = self.residual.flatten(1).abs().topk(count).values[:, -1]
        selected = self.residual.abs() >= least[:, None, None]
        self.update(torch.where(selected, self.residual, 0.0).sum(dim=0))
        self.residual[selected] = 0


class OkTopkAlgorithm(Algorithm):
    """Ok-Topk, Algorithms 1 and 2, with exact thresholds in every step."""

    def step(self, step: int) -> None:
        self.residual += self.gradients(step)
        k = round(self.sync["density"] * self.residual[0].numel())
        local = (
            self.residual.abs() >= self.residual.flatten(1).abs().topk(k).values[:, -1, None, None]
        )
        sums = torch.where(local, self.residual, 0.0).sum(dim=0)
        chosen = sums.abs() >= sums.flatten().abs().topk(k).values[-1]
        self.update(torch.where(chosen, sums, 0.0))
        self.residual[local & chosen] = 0


def trained(w: World, optimizer: Building, clip: float) -> list[Tensor]:
    """The engine's weights on every rank after all steps, ``[owners, columns]``: each rank has all
    of them.
    """

    def rank_main(rank: int) -> Tensor:
        trainer = Trainer(w, rank, optimizer, 1.0)
        for step in range(STEPS):
            rows = synced(trainer.engine, gradients_of(w, rank, step))
            scale = min(1.0, clip / float(rows.double().norm())) if clip else 1.0
            trainer.update(rows * scale, lambda group: LR)
            trainer.engine.end_step(skipped=False)
        assert (
            mode_of(trainer.engine).report().get("ratio", 1) > 0 or w.columns < LEAST_BLOCKS * 1024
        )
        return trainer.table(trainer.masters)

    return run_threads(w.size, rank_main)


@pytest.mark.parametrize("clip", [0.0, 1.0], ids=["free", "clipped"])
@pytest.mark.parametrize(
    ("algorithm", "mode", "workers", "numels", "sync"),
    [
        (RadiusAlgorithm, "radius", 4, LAYERS, {"density": 0.25, "interval": 6, "start": 4}),
        (TagcAlgorithm, "tagc", 3, (3000,), {"theta": 0.9}),
        # Through a sketch
        (TagcAlgorithm, "tagc", 2, (2 * LEAST_BLOCKS * 1024,), {"theta": 0.96875}),
        (OkTopkAlgorithm, "oktopk", 4, (2000, 500), {"density": 0.02, "tau": 1, "tau_prime": 1}),
    ],
    ids=str,
)
def test_weights_after_thirty_steps_are_the_algorithms(
    algorithm: type[Algorithm],
    mode: str,
    workers: int,
    numels: tuple[int, ...],
    sync: dict[str, Any],
    clip: float,
) -> None:
    """Element by element, on every rank: what was selected, sent, added up, kept for later and
    clipped.
    """
    w = sync_world(mode, "data parallel", workers, numels, value_dtype="fp32", **sync)
    optimizer: Building = (
        partial(AdamW, lr=LR, weight_decay=0.1) if mode == "radius" else partial(SGD, lr=LR)
    )
    reference = algorithm(w, optimizer, clip, **sync)
    for step in range(STEPS):
        reference.step(step)
    for weights in trained(w, optimizer, clip):
        torch.testing.assert_close(
            weights.double(), reference.weights.detach(), atol=1e-6, rtol=1e-6
        )
