# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""AdamS: the momentum itself as the normalizer (Zhang et al., "AdamS", 2025; as SCAPE, arXiv 2607.01678, uses it).

At step ``t``, counted from 1, with gradient ``g``, momentum ``m`` and weights ``w``:

1. ``v = b2 * m ** 2 + (1 - b2) * g ** 2``, of the momentum as it was: no second moment is kept;
2. ``m = b1 * m + (1 - b1) * g``;
3. ``w -= lr * ((m / (1 - b1 ** t)) / (sqrt(v / (1 - b2 ** t)) + eps) + weight_decay * w)``.

Where ``m`` and ``g`` are both zero an element only decays. Its state is 4 bytes an element, half of Adam's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zero_topo.sync.adam_like import AdamLike


class AdamS(AdamLike):
    """The optimizer, in the style of ``torch.optim``; usable alone, or by ``"optimizer": {"type": "AdamS"}``.

    Args:
        foreach: update all parameters of a group in calls over lists; None does if they lie on an accelerator.
        settings: ``eps`` and ``weight_decay``; they and the others as :class:`AdamLike` says.

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
        foreach: bool | None = None,
        **settings: float,
    ) -> None:
        super().__init__(params, lr, betas, **settings)
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
        """Parameters that one call over lists may update: of one device, type and step count."""
        found: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in params:
            found.setdefault((p.device, p.dtype, self.state[p]["step"]), []).append(p)
        return list(found.values())

    def _update_together(self, params: list[Tensor], group: dict[str, Any]) -> None:
        (b1, b2), rate, count = group["betas"], float(group["lr"]), int(self.state[params[0]]["step"])
        grads = [p.grad.to(p.dtype) for p in params if p.grad is not None]
        moments = [self.state[p]["exp_avg"] for p in params]
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
