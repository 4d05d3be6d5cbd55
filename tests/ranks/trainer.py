# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One rank's engine and optimizer, for the modes of sync that look at what the optimizer does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.ranks.worlds import World, resumed, synced
from zero_topo.sync import Moment


class Trainer:
    """An optimizer on masters in two sub-groups, all of one value at first, stepped as the hook steps them."""

    def __init__(
        self,
        w: World,
        rank: int,
        optimizer: Callable[[list[Tensor]], Optimizer],
        start: float,
        persistent: Sequence[int] = (),
    ) -> None:
        self.w, self.rank = w, rank
        self.engine = w.engine(moments=self.moments, persistent=persistent)
        self.height, columns = self.engine.gradients.optimizer_rows().shape
        cut = self.engine.layout.begins[-2] if len(w.numels) > 2 else 0
        self.columns = [(0, cut), (cut, columns)] if cut else [(0, columns)]
        sizes = [self.height * (end - begin) for begin, end in self.columns]
        self.masters = [torch.full((size,), start, requires_grad=True) for size in sizes]
        self.optimizer = optimizer(self.masters)

    def moments(self) -> Sequence[Moment]:
        """As the hook gives them."""
        begins = [begin for begin, _ in self.columns]
        groups = self.optimizer.param_groups * len(begins)
        return self.engine.masters.moments(self.optimizer.state, self.masters, begins, groups)

    def resume(self) -> None:
        """Save, and load into a new engine."""
        self.engine = resumed(self.engine, self.w.engine(moments=self.moments))

    def sync(self, step: int, peeks: bool = False) -> Tensor:
        """One micro-batch and sync; the optimizer's rows."""
        return synced(self.engine, self.w.grads(self.rank, step), peeks)

    def skipped(self, step: int) -> None:
        """A step that overflows."""
        self.sync(step)
        self.engine.end_step(skipped=True)

    def update(self, rows: Tensor, rate: Callable[[int], float]) -> None:
        """Steps the sub-groups with these gradients, each at its learning rate."""
        for group, (master, (begin, end)) in enumerate(zip(self.masters, self.columns, strict=True)):
            master.grad = rows[:, begin:end].reshape(-1)
            self.optimizer.param_groups[0] |= {"params": [master], "lr": rate(group)}
            with self.engine.watched(master, begin, rate(group)):
                self.optimizer.step()

    def table(self, flats: Sequence[Tensor]) -> Tensor:
        """What is kept for each sub-group flat, as optimizer rows ``[R, F]``."""
        return torch.cat([flat.detach().reshape(self.height, -1) for flat in flats], dim=1)
