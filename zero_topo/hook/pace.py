# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes tokens per second, TFLOP/s and MFU of this rank's optimizer steps, from shapes and host times only."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from zero_topo.cost.step import TERA
from zero_topo.cost.transformer import LEAST_PARAMS, scaled


class Pace:
    """Counts the tokens of the model's training passes, and the FLOPs that a model of its size needs for them.

    The FLOPs are the planner's: of a transformer with as many parameters (:func:`~zero_topo.cost.transformer.scaled`),
    without the recomputation of activation checkpointing.

    Args:
        params: number of parameters of the model.
        peak_flops: published peak FLOP/s of this rank, or None if unknown.

    Attributes:
        last: ``tokens_per_s``, ``tflops`` and, with a peak, ``mfu`` of the last optimizer step; empty if the model's
            input has no token ids.
    """

    def __init__(self, params: int, peak_flops: float | None) -> None:
        self._model, self._peak_flops = scaled(max(params, LEAST_PARAMS)), peak_flops
        self._tokens, self._flops, self._began = 0, 0.0, time.perf_counter()
        self.last: dict[str, float] = {}

    def forward_begins(self, inputs: Iterable[object]) -> None:
        """Count a forward pass with gradients; its token ids are the first integer matrix of its (nested) inputs."""
        if not torch.is_grad_enabled():
            return
        matrices = (value for value in _tensors(inputs) if value.dim() == 2)
        ids = next((value for value in matrices if value.dtype in (torch.int64, torch.int32, torch.uint8)), None)
        if ids is not None:
            model = replace(self._model, sequence=max(1, ids.shape[1]))
            self._tokens += ids.numel()
            self._flops += 3 * sum(model.module_flops(ids.numel()))  # a backward pass takes twice a forward pass

    def end_step(self) -> None:
        """Close an optimizer step and set :attr:`last`."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        self.last = {"tokens_per_s": self._tokens / seconds, "tflops": self._flops / seconds / TERA}
        if self._peak_flops is not None:
            self.last["mfu"] = self._flops / seconds / self._peak_flops
        if not self._tokens:
            self.last = {}
        self._tokens, self._flops = 0, 0.0


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors in nested values, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping | tuple | list):
            yield from _tensors(value.values() if isinstance(value, Mapping) else value)
