# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the sharded optimizer and the optimizer of its parts have in common: settings and states.

The user sees parameters and states of their shapes; the inner optimizer sees flat parts. Whoever
changed something last is followed: before the inner optimizer runs, it gets the user's settings and
states, and afterwards the user gets its own, counters of a group included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero_topo.fsdp.parts import Part

MASTER = "zero_topo_master"
PUBLISHED = "zero_topo_published"
RESIDUAL = "zero_topo_residual"
"""Entries of a state that torch's own optimizers do not have: FP32 weights, the weights that belong
to them if these are not their rounded values, and the residual of sync.
"""


class Link:
    """The inner optimizer of a sharded one.

    Args:
        outer: the sharded optimizer, whose parameters are the model's.
        inner: the optimizer of the parts.
        parts: by parameter.
        own_entries: returns the entries of a part that the inner optimizer does not have. torch
            loads a flattened state dict by the names that it finds in ``optimizer.state``.
    """

    def __init__(
        self,
        outer: torch.optim.Optimizer,
        inner: torch.optim.Optimizer,
        parts: Mapping[Tensor, Part],
        own_entries: Callable[[Part], dict[str, Any]],
    ) -> None:
        self._outer = outer
        self._inner = inner
        self._parts = parts
        self._own_entries = own_entries
        self._own: dict[Part, dict[str, Any]] = {}  # made once: they share the part's memory
        # By part and entry of its state: the inner value, and what the user sees of it
        self._pairs: dict[Part, dict[str, tuple[Any, Any]]] = {}

    def give(self) -> None:
        """Give the inner optimizer weights, settings and states as the user has left them."""
        copy_settings(self._outer.param_groups, self._inner.param_groups)
        for param, part in self._parts.items():
            part.follow_edits()
            pairs = self._pairs.get(part, {})
            entry = {}
            for key, value in self._outer.state.get(param, {}).items():
                if key in (MASTER, PUBLISHED, RESIDUAL):
                    continue
                own, seen = pairs.get(key, (None, None))
                if value is seen:
                    entry[key] = own
                elif isinstance(value, DTensor):
                    entry[key] = part.from_dtensor(value).clone()
                else:
                    entry[key] = value
            if entry:
                self._inner.state[part.master] = entry
            else:
                self._inner.state.pop(part.master, None)

    def take(self, stepped: bool = False) -> None:
        """Show the user the inner settings and states: values of elements as DTensors of the
        parameter's shape, which share their memory.

        Args:
            stepped: whether the inner optimizer has made its states, if it has any.
        """
        copy_settings(self._inner.param_groups, self._outer.param_groups)
        for param, part in self._parts.items():
            old = self._pairs.pop(part, {})
            self._outer.state.pop(param, None)
            if part.master not in self._inner.state and not stepped:
                continue
            pairs = self._pairs[part] = {}
            for key, value in self._inner.state.get(part.master, {}).items():
                own, seen = old.get(key, (None, None))
                if own is not value or seen is None:
                    seen = part.as_dtensor(value) if is_flat(value, part) else value
                pairs[key] = (value, seen)
            if part not in self._own:
                self._own[part] = self._own_entries(part)
            shown = {key: seen for key, (_, seen) in pairs.items()} | self._own[part]
            if shown:
                self._outer.state[param] = shown


def masters_of(groups: Sequence[Mapping[str, Any]], parts: Mapping[Tensor, Part]) -> list[Any]:
    """Return groups with the masters of parts in place of the parameters."""
    return [
        {**group, "params": [parts[param].master for param in group["params"]]} for group in groups
    ]


def copy_settings(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copy the settings of groups, such as a learning rate."""
    for given, group in zip(source, target, strict=True):
        group.update({**given, "params": group["params"]})


def is_flat(value: Any, part: Part) -> bool:
    """Return whether an entry of a state has a value for each element of a part."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return False
    return value.dim() > 0 and value.numel() == part.master.numel()
