# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One rank's engine and optimizer, for the modes of sync that look at what the optimizer does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.ranks.worlds import World, synced
from zero_topo import AdamS
from zero_topo.engine.stage3 import Stage3
from zero_topo.sync import Moment


def usual_rate(group: int) -> float:
    """The learning rate of a sub-group: always the same."""
    return 0.01


class Trainer:
    """An optimizer on masters in two sub-groups, all of one value at first, stepped as the hook
    steps them.

    Attributes:
        scale: of the loss, and so of the gradients.
    """

    def __init__(
        self,
        w: World,
        rank: int,
        optimizer: Callable[[list[Tensor]], Optimizer] = AdamS,
        start: float = 1.0,
        persistent: Sequence[int] = (),
    ) -> None:
        self.w, self.rank, self.persistent, self.scale = w, rank, persistent, 1.0
        self.engine = self._built()
        self.height, columns = self.engine.gradients.optimizer_rows().shape
        cut = self.engine.layout.edges[-3] if len(w.numels) > 2 else 0
        self.columns = [(0, cut), (cut, columns)] if cut else [(0, columns)]
        sizes = [self.height * (end - begin) for begin, end in self.columns]
        self.masters = [
            torch.full((size,), start, dtype=torch.float32, requires_grad=True) for size in sizes
        ]
        self.optimizer = optimizer(self.masters)

    def moments(self) -> Sequence[Moment]:
        """As the hook gives them."""
        beta = self.optimizer.param_groups[0]["betas"][0]
        found = []
        for (begin, _), master in zip(self.columns, self.masters, strict=True):
            if "exp_avg" in self.optimizer.state[master]:
                mean = self.optimizer.state[master]["exp_avg"]
                found.append(Moment(begin, mean.view(self.height, -1), beta))
        return found

    def _built(self) -> Stage3:
        return self.w.engine(
            moments=self.moments, loss_scale=lambda: self.scale, persistent=self.persistent
        )

    def resume(self) -> None:
        """Save, and load into a new engine."""
        state = self.engine.gradients.mode.state_dict()
        self.engine = self._built()
        self.engine.gradients.mode.load_state_dict({k: v.clone() for k, v in state.items()})

    def sync(self, step: int, peeks: bool = False) -> Tensor:
        """One micro-batch and sync; the optimizer's rows, without the loss scale."""
        grads = [self.scale * grad for grad in self.w.grads(self.rank, step)]
        return synced(self.engine, grads, peeks) / self.scale

    def skipped(self, step: int) -> None:
        """A step that overflows."""
        self.sync(step)
        self.engine.end_step(skipped=True)

    def step(self, step: int, rate: Callable[[int], float] = usual_rate) -> Tensor:
        """A whole optimizer step; the rows that the optimizer gets."""
        rows = self.sync(step)
        self.update(rows, rate)
        self.engine.end_step(skipped=False)
        return rows

    def update(self, rows: Tensor, rate: Callable[[int], float] = usual_rate) -> None:
        """Steps the sub-groups with these gradients, each at its learning rate."""
        for group, (master, (begin, end)) in enumerate(
            zip(self.masters, self.columns, strict=True)
        ):
            master.grad = rows[:, begin:end].reshape(-1).float()
            self.optimizer.param_groups[0] |= {"params": [master], "lr": rate(group)}
            with self.engine.watched(master, begin, rate(group)):
                self.optimizer.step()

    def table(self, flats: Sequence[Tensor]) -> Tensor:
        """What is kept for each sub-group flat, as optimizer rows ``[R, F]``."""
        return torch.cat([flat.detach().reshape(self.height, -1) for flat in flats], dim=1)


def computed(
    w: World,
    steps: int,
    disturb: Callable[[Trainer, int], None] = lambda trainer, step: None,
    rate: Callable[[int, int], float] = lambda step, group: usual_rate(group),
) -> list[Tensor]:
    """All that each rank computes in some steps, each of which may be disturbed before it: rows,
    masters and state.
    """

    def rank_main(rank: int) -> Tensor:
        trainer, rows = Trainer(w, rank), list[Tensor]()
        for step in range(steps):
            disturb(trainer, step)
            rows.append(trainer.step(step, partial(rate, step)))
        mode = trainer.engine.gradients.mode
        fallbacks = torch.tensor(mode.report().get("fallbacks", 0.0))
        found = (*rows, *trainer.masters, *mode.state_dict().values(), fallbacks)
        return torch.cat([tensor.detach().flatten().double() for tensor in found])

    return w.on_ranks(rank_main)
