# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Computes tokens per second, TFLOP/s and MFU of this rank's optimizer steps, from shapes and host
times only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from zero_topo.cost.transformer import LEAST_PARAMS, scaled

TERA = 10**12


class Pace:
    """Counts the tokens of the model's training passes, and the FLOPs that a model of its size
    needs for them.

    The FLOPs are those of a transformer with as many parameters
    (:func:`~zero_topo.cost.transformer.scaled`), without the recomputation of activation
    checkpointing.

    Args:
        params: number of parameters of the model.
        peak_flops: published peak FLOP/s of this rank, or None if unknown.
        trained: share of the parameters that are trained; for the others no gradients are computed.
    """

    def __init__(self, params: int, peak_flops: float | None, trained: float = 1.0) -> None:
        # Forward pass, gradients of activations, gradients of trained weights: each takes as much
        # as the first.
        self._passes_per_forward = 2 + trained
        self._model = scaled(max(params, LEAST_PARAMS))
        self._peak_flops = peak_flops
        # (sequences, their length) -> forward passes, of the step under way and of the last closed
        # one.
        self._passes: Counter[tuple[int, ...]] = Counter()
        self._last_passes = self._passes
        self._last_seconds = 0.0
        self._began = time.perf_counter()

    def forward_begins(self, inputs: Iterable[object]) -> None:
        """Count a forward pass with gradients; its token ids are the first integer matrix of its
        (nested) inputs.
        """
        if not torch.is_grad_enabled():
            return
        matrices = (value for value in tensors_in(inputs) if value.dim() == 2)
        ids = next(
            (value for value in matrices if value.dtype in (torch.int64, torch.int32, torch.uint8)),
            None,
        )
        if ids is not None:
            self._passes[tuple(ids.shape)] += 1

    def end_step(self) -> None:
        """Close an optimizer step."""
        now = time.perf_counter()
        self._last_seconds = now - self._began
        self._began = now
        self._last_passes = self._passes
        self._passes = Counter()

    @property
    def last(self) -> dict[str, float]:
        """``tokens_per_s``, ``tflops`` and, with a peak, ``mfu`` of the last optimizer step.

        Empty if the model's input has no token ids.
        """
        tokens = sum(count * rows * length for (rows, length), count in self._last_passes.items())
        if not tokens:
            return {}
        flops = sum(
            self._passes_per_forward
            * count
            * sum(replace(self._model, sequence=max(1, length)).module_flops(rows * length))
            for (rows, length), count in self._last_passes.items()
        )
        speed = {
            "tokens_per_s": tokens / self._last_seconds,
            "tflops": flops / self._last_seconds / TERA,
        }
        return (
            speed
            if self._peak_flops is None
            else {**speed, "mfu": flops / self._last_seconds / self._peak_flops}
        )


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors in nested values, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping | tuple | list):
            yield from tensors_in(value.values() if isinstance(value, Mapping) else value)
