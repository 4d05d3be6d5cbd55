# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The package's own optimizers, AdamS and AgedAdamW.

What arrives
    Sparse sync gives the optimizer an element's sum only in some steps. An element has arrived if
    its sum is not zero. A dense gradient that is zero (an embedding's row that no token used)
    therefore waits as well; AdamW would update it by its momentum.

Note [Ages]
    The number of steps that an element has waited is one byte of state, so a wait counts as at most
    256 steps. A skipped step does not call the optimizer, so ages do not change.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_topo.quant import ops

OLDEST = 255  # the most steps that a byte can store


class AdamLike(Optimizer):
    """An optimizer in the style of ``torch.optim``, with Adam's settings and decoupled weight
    decay.

    Args:
        params: parameters or parameter groups, as for any torch optimizer; contiguous.
        lr: learning rate, not negative.
        betas: decay rates of the momentum and of its normalizer, each at least 0 and below 1; None
            takes :attr:`BETAS`.
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
            raise ValueError(
                f"{name}: betas are {betas}; give two numbers, each at least 0 and below 1"
            )
        super().__init__(
            params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        )

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
                    raise ValueError(
                        f"{name}: a sparse gradient tensor; convert it with .to_dense() first"
                    )
                self._prepare(p)
                self.state[p]["step"] += 1
            self._update(params, group)
        return loss

    @abstractmethod
    def _prepare(self, p: Tensor) -> None:
        """Create the state of a parameter if it is missing, with ``step`` 0."""

    @abstractmethod
    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Update the parameters of a group that have gradients; their ``step`` is incremented
        already.
        """


class AdamS(AdamLike):
    """AdamS: the momentum itself as the normalizer (Zhang et al., "AdamS", 2025; SCAPE, arXiv
    2607.01678, uses it).

    At step ``t``, counted from 1, with gradient ``g``, momentum ``m`` and weights ``w``:

    1. ``v = b2 * m ** 2 + (1 - b2) * g ** 2``, of the momentum as it was: no second moment is kept;
    2. ``m = b1 * m + (1 - b1) * g``;
    3. ``w -= lr * ((m / (1 - b1 ** t)) / (sqrt(v / (1 - b2 ** t)) + eps) + weight_decay * w)``.

    An element whose ``m`` and ``g`` are both zero only decays. The state is 4 bytes per element,
    half of Adam's.

    Usable alone, or by ``"optimizer": {"type": "AdamS"}``.

    Args:
        foreach: update all parameters of a group by calls over lists; None does so on an
            accelerator only.
        settings: ``eps`` and ``weight_decay`` of :class:`AdamLike`, which defines the other
            arguments too.

    Raises:
        ValueError: for a setting out of range.
    """

    BETAS = (0.9, 0.95)
    WEIGHT_DECAY = 0.0

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] | None = None,
        *,
        eps: float = 1e-8,
        weight_decay: float | None = None,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps=eps, weight_decay=weight_decay)
        self._foreach = foreach

    def _prepare(self, p: Tensor) -> None:
        if not self.state[p]:
            self.state[p] |= {"step": 0, "exp_avg": torch.zeros_like(p)}

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        on_accelerator = bool(params) and params[0].device.type != "cpu"
        together = on_accelerator if self._foreach is None else self._foreach
        for batch in self._batches(params) if together else [[p] for p in params]:
            self._update_together(batch, group)

    def _batches(self, params: list[Tensor]) -> list[list[Tensor]]:
        """Group parameters that one call over lists may update: of one device, dtype and step
        count.
        """
        batches: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in params:
            batches.setdefault((p.device, p.dtype, self.state[p]["step"]), []).append(p)
        return list(batches.values())

    def _update_together(self, params: list[Tensor], group: dict[str, Any]) -> None:
        b1, b2 = group["betas"]
        rate = float(group["lr"])
        count = int(self.state[params[0]]["step"])
        grads = [p.grad.to(p.dtype) for p in params if p.grad is not None]
        moments = [self.state[p]["exp_avg"] for p in params]
        # Of the momentum as it was, before this gradient.
        norms = torch._foreach_mul(moments, moments)
        torch._foreach_mul_(norms, b2 / (1 - b2**count))
        torch._foreach_addcmul_(norms, grads, grads, (1 - b2) / (1 - b2**count))
        torch._foreach_sqrt_(norms)
        torch._foreach_add_(norms, group["eps"])
        torch._foreach_mul_(moments, b1)
        torch._foreach_add_(moments, grads, alpha=1 - b1)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        torch._foreach_addcdiv_(params, moments, norms, -rate / (1 - math.pow(b1, count)))


