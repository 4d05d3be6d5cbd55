# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Frozen parameters: those that no optimizer updates, and which of them follow the plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from zero_topo.engine.weights import Weights
from zero_topo.sync import Parameter


def described(param: Any, place: int, names: Mapping[Any, str]) -> Parameter:
    """Describe a DeepSpeed parameter for the engine; ``place`` is its position in the order in which it is needed."""
    name = str(names.get(param, param.ds_id))
    persistent, whole = bool(param.ds_persist), bool(getattr(param, "use_muon", False))
    return Parameter(name, param.ds_numel, len(param.ds_shape), persistent=persistent, place=place, whole=whole)


def served(param: Any) -> bool:
    """Return whether another zero_topo engine already gathers a parameter."""
    return isinstance(getattr(param, "partition", None), partial)


class Frozen:
    """The parameters of a module that are not trained.

    Args:
        params: all parameters of the module.
        trained: ``ds_id`` of the trained ones.
        names: parameter -> name.
        dtype: the model's dtype.

    Attributes:
        params: the frozen parameters that follow the plan.
    """

    def __init__(
        self, params: Iterable[Any], trained: Collection[int], names: dict[Any, str], dtype: torch.dtype
    ) -> None:
        rest = [param for param in params if param.ds_id not in trained and param.ds_numel]
        self.params = [p for p in rest if p.ds_tensor.dtype == dtype and not served(p)]
        self._names = names
        self._never_trained = {str(names.get(p, p.ds_id)): p for p in rest if not p.requires_grad}
        self._others = len(rest) - len(self.params)
        self._dtype = dtype

    def note(self) -> str | None:
        """Return a log line about frozen parameters outside the plan: of another dtype, or of another engine."""
        if not self._others:
            return None
        return (
            f"{self._others} frozen parameters are not {self._dtype}, or another engine already gathers them: "
            "unmodified ZeRO-3 shards them over all ranks"
        )

    def described(self) -> list[Parameter]:
        """Describe the parameters that follow the plan for the engine."""
        return [described(param, place, self._names) for place, param in enumerate(self.params)]

    def move(self, weights: Weights) -> None:
        """Make DeepSpeed's shards views of the engine's row, and free their old storage."""
        shards = weights.frozen_row.split([param.ds_tensor.numel() for param in self.params])
        for param, own in zip(self.params, shards, strict=True):
            own.copy_(param.ds_tensor)
            param.ds_tensor.data = own

    def refuse_unfrozen(self) -> None:
        """Raise ValueError before a forward pass if a frozen parameter has ``requires_grad`` now: nothing updates it.

        Stock ZeRO-3 continues, and never trains it.
        """
        thawed = [name for name, param in self._never_trained.items() if param.requires_grad]
        if thawed and torch.is_grad_enabled():
            raise ValueError(
                f"{len(thawed)} parameters were frozen when DeepSpeed was initialized and have requires_grad now, such "
                f"as {thawed[0]}: no optimizer updates them; set requires_grad_(False) again, or save a checkpoint and "
                "call deepspeed.initialize on the model as it is to be trained"
            )
