# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Tokens per second, TFLOP/s and MFU of each optimizer step of this rank; shapes and host times only."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from zero_topo.cost.step import TERA
from zero_topo.cost.transformer import LEAST_PARAMS, scaled


class Pace:
    """Counts the tokens that the model's training passes get, and the FLOPs that a model of its size takes for them.

    The FLOPs are those of the planner: of the transformer that has as many parameters
    (:func:`~zero_topo.cost.transformer.scaled`), without what activation checkpointing computes again.

    Args:
        params: parameters of the model.
        peak_flops: FLOP/s of this rank as published, or None if they are not known.

    Attributes:
        last: of the last optimizer step ``tokens_per_s``, ``tflops`` and, with a peak, ``mfu``; empty where the model's
            input has no token ids.
    """

    def __init__(self, params: int, peak_flops: float | None) -> None:
        self._model, self._peak_flops = scaled(max(params, LEAST_PARAMS)), peak_flops
        self._tokens, self._flops, self._began = 0, 0.0, time.perf_counter()
        self.last: dict[str, float] = {}

    def forward_begins(self, inputs: Iterable[object]) -> None:
        """Count a forward pass with gradients; its token ids are its first integer matrix, in a dict or tuple too."""
        if not torch.is_grad_enabled():
            return
        matrices = (value for value in _tensors(inputs) if value.dim() == 2)
        ids = next((value for value in matrices if value.dtype in (torch.int64, torch.int32, torch.uint8)), None)
        if ids is not None:
            model = replace(self._model, sequence=max(1, ids.shape[1]))
            self._tokens += ids.numel()
            self._flops += 3 * sum(model.module_flops(ids.numel()))  # a backward pass takes twice a forward pass

    def end_step(self) -> None:
        """Close an optimizer step."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        self.last = {"tokens_per_s": self._tokens / seconds, "tflops": self._flops / seconds / TERA}
        if self._peak_flops is not None:
            self.last["mfu"] = self._flops / seconds / self._peak_flops
        if not self._tokens:
            self.last = {}
        self._tokens, self._flops = 0, 0.0


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Tensors among values, in the order in which they come."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping | tuple | list):
            yield from _tensors(value.values() if isinstance(value, Mapping) else value)
