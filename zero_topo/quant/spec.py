# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The formats of messages, every offset and size; without torch: block-quantized values, and changes of INT8 weights.

One message carries values and scales, so one collective moves both::

    [values: ceil(n / B) blocks of B, tail zero-padded; padded to 128 bytes]
    [scales: fp32, one per block; padded to 128 bytes]

INT4 packs two values a byte, the low nibble is the even element; values are two's complement. Cost model, meter and
collectives all use :meth:`BlockSpec.nbytes`. ``csrc/zt_wire.h`` is the same arithmetic for the kernels.

Note [Trits]
    A message says how the INT8 weights of ``n`` blocks of ``B`` values became what they are. Most change by -1, 0 or
    +1, and five such trits fit into a byte (3**5 = 243): 1.6 bits a value. A block in which one weight changes by more,
    or whose scale changes, is sent whole. One bit a block says which; ``E`` blocks are sent whole::

        [E: uint32; padded to 128 bytes]
        [mask: a bit per block, block i is bit i % 8 of byte i / 8, zero-padded to 64 blocks; padded to 128 bytes]
        [before: uint32 per 64 blocks, how many before these are sent whole; padded to 128 bytes]
        [scales: fp32, one per block sent whole, in order; padded to 128 bytes]
        [codes: int8, B per block sent whole, in order]
        [trits: B bytes for five of the other blocks, in order; padded to 128 bytes]

    Byte ``j`` of five blocks is the sum of ``(change + 1) * 3**k`` of value ``j`` of block ``k``; blocks that are
    missing from the last five count as 0. ``before`` lets any block be decoded by itself. ``csrc/zt_trits.h`` is the
    same arithmetic for the kernels.
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
GROUP = 5  # blocks whose trits share their bytes
CHUNK = 64  # blocks with one count of those before them that are sent whole
HEADROOM = 1.0625  # a new scale leaves room for a sixteenth more
KEPT_FROM, KEPT_TO = 90.0, 127.49  # times the scale: a block's largest value in between keeps the scale it has


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
    lossy: ClassVar[bool] = True

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
    lossy: ClassVar[bool] = False

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


def padded(nbytes: int) -> int:
    """Bytes rounded up to the alignment of every plane."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class TritSpec:
    """Sizes of a message of changes of blocks of ``block_size`` values; see Note [Trits]."""

    block_size: int

    def before_offset(self, blocks: int) -> int:
        """Byte at which the counts begin; the mask begins at 128."""
        return padded(1) + padded(-(-blocks // CHUNK) * CHUNK // 8)

    def scales_offset(self, blocks: int) -> int:
        """Byte at which the scales begin."""
        return self.before_offset(blocks) + padded(-(-blocks // CHUNK) * 4)

    def codes_offset(self, blocks: int, escaped: int) -> int:
        """Byte at which the codes of ``escaped`` blocks begin."""
        return self.scales_offset(blocks) + padded(escaped * SCALE_BYTES)

    def trits_offset(self, blocks: int, escaped: int) -> int:
        """Byte at which the trits begin."""
        return self.codes_offset(blocks, escaped) + escaped * self.block_size

    def nbytes(self, blocks: int, escaped: int) -> int:
        """Bytes of a message; grows with the number that escaped, so that the largest holds all."""
        return padded(self.trits_offset(blocks, escaped) + -(-(blocks - escaped) // GROUP) * self.block_size)
