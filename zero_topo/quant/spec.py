# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The wire format of block-quantized tensors, every offset and size, and what is done with sums; without torch.

One message carries values and scales, so one collective moves both::

    [values: ceil(n / B) blocks of B, tail zero-padded; padded to 128 bytes]
    [scales: fp32, one per block; padded to 128 bytes]

INT4 packs two values a byte, the low nibble is the even element; values are two's complement. Cost model, meter and
collectives all use :meth:`BlockSpec.nbytes`. ``csrc/zt_wire.h`` is the same arithmetic for the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

ALIGNMENT = 128
BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048)
SCALE_BYTES = 4
FLOAT_NAMES = ("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class BlockSpec:
    """How a tensor is quantized.

    Attributes:
        bits: 8 or 4 per value.
        block_size: elements that share one scale; one of ``BLOCK_SIZES``.

    Raises:
        ValueError: for other bits or block sizes.
    """

    bits: int
    block_size: int = 256

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ValueError(f"quantization to {self.bits} bits is not known; choose int8 or int4")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size {self.block_size} is not supported; choose one of {list(BLOCK_SIZES)}")

    @property
    def levels(self) -> int:
        """Largest value ``L``, 127 or 7; the smallest is ``-L``."""
        return (1 << (self.bits - 1)) - 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's values."""
        return self.block_size * self.bits // 8

    @cached_property
    def code(self) -> tuple[int, int, int]:
        """The format as operators take it: bits, block size, type of floats."""
        return self.bits, self.block_size, 0

    def blocks(self, numel: int) -> int:
        """Blocks that hold ``numel`` values."""
        return -(-numel // self.block_size)

    def scales_offset(self, numel: int) -> int:
        """Byte at which the scales begin."""
        return padded(self.blocks(numel) * self.block_bytes)

    def nbytes(self, numel: int) -> int:
        """Bytes of one message of ``numel`` values; 0 for none."""
        blocks = -(-numel // self.block_size)
        values, scales = blocks * self.block_size * self.bits // 8, blocks * SCALE_BYTES
        return ALIGNMENT * (-(-values // ALIGNMENT) + -(-scales // ALIGNMENT))

    def __str__(self) -> str:
        return f"int{self.bits}/{self.block_size}"


@dataclass(frozen=True)
class Cast:
    """Values that travel as floats: no blocks, no scales, no padding.

    Attributes:
        dtype: "fp32", "fp16" or "bf16".
    """

    dtype: str
    block_size: ClassVar[int] = 1

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return 32 if self.dtype == "fp32" else 16

    @cached_property
    def code(self) -> tuple[int, int, int]:
        """The format as operators take it: bits, block size, place in ``FLOAT_NAMES``."""
        return self.bits, 1, FLOAT_NAMES.index(self.dtype)

    def nbytes(self, numel: int) -> int:
        """Bytes of one message of ``numel`` values."""
        return numel * self.bits // 8

    def __str__(self) -> str:
        return self.dtype


Format = BlockSpec | Cast
"""How values travel."""


def format_of(code: Sequence[int]) -> Format:
    """The format that has this code."""
    bits, block_size, dtype = code
    return Cast(FLOAT_NAMES[dtype]) if block_size == 1 else BlockSpec(bits, block_size)


@dataclass(frozen=True)
class Reduce:
    """What becomes of a sum of messages; each step is one FP32 rounding, in this order.

    Attributes:
        factor: multiplies the sum, unless it is 1; rounded to FP32.
        accumulate: add the sum to what the pieces hold instead of overwriting it.
    """

    factor: float = 1.0
    accumulate: bool = False


@dataclass(frozen=True)
class Total:
    """How many values are summed, and what multiplies the sum."""

    numel: int
    factor: float = 1.0


def padded(nbytes: int) -> int:
    """Bytes rounded up to the alignment of every plane."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
