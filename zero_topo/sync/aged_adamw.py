# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""AdamW for sums of several steps' gradients: each element is told how many steps its sum is of.

With error feedback an element that is not picked waits in a residual, and what comes at last is the sum of its
gradients since it came before. AdamW takes that for one gradient: its second moment then grows with the square of the
wait, while its momentum has faded meanwhile. Here an element at which the sum ``g`` arrives after ``a`` steps (1 if it
came in the last one too) goes as far as ``a`` steps of the mean gradient ``g / a`` would have gone:

1. ``m = b1 ** a * m + (1 - b1 ** a) * g / a``;
2. ``v = b2 ** a * v + (1 - b2 ** a) * g ** 2 / a``, for of noise the square of a sum of ``a`` is ``a`` times as large;
3. ``w -= lr * a * (m / (1 - b1 ** t)) / (sqrt(v / (1 - b2 ** t)) + eps)``.

Where nothing arrives, moments stay. Weights decay everywhere, by ``1 - lr * weight_decay``, as in AdamW. Where every
element arrives in every step it *is* ``torch.optim.AdamW``, to the bit on a CPU. Noisy gradients that come in sums move
a weight as far as AdamW would by single ones; a constant one moves it the more slowly, by the root of ``a``.

Note [What arrives]
    An element has arrived if its sum is not exactly zero. A dense gradient that is zero (an embedding's row that no
    token used) therefore waits as well; AdamW would move it on by its momentum.

Note [Ages]
    The steps that an element has waited are one byte of state, so a wait counts for at most 256 steps. A skipped step
    does not call the optimizer, and nobody ages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zero_topo.sync.adam_like import AdamLike

OLDEST = 255  # steps that a byte can say
FEW = 3  # times more elements wait than come: then those that come are taken out
CHUNK = 1 << 22  # elements updated at once: bounds what is made beside the state


class AgedAdamW(AdamLike):
    """The optimizer, in the style of ``torch.optim``; usable alone, or by ``"optimizer": {"type": "AgedAdamW"}``.

    Its state is that of AdamW, and one byte an element; its arguments are :class:`AdamLike`'s.
    """

    BETAS = (0.9, 0.999)
    WEIGHT_DECAY = 0.01

    @cached_property
    def _tables(self) -> dict[tuple[Any, ...], tuple[Tensor, ...]]:
        """By device, type and betas; none is saved with the optimizer."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any torch optimizer's, which casts all state to the parameters' type: ages stay bytes."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if "age" in state:
                state["age"] = state["age"].to(torch.uint8)

    def _prepare(self, p: Tensor) -> None:
        """What is missing begins at zero: all of it, or the ages, where AdamW's own state was loaded."""
        state = self.state[p]
        state.setdefault("step", 0)
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(p)
        if "age" not in state:
            state["age"] = torch.zeros_like(p, dtype=torch.uint8)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            state = self.state[p]
            table = self._table(p, group["betas"])
            parts = (p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["age"])
            flats = (part.detach().view(-1).split(CHUNK) for part in parts if part is not None)
            for chunk in zip(*flats, strict=True):
                _step(chunk, table, group, int(state["step"]))

    def _table(self, p: Tensor, betas: tuple[float, float]) -> tuple[Tensor, ...]:
        """By steps since an element came, 0 if it does not come now: what multiplies, see :func:`_step`; ``[257]``."""
        key = (p.device, p.dtype, *betas)
        if key not in self._tables:
            (b1, b2), steps = betas, range(1, OLDEST + 2)
            columns = (
                (0.0, *(1 / a for a in steps)),
                (0.0, *(1 - b1**a for a in steps)),
                (1.0, *(b2**a for a in steps)),
                (0.0, *((1 - b2**a) / a for a in steps)),
            )
            self._tables[key] = tuple(torch.tensor(column, dtype=p.dtype, device=p.device) for column in columns)
        return self._tables[key]


def _step(chunk: tuple[Tensor, ...], table: tuple[Tensor, ...], group: dict[str, Any], count: int) -> None:
    """One step of some elements; on a CPU, whose host need not wait, arithmetic is of those alone to which a sum came.

    Args:
        chunk: weights, gradient, both moments and ages, ``[n]`` each.
        table: as :func:`_updated` takes it.
        group: the settings.
        count: steps taken, this one included.
    """
    p, g, mean, square, age = chunk
    few = g.device.type == "cpu" and FEW * int(g.count_nonzero()) < len(g)
    index = g.nonzero()[:, 0] if few else None
    if group["weight_decay"]:
        p.mul_(1 - float(group["lr"]) * group["weight_decay"])
    parts = [part if index is None else part.index_select(0, index) for part in (age, p, g, mean, square)]
    steps = parts.pop(0).int().add_(1)
    age.clamp_(max=OLDEST - 1).add_(1)
    if index is None:
        came = g != 0
        steps.mul_(came)
        age.masked_fill_(came, 0)
    else:
        age.index_fill_(0, index, 0)
    _updated(parts, steps, table, group, count)
    if index is not None:
        for whole, part in zip((p, mean, square), (parts[0], *parts[2:]), strict=True):
            whole.index_copy_(0, index, part)


def _updated(
    parts: Sequence[Tensor], steps: Tensor, table: tuple[Tensor, ...], group: dict[str, Any], count: int
) -> None:
    """Weights, gradient and both moments of some elements, updated operation by operation as ``AdamW`` does it.

    Args:
        parts: ``[n]`` each.
        steps: since a sum came, 0 where none came now, int32 ``[n]``.
        table: the mean's share of a sum, its weight in the momentum, what is left of the second moment, and the weight
            of the squared sum in it, each by steps.
        group, count: as :func:`_step` takes them.
    """
    p, g, mean, square = parts
    g, (b1, b2), (share, weight, left, gain) = g.to(p.dtype), group["betas"], table
    mean.lerp_(share.index_select(0, steps).mul_(g), weight.index_select(0, steps))
    square.mul_(left.index_select(0, steps)).addcmul_(gain.index_select(0, steps).mul_(g), g)
    norm = square.sqrt().div_((1 - b2**count) ** 0.5).add_(group["eps"])
    p.addcdiv_(mean * steps, norm, value=-float(group["lr"]) / (1 - b1**count))
