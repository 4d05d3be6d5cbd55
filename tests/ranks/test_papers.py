# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Each sparse paper's algorithm, written line by line from the paper in FP64, and the engine next
to it, step by step, in every hierarchy.

The references have all ranks in one process and no communication. `docs/sparse.md` names this
file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from tests.marks import late
from tests.ranks.sync_cases import PLACES, sync_world
from tests.ranks.trainer import Trainer
from tests.ranks.worlds import World, owned, shards, synced
from zero_topo import AdamS
from zero_topo.config.sparse_base import share
from zero_topo.config.tagc_config import LEAST_BLOCKS
from zero_topo.topology.presets import emulated

STEPS, RATE = 30, 0.05
SIZES = (7, 64, 501, 1280)
"""Some are smaller than the world, or not a multiple of it; two sub-groups of the optimizer."""


def gradients_of(w: World, rank: int, step: int) -> list[Tensor]:
    """A rank's gradient: one that all share for five steps, and noise, so that ranks select some
    in common.
    """
    noise = w.grads(rank, step)
    return [g + 0.5 * own for g, own in zip(w.grads(999, step // 5), noise, strict=True)]


class Paper:
    """All ranks of a world in one process. Each tensor is FP64 and has a row for each place of the
    tree, ``[N, F]``; what each of the peers has, or sends, is ``[P, N, F]``.

    Each rank of a peer has the rows of its own group of peers.
    """

    optimizer: Callable[[list[Tensor]], Optimizer] = partial(SGD, lr=RATE)

    def __init__(self, w: World, clip: float) -> None:
        plan = w.config.plan
        self.w, self.clip = w, clip
        self.sync: Any = w.config.sync
        self.width = plan.stages(plan.gradients, w.size)[-1][0]  # ranks of a peer
        self.peers = w.size // self.width
        self.widths = [plan.shard_numel(numel) for numel in w.numels]
        self.weights = torch.ones(w.size, w.columns, dtype=torch.float64, requires_grad=True)
        self.updates = type(self).optimizer([self.weights])
        self.residual = torch.zeros(self.peers, w.size, w.columns, dtype=torch.float64)
        self.steps = 0

    def gradients(self) -> Tensor:
        """Each peer's part of the mean of all ranks' gradients of a step."""
        found = torch.zeros_like(self.residual)
        plan = self.w.config.plan
        for place, rank in enumerate(plan.rank_at):
            grads = gradients_of(self.w, rank, self.steps)
            rows = torch.cat([shards(plan, grad) for grad in grads], dim=1)
            found[place // self.width] += rows[list(plan.rank_at)]
        self.steps += 1
        return found / self.w.size

    def clipped(self, gradient: Tensor) -> Tensor:
        """The gradient with its norm clipped."""
        factor = min(1.0, self.clip / float(gradient.norm())) if self.clip else 1.0
        return gradient * factor

    def update(self, gradient: Tensor) -> Tensor:
        """Step the optimizer; return how far each weight moved."""
        before = self.weights.detach().clone()
        self.weights.grad = self.clipped(gradient)
        self.updates.step()
        return (self.weights.detach() - before).abs()

    def largest(self, x: Tensor, density: float, by_row: bool) -> Tensor:
        """Mask of the largest elements of each rank's rows together, or of each row's part of each
        parameter or run.
        """
        if not by_row:
            tables = x.abs().view(-1, self.peers, self.width, self.w.columns).transpose(1, 2)
            flat = tables.flatten(2)
            least = flat.topk(share(density, flat.shape[2])).values[..., -1]
            return x.abs() >= least.tile(self.peers).view(*x.shape[:-1], 1)
        runs = [sum(self.widths[:-1]), self.widths[-1]]  # by their largest size
        parts = {"parameter": self.widths, "run": runs, "all": [self.w.columns]}
        found = []
        for part in x.abs().split(parts[self.sync.select], dim=-1):
            least = part.topk(share(density, part.shape[-1])).values[..., -1:]
            found.append(part >= least)
        return torch.cat(found, dim=-1)

    def step(self) -> None:
        """One optimizer step of the paper."""
        raise NotImplementedError


class Radius(Paper):
    """Algorithms 1 and 2. The score is AdamW's own update, and the mask is chosen of each
    parameter's part of each row.
    """

    optimizer = partial(AdamW, lr=RATE, weight_decay=0.1)

    def step(self) -> None:
        place = self.steps - self.sync.start
        gradient = self.gradients()
        if place < 0:
            self.update(gradient.sum(dim=0))
        elif place % self.sync.interval == 0:
            moved = self.update((gradient + self.residual).sum(dim=0))
            self.residual.zero_()
            masks = []
            for scores in moved.split(self.widths, dim=1):
                count = max(1, int(self.sync.density * scores.shape[1]))
                masks.append(scores >= scores.topk(count, dim=1).values[:, -1:])
            self.mask = torch.cat(masks, dim=1)
        else:
            self.residual += torch.where(self.mask, 0.0, gradient)
            self.update(torch.where(self.mask, gradient, 0.0).sum(dim=0))


class Tagc(Paper):
    """Algorithm 1: accumulation, a threshold at the share theta, the sum of what ranks selected."""

    def step(self) -> None:
        self.residual += self.gradients()
        by_row = self.sync.select == "parameter"
        selected = self.largest(self.residual, 1 - self.sync.theta, by_row)
        self.update(torch.where(selected, self.residual, 0.0).sum(dim=0))
        self.residual[selected] = 0


class OkTopk(Paper):
    """Algorithms 1 and 2, with exact thresholds in every step."""

    def step(self) -> None:
        self.residual += self.gradients()
        by_row = self.sync.select == "run"
        local = self.largest(self.residual, self.sync.density, by_row)
        sums = torch.where(local, self.residual, 0.0).sum(dim=0)
        chosen = self.largest(sums, self.sync.density, by_row)
        self.update(torch.where(chosen, sums, 0.0))
        self.residual[local & chosen] = 0


class Sharded(Paper):
    """Ok-Topk whose sums stay with their owners, of which each adds all of its own row."""

    def step(self) -> None:
        self.residual += self.gradients()
        owner = torch.arange(self.w.size) // self.width
        own = owner == torch.arange(self.peers)[:, None]
        others = self.residual.masked_fill(own[..., None], 0)
        open_share = self.sync.density * (self.peers - 1) / self.peers
        sent = self.largest(others, open_share, False)
        sums = torch.where(sent, others, 0.0).sum(dim=0) + (self.residual - others).sum(dim=0)
        chosen = self.largest(sums, self.sync.density, False)
        self.update(torch.where(chosen, sums, 0.0))
        self.residual[sent] = 0
        self.residual[own] = torch.where(chosen, 0.0, sums)


class Scape(Paper):
    """Steps 1 to 7: delay, feedback, rebuild, clipping, AdamS and decay, in units of the
    momentum.
    """

    BETAS = (0.9, 0.95)
    EPS = 1e-8
    DECAY = 0.1
    optimizer = partial(AdamS, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)

    def __init__(self, w: World, clip: float) -> None:
        super().__init__(w, clip)
        self.m = torch.zeros(w.size, w.columns, dtype=torch.float64)
        self.mask = torch.ones_like(self.m, dtype=torch.bool)

    @torch.no_grad()
    def step(self) -> None:
        b1, b2 = self.BETAS
        local = self.gradients() * self.peers
        mt = b1 * self.m + (1 - b1) * local + self.residual
        b = mt.mean(dim=0)
        g = self.clipped(torch.where(self.mask, (b - b1 * self.m) / (1 - b1), 0.0))
        after = torch.where(self.mask, b1 * self.m + (1 - b1) * g, 0.0)
        v = torch.where(self.mask, b2 * self.m**2 + (1 - b2) * g**2, 0.0)
        denominator = (v / (1 - b2**self.steps)).sqrt() + self.EPS
        update = after / (1 - b1**self.steps) / denominator
        self.weights -= RATE * (update + self.DECAY * self.weights)
        self.residual = torch.where(self.mask, 0.0, mt)
        owners = torch.arange(self.w.size) // self.width
        score = mt[owners, torch.arange(self.w.size)]
        self.m = after
        self.mask = self.largest(score, self.sync.density_at(self.steps), True)


def trained(w: World, kind: type[Paper], clip: float) -> list[list[Tensor]]:
    """The optimizer rows ``[R, F]`` of weights that each rank has after each step."""

    def rank_main(rank: int) -> list[Tensor]:
        trainer = Trainer(w, rank, kind.optimizer)
        found = []
        for step in range(STEPS):
            rows = synced(trainer.engine, gradients_of(w, rank, step))
            total = owned(trainer.engine).double().pow(2).sum().view(1)
            dist.all_reduce(total)
            factor = min(1.0, clip / float(total.sqrt())) if clip else 1.0
            trainer.update(rows * factor, lambda group: RATE)
            trainer.engine.end_step(skipped=False)
            found.append(trainer.table(trainer.masters).clone())
        return found

    return w.on_ranks(rank_main)


EXACT = {"tau": 1, "tau_prime": 1}
SKETCHED = 2 * LEAST_BLOCKS * 1024
PAPERS: dict[str, tuple[type[Paper], str, dict[str, Any]]] = {
    "radius": (Radius, "radius", {"density": 0.25, "interval": 6, "start": 4}),
    "tagc": (Tagc, "tagc", {"theta": 0.9}),
    "tagc by parameter": (Tagc, "tagc", {"theta": 0.9, "select": "parameter"}),
    "tagc by sketch": (Tagc, "tagc", {"theta": 0.96875, "peers": 2, "numels": (SKETCHED,)}),
    "oktopk": (OkTopk, "oktopk", EXACT),
    "oktopk by run": (OkTopk, "oktopk", {"select": "run", "chunk": 1024}),
    "sharded": (Sharded, "sharded", EXACT),
    "scape": (Scape, "scape", {"density": 0.1, "start_density": 0.5, "warmup": 2}),
    "scape by parameter": (Scape, "scape", {"warmup": 0, "select": "parameter", "chunk": 1024}),
    "scape by run": (Scape, "scape", {"warmup": 0, "select": "run", "chunk": 1024}),
}


def cases() -> Iterator[Any]:
    """Every paper in every place that it may have; a sketch needs long rows."""
    for name, place in product(PAPERS, PLACES):
        if name == "sharded" and place not in ("topo", "owned"):
            continue
        if name == "tagc by sketch" and place != "data parallel":
            continue
        often = place == "topo" or name == "radius"
        yield (name, place) if often else late(name, place)


@pytest.mark.parametrize(("name", "place"), list(cases()))
def test_every_step_is_the_papers(name: str, place: str) -> None:
    """The weights of every rank: what was selected, sent, added up, kept for later and clipped."""
    kind, mode, more = PAPERS[name]
    machine = emulated(3, 1, 2) if place == "replicated optimizer" else None
    given = {"numels": SIZES, "value_dtype": "fp32", "machine": machine, **more}
    w = sync_world(mode, place, **given)
    clip = 0.0 if place == "data parallel" else 1.0
    paper = kind(w, clip)
    found = trained(w, kind, clip)
    plan = w.config.plan
    for step in range(STEPS):
        paper.step()
        for rank, weights in enumerate(found):
            rows = [plan.position(owner) for owner in plan.rows(rank, plan.optimizer)]
            expected = paper.weights[rows].detach().float()
            torch.testing.assert_close(weights[step], expected, atol=1e-6, rtol=1e-6)