class AgedAdamW(AdamLike):
    """AdamW for sums of several steps' gradients: it weights each sum by its number of steps.

    With error feedback an element that is not selected waits in a residual, and arrives as the sum
    of its gradients since it was last sent. AdamW treats that sum as one gradient: its second
    moment then grows with the square of the wait, while its momentum has decayed. Here an element
    whose sum ``g`` arrives after ``a`` steps (1 if it arrived in the last step too) moves by all of
    it at once: the wait has averaged it already, and momentum would only delay it further.

    1. ``v = b2 ** a * v + (1 - b2 ** a) * g ** 2 / a``, because the square of a sum of ``a`` noisy
       gradients is ``a`` times as large;
    2. ``m = b1 * m + (1 - b1) * g``;
    3. if ``a`` is 1, AdamW's step:
       ``w -= lr * m / (1 - b1 ** t) / (sqrt(v / (1 - b2 ** t)) + eps)``;
    4. else ``w -= lr * m / (1 - b1) / (sqrt(v / (1 - b2 ** t)) + eps)``, as far as this and all
       later steps would move it by ``m``; then ``m = 0``, so that each gradient counts once.

    Moments of elements that do not arrive are unchanged. All weights decay by
    ``1 - lr * weight_decay``, as in AdamW. If every element arrives in every step, the result
    equals ``torch.optim.AdamW`` but for the last bit of a square root. Noisy gradients that arrive
    in sums move a weight as far as single ones under AdamW; a constant gradient moves it more
    slowly, by the root of ``a``.

    Usable alone, or by ``"optimizer": {"type": "AgedAdamW"}``. One kernel updates an FP32
    parameter.

    The state is that of AdamW plus one byte per element; the arguments are those of
    :class:`AdamLike`.
    """

    BETAS = (0.9, 0.999)
    WEIGHT_DECAY = 0.01

    @cached_property
    def _tables(self) -> dict[tuple[Any, ...], Tensor]:
        """The tables of :meth:`_table` by device, dtype and beta; they are not saved with the
        optimizer.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, and convert ages back to uint8: torch casts all state to the
        parameters' dtype.
        """
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if "age" in state:
                # Ages are small integers: they survive FP32 and FP16, and BF16 to 256.
                state["age"] = state["age"].to(torch.uint8)

    def _prepare(self, p: Tensor) -> None:
        """Create missing state as zeros: all of it, or only the ages if AdamW's state was
        loaded.
        """
        state = self.state[p]
        state.setdefault("step", 0)
        for key, dtype in (("exp_avg", p.dtype), ("exp_avg_sq", p.dtype), ("age", torch.uint8)):
            if key not in state:
                state[key] = torch.zeros_like(p, dtype=dtype)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        b1, b2 = group["betas"]
        rate = float(group["lr"])
        for p in params:
            state = self.state[p]
            table = self._table(p, b2)
            count = int(state["step"])
            # With Adam's corrections of both moments' bias after `count` steps.
            settings = [
                1 - rate * group["weight_decay"],
                (1 - b2**count) ** 0.5,
                group["eps"],
                -rate / (1 - b1**count),
                -rate / (1 - b1),
                1 - b1,
            ]
            parts = (p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["age"])
            ops.aged_adamw(
                [part.detach().view(-1) for part in parts if part is not None], table, settings
            )

    def _table(self, p: Tensor, b2: float) -> Tensor:
        """Return the table of ``ops.aged_adamw``."""
        key = (p.device, p.dtype, b2)
        if key not in self._tables:
            # Column 0 is an element without an arrival: nothing of it changes.
            steps = range(1, OLDEST + 2)
            rows = (1.0, *(b2**a for a in steps)), (0.0, *((1 - b2**a) / a for a in steps))
            self._tables[key] = torch.tensor(rows, dtype=p.dtype, device=p.device)
        return self._tables[key]
