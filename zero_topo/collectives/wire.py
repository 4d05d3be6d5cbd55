# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How values travel: block-quantized, or as 16- or 32-bit floats; either way as bytes of one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_topo.quant import ops
from zero_topo.quant.ops import PLAIN
from zero_topo.quant.pieces import FLOATS, Piece
from zero_topo.quant.spec import FLOAT_NAMES, BlockSpec, Cast, Format, Reduce, Total


@dataclass(frozen=True)
class Wire:
    """A format, and what is done with messages of it; each call is one launch, whatever the number of members.

    Attributes:
        spec: the format.
    """

    spec: Format

    @property
    def block(self) -> int:
        """Elements that share a scale; 1 if none do."""
        return self.spec.block_size

    @property
    def lossy(self) -> bool:
        """Whether values are quantized."""
        return isinstance(self.spec, BlockSpec)

    def nbytes(self, numel: int) -> int:
        """Bytes of a message of ``numel`` values."""
        return self.spec.nbytes(numel)

    def encode(self, pieces: Sequence[Piece], messages: Tensor | None = None, without: int | None = None) -> Tensor:
        """The concatenated pieces -> a message for each member but one; see :func:`~zero_topo.quant.ops.quantize`."""
        return ops.quantize(pieces, self.spec, messages, without)

    def decode(
        self, messages: Tensor, pieces: Sequence[Piece], reduce: Reduce = PLAIN, without: int | None = None
    ) -> None:
        """A message of each member but one -> its pieces; see :class:`Reduce`."""
        ops.dequantize(messages, self.spec, pieces, reduce, without)

    def reduce(
        self, messages: Tensor, pieces: Sequence[Piece], reduce: Reduce = PLAIN, without: int | None = None
    ) -> None:
        """Sum of messages ``[sources, nbytes]`` but one in FP32, in the order given -> the pieces."""
        ops.dequantize_reduce(messages, self.spec, pieces, reduce, without)

    def recode(self, messages: Tensor, out: Tensor, numel: int) -> None:
        """Sums of messages ``[sources, members, nbytes]`` of ``numel`` values in FP32 -> a message for each member."""
        ops.requantize(messages, self.spec, self.spec, out, Total(numel))


def wire_of(spec: BlockSpec | None, dtype: torch.dtype) -> Wire:
    """The format that a config asks for: quantized, or of a type."""
    return Wire(cast_to(dtype) if spec is None else spec)


def cast_to(dtype: torch.dtype) -> Cast:
    """The format of values in a type."""
    return Cast(FLOAT_NAMES[FLOATS.index(dtype)])
