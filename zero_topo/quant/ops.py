# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The quantization operations: one definition, checked here once, and the choice of the backend behind them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

from zero_topo.quant import reference
from zero_topo.quant.spec import ALIGNMENT, BlockSpec

logger = logging.getLogger(__name__)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Quantizer:
    """Block quantization by one backend, with the argument checks every backend relies on.

    Attributes:
        name: the backend, as ``ZERO_TOPO_QUANT`` names it.
    """

    def __init__(self, name: str, backend: ModuleType) -> None:
        self.name = name
        self._backend = backend

    def quantize(self, x: Tensor, spec: BlockSpec, out: Tensor | None = None) -> Tensor:
        """Quantize a floating tensor of any shape and strides into one wire message.

        Args:
            x: FP32, FP16 or BF16; its elements are taken in row-major order.
            spec: bits, block size, symmetry.
            out: uint8 of ``spec.nbytes(x.numel())`` bytes, contiguous, 128-byte multiple; allocated if None.

        Returns:
            ``out``.

        Raises:
            ValueError: for another dtype of ``x`` or an ``out`` of the wrong size.
        """
        if x.dtype not in FLOATS:
            raise ValueError(f"cannot quantize a tensor of dtype {x.dtype}; give one of {FLOATS}")
        size = spec.nbytes(x.numel())
        if out is None:
            out = torch.empty(size, dtype=torch.uint8, device=x.device)
        _check_message(out, size, spec, x.numel())
        if size:
            self._backend.quantize(x, spec, out)
        return out

    def dequantize(self, message: Tensor, spec: BlockSpec, out: Tensor) -> Tensor:
        """Dequantize one message into ``out`` (FP32, FP16 or BF16, any shape and strides); returns ``out``.

        Raises:
            ValueError: if the message does not hold ``out.numel()`` values of this spec.
        """
        _check_message(message, spec.nbytes(out.numel()), spec, out.numel())
        if out.numel():
            self._backend.dequantize(message, spec, out)
        return out

    def dequantize_reduce(self, messages: Sequence[Tensor], spec: BlockSpec, out: Tensor) -> Tensor:
        """Sum the dequantized messages in the order given into ``out`` (FP32, 1-D, contiguous); returns ``out``.

        Raises:
            ValueError: for no message, a message of the wrong size, or an ``out`` that is not FP32 and contiguous.
        """
        if not messages:
            raise ValueError("nothing to reduce: give at least one message")
        if out.dtype != torch.float32 or not out.is_contiguous() or out.dim() != 1:
            raise ValueError(f"the reduction accumulates into contiguous 1-D float32, not {out.dtype} {out.shape}")
        for message in messages:
            _check_message(message, spec.nbytes(out.numel()), spec, out.numel())
        if out.numel():
            self._backend.dequantize_reduce(list(messages), spec, out)
        return out


def select_quantizer(env: Mapping[str, str] = os.environ) -> Quantizer:
    """The best backend available, or the one ``ZERO_TOPO_QUANT`` forces.

    Raises:
        ValueError: if ``ZERO_TOPO_QUANT`` names a backend that is not installed.
    """
    backends = {"reference": reference}
    name = env.get("ZERO_TOPO_QUANT", "reference")
    if name not in backends:
        raise ValueError(
            f"ZERO_TOPO_QUANT={name} is not an installed quantization backend; unset it or use one of {list(backends)}"
        )
    return Quantizer(name, backends[name])


def _check_message(message: Tensor, size: int, spec: BlockSpec, numel: int) -> None:
    if message.dtype != torch.uint8 or message.numel() != size or not message.is_contiguous():
        raise ValueError(
            f"a {spec} message of {numel} values is {size} contiguous bytes of uint8 (a multiple of {ALIGNMENT}), "
            f"not {message.numel()} of {message.dtype}"
        )
