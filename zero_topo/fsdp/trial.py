# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tries whether an optimizer updates each element by itself.

A rank updates its parts of tensors, flat. Optimizers that use a norm of a tensor (LAMB, LARS, a
clipped update), its rows and columns (Adafactor, Muon), or sums over all tensors (LBFGS, Prodigy)
would train otherwise than with whole tensors, without an error. The trial compares a few steps with
whole tensors to the same steps with halves of them, as two ranks would take them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

SHAPES = ((128, 128), (257,))
HALF = 0.375  # of a tensor: its halves have different norms
WEIGHT = 1e-2
GROWTH = (1.0, 8.0, 64.0, 8.0, 8.0, 64.0)
"""By step, what gradients are multiplied by: updates that grow are clipped by those who clip."""
RATE = 1.0  # a learning rate of 0, or a small one, would hide a difference
OF_UPDATE = 1e-4
OF_WEIGHT = 1e-6
"""Differences by rounding, of the largest update and the largest weight."""

Kind = Callable[..., torch.optim.Optimizer]
Group = Mapping[str, Any]


def check_elementwise(
    kind: Kind, groups: Sequence[Group], settings: Mapping[str, Any], device: torch.device
) -> None:
    """Try an optimizer with the user's settings. Random number generators stay as they are.

    Args:
        kind: makes it.
        groups: the settings of each group of parameters.
        settings: of ``kind``.
        device: where the optimizer's parameters are.

    Raises:
        ValueError: in one line, if halves of tensors are updated otherwise than whole ones, or the
            optimizer does not take flat tensors.
    """
    wholes = len(groups) * _drawn(device)
    accelerator = "cuda" if device.type == "cpu" else device.type
    generators = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(generators, device_type=accelerator):
            whole = _updates(kind, groups, settings, wholes)
            again = _updates(kind, groups, settings, wholes)
            pairs = [_updates(kind, groups, settings, half) for half in _halves(wholes)]
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{_name(kind)} failed in a trial on flat parts, as ranks update them: {reason}"
        ) from error
    halves = [torch.cat(pair) for pair in zip(*pairs, strict=True)]
    # One that draws random numbers updates twice differently; nothing can be said about it.
    if not _differ(wholes, whole, again) and _differ(wholes, whole, halves):
        raise ValueError(
            f"{_name(kind)} updates a half of a tensor otherwise than the whole, and ranks update "
            "parts of tensors; take an optimizer that updates each element by itself, such as "
            "torch.optim.AdamW"
        )


def _drawn(device: torch.device) -> list[Tensor]:
    """Return for each shape a weight and the gradient of each step, stacked; not to be written
    to.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    own: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are

    def normal(shape: Sequence[int]) -> Tensor:
        ramp = torch.linspace(0.5, 2, math.prod(shape), **own)
        return ramp.view(shape) * torch.randn(shape, generator=generator, **own)

    drawn = []
    for shape in SHAPES:
        common = normal(shape)
        gradients = [factor * (common + normal(shape)) for factor in GROWTH]
        values = torch.stack([WEIGHT * normal(shape), *gradients])
        drawn.append(values.to(device))
    return drawn


def _halves(wholes: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Return the first halves, flat, and the second ones."""
    cut = []
    for values in wholes:
        flat = values.flatten(1)
        border = int(HALF * flat.shape[1])
        cut.append((flat[:, :border], flat[:, border:]))
    return zip(*cut, strict=True)


def _updates(
    kind: Kind,
    groups: Sequence[Group],
    settings: Mapping[str, Any],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """Return what some steps add to each tensor, flat."""
    params = [nn.Parameter(values[0].clone()) for values in tensors]
    count = len(SHAPES)
    given = []
    for index, group in enumerate(groups):
        own = params[count * index : count * (index + 1)]
        names = {"param_names": ["weight", "bias"]} if "param_names" in group else {}
        given.append({**_copied(group), **names, "params": own})
    optimizer = kind(given, **_copied(settings))
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if rate is not None:
            group["lr"] = torch.full_like(rate, RATE) if isinstance(rate, Tensor) else RATE
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in range(len(GROWTH)):
        for param, values in zip(params, tensors, strict=True):
            param.grad = values[1 + step].clone()
        _step(optimizer, params[0])
    return [
        (param.detach() - values[0]).flatten()
        for param, values in zip(params, tensors, strict=True)
    ]


def _step(optimizer: Any, param: Tensor) -> None:
    """Call ``step``, and with a closure if it does not work without."""
    try:
        optimizer.step()
    except Exception:
        optimizer.step(lambda: torch.ones((), device=param.device))


def _copied(settings: Group) -> dict[str, Any]:
    """Return settings with copies of tensors, which an optimizer may change."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in settings.items()
    }


def _differ(wholes: Sequence[Tensor], ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether updates differ by more than rounding; not if they are no numbers."""
    for values, one, other in zip(wholes, ones, others, strict=True):
        largest = OF_UPDATE * one.abs().max() + OF_WEIGHT * values[0].abs().max()
        if (one - other).abs().max() > largest:
            return True
    return False


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or repr(kind)[:80]
