# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the package's own optimizers have in common: Adam's settings, checked, and the walk over the parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer


class AdamLike(Optimizer):
    """An optimizer in the style of ``torch.optim``, with Adam's settings and decoupled weight decay.

    Args:
        params: parameters or parameter groups, as for any torch optimizer; contiguous.
        lr: learning rate, not negative.
        betas: decay rates of momentum and of what it is divided by, each at least 0 and below 1; None takes
            :attr:`BETAS`.
        eps: added to the square root, not negative.
        weight_decay: decoupled, not negative; None takes :attr:`WEIGHT_DECAY`.

    Raises:
        ValueError: for a setting out of range.
    """

    BETAS: ClassVar[tuple[float, float]]
    WEIGHT_DECAY: ClassVar[float]

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] | None = None,
        *,
        eps: float = 1e-8,
        weight_decay: float | None = None,
    ) -> None:
        name = type(self).__name__
        betas = self.BETAS if betas is None else betas
        weight_decay = self.WEIGHT_DECAY if weight_decay is None else weight_decay
        for setting, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name}: {setting} is {value}; it must not be negative")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{name}: betas are {betas}; give two numbers, each at least 0 and below 1")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the loss with gradients; its value is returned.

        Raises:
            ValueError: for a sparse gradient tensor.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if p.grad.is_sparse:
                    name = type(self).__name__
                    raise ValueError(f"{name}: a sparse gradient tensor; convert it with .to_dense() first")
                self._prepare(p)
                self.state[p]["step"] += 1
            self._update(params, group)
        return loss

    @abstractmethod
    def _prepare(self, p: Tensor) -> None:
        """Bring the state of a parameter into being, if it is not there; ``step`` is 0 then."""

    @abstractmethod
    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """One step of the parameters of a group that have gradients; their steps are counted already."""
