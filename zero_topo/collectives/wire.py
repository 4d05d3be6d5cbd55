# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How values travel: block-quantized, or as 16- or 32-bit floats; either way as bytes of one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_topo.quant.ops import PLAIN, Quantizer
from zero_topo.quant.pieces import Piece, read_all, total_numel, write_all
from zero_topo.quant.spec import BlockSpec, Reduce, Total

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""A config's names of the types in which values are kept and travel."""


class Wire:
    """Messages of 16- or 32-bit floats, and what is done with them.

    Attributes:
        dtype: of what a message holds.
        spec: how a :class:`BlockWire` quantizes; None here.
    """

    spec: BlockSpec | None = None

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def nbytes(self, numel: int) -> int:
        """Bytes of a message of ``numel`` values."""
        return numel * self.dtype.itemsize

    def encode(self, pieces: Sequence[Piece], message: Tensor) -> None:
        """The concatenated pieces -> one message, uint8 ``[nbytes(numel)]``."""
        values = message.view(self.dtype).split([piece.numel for piece in pieces])
        for piece, part in zip(pieces, values, strict=True):
            piece.read_into(part)

    def reduce(self, messages: Sequence[Tensor], pieces: Sequence[Piece], reduce: Reduce = PLAIN) -> None:
        """Sum of messages in FP32, in the order given -> the pieces; see :class:`Reduce`."""
        store(self._sum(messages), pieces, reduce)

    def recode(self, messages: Sequence[Tensor], out: Tensor, numel: int) -> None:
        """Sum of messages of ``numel`` values in FP32 -> one message."""
        out.view(self.dtype).copy_(self._sum(messages))

    def _sum(self, messages: Sequence[Tensor]) -> Tensor:
        total = messages[0].view(self.dtype).to(torch.float32, copy=True)
        for message in messages[1:]:
            total.add_(message.view(self.dtype))
        return total


class BlockWire(Wire):
    """Messages of block-quantized values.

    Attributes:
        quantizer: packs and unpacks them.
        spec: their format.
    """

    def __init__(self, quantizer: Quantizer, spec: BlockSpec) -> None:
        super().__init__(torch.uint8)
        self.quantizer = quantizer
        self.spec: BlockSpec = spec

    def nbytes(self, numel: int) -> int:
        """Bytes of values and scales."""
        return self.spec.nbytes(numel)

    def encode(self, pieces: Sequence[Piece], message: Tensor) -> None:
        """Quantize, reading pieces where they lie."""
        self.quantizer.quantize(pieces, self.spec, message)

    def reduce(self, messages: Sequence[Tensor], pieces: Sequence[Piece], reduce: Reduce = PLAIN) -> None:
        """Dequantize and sum in one pass."""
        self.quantizer.dequantize_reduce(messages, self.spec, pieces, reduce)

    def recode(self, messages: Sequence[Tensor], out: Tensor, numel: int) -> None:
        """Dequantize, sum and quantize in one pass."""
        self.quantizer.requantize(messages, self.spec, self.spec, out, Total(numel))


def wire_of(quantizer: Quantizer, spec: BlockSpec | None, dtype: torch.dtype) -> Wire:
    """The format that a config asks for: quantized, or of a type."""
    return Wire(dtype) if spec is None else BlockWire(quantizer, spec)


def store(total: Tensor, pieces: Sequence[Piece], reduce: Reduce) -> None:
    """What becomes of an FP32 sum ``[numel]`` (used up): scaled, added to what the pieces hold, or put in its place."""
    assert total.numel() == total_numel(pieces)
    if reduce.factor != 1:
        total.mul_(reduce.factor)
    write_all(read_all(pieces).add_(total) if reduce.accumulate else total, pieces)
