# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""SCAPE as its paper prints it, in one process: what the mode's tests compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ranks.worlds import World
from zero_topo.config import ScapeSync


@dataclass(frozen=True)
class Settings:
    """Of AdamS, and the norm to which gradients are clipped (0: not at all)."""

    rate: float
    betas: tuple[float, float]
    eps: float
    decay: float
    clip: float


def gradient_rows(w: World, step: int, ranks: Sequence[int]) -> Tensor:
    """The mean over the world of some ranks' gradients, FP64 ``[N, F]``, row ``t`` that of tree position ``t``."""
    total = torch.zeros(w.size, w.columns, dtype=torch.float64)
    for rank in ranks:
        grads = w.grads(rank, step)
        total += torch.stack([w.own_columns(owner, grads) for owner in w.config.plan.rank_at])
    return total / w.size


class Reference:
    """SCAPE as printed, on whole rows of the world in FP64: residuals in units of the momentum, clipping rebuilt."""

    def __init__(self, w: World, mode: ScapeSync, adams: Settings) -> None:
        plan = w.config.plan
        self.w, self.mode, self.adams = w, mode, adams
        inner = plan.route(plan.gradients, plan.world_size)
        self.width = inner[-1][0]  # ranks of one peer
        self.peers = plan.world_size // self.width
        vectors = sum(plan.shard_numel(n) for n in w.numels if n == 1)
        shape = (w.size, w.columns)
        self.takes = torch.ones(shape, dtype=torch.bool)
        self.takes[:, :vectors] = False
        self.mask = torch.ones(shape, dtype=torch.bool)
        self.owed = torch.zeros(self.peers, *shape, dtype=torch.float64)
        self.m, self.weights, self.count = torch.zeros(shape).double(), torch.ones(shape).double(), 0

    def step(self, step: int) -> None:
        """Steps 1 to 7 of the paper's algorithm."""
        adams, (b1, b2) = self.adams, self.adams.betas
        self.count += 1
        plan = self.w.config.plan
        parts = [[plan.rank_at[p * self.width + i] for i in range(self.width)] for p in range(self.peers)]
        local = torch.stack([gradient_rows(self.w, step, ranks) * self.peers for ranks in parts])
        mt = b1 * self.m + (1 - b1) * local + self.owed
        b = mt.mean(dim=0)
        g = torch.where(self.mask, (b - b1 * self.m) / (1 - b1), 0.0)
        norm = float(g.norm())
        g *= min(1.0, adams.clip / norm) if adams.clip else 1.0
        after = torch.where(self.mask, b1 * self.m + (1 - b1) * g, 0.0)
        v = torch.where(self.mask, b2 * self.m**2 + (1 - b2) * g**2, 0.0)
        update = after / (1 - b1**self.count) / ((v / (1 - b2**self.count)).sqrt() + adams.eps)
        self.weights -= adams.rate * (update + adams.decay * self.weights)
        self.owed = torch.where(self.mask, 0.0, mt)
        self.m, self.mask = after, self._choose(mt)

    def _choose(self, mt: Tensor) -> Tensor:
        chosen = ~self.takes
        for row in range(self.w.size):
            columns = self.takes[row].nonzero()[:, 0]
            score = mt[row // self.width, row, columns].abs()
            count = max(1, -int(-self.mode.density_at(self.count) * len(columns) // 1))
            chosen[row, columns[torch.topk(score, count).indices]] = True
        return chosen
