# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines the message formats with all offsets and sizes, without torch: quantized values, changes of INT8 weights.

One message holds values and scales, so one collective sends both::

    [values: ceil(n / B) blocks of B, tail zero-padded; padded to 128 bytes]
    [scales: fp32, in NF4 one byte, one per block; padded to 128 bytes]

INT4 packs two values a byte, the low nibble is the even element; values are two's complement. Cost model, meter and
collectives all use :meth:`BlockSpec.nbytes`. ``csrc/zt_wire.h`` has this arithmetic for the kernels.

Note [NF4]
    The 4-bit value ``v``, -8 to 7, stands for ``NF4_LEVELS[v + 8]``: the quantiles of a normal distribution of QLoRA
    (arXiv 2305.14314), in units of 1/127 and mirrored, so that zero is encoded as zero. Levels are dense near zero,
    where most values lie. A block has 64 values. Its scale is a byte ``b``: ``2**-43 * (1 + b % 4 / 4) * 2**(b // 4)``,
    four scales per power of two. 255 is NaN. INT4 in blocks of 256 has as many bits per value. See
    ``csrc/zt_nf4.h``.

Note [Trits]
    A message encodes the changes of the INT8 weights of ``n`` blocks of ``B`` values. Most weights change by -1, 0 or
    +1, and five such trits fit into a byte (3**5 = 243): 1.6 bits a value. A block in which one weight changes by more,
    or whose scale changes, is sent whole. One bit per block marks it; ``E`` blocks are sent whole::

        [E: uint32; padded to 128 bytes]
        [mask: a bit per block, block i is bit i % 8 of byte i / 8, zero-padded to 64 blocks; padded to 128 bytes]
        [before: uint32 per 64 blocks, how many before these are sent whole; padded to 128 bytes]
        [scales: fp32, one per block sent whole, in order; padded to 128 bytes]
        [codes: int8, B per block sent whole, in order]
        [trits: B bytes for five of the other blocks, in order; padded to 128 bytes]

    Byte ``j`` of five blocks is the sum of ``(change + 1) * 3**k`` of value ``j`` of block ``k``; blocks that are
    missing from the last five count as 0. With ``before``, any block can be decoded alone. ``csrc/zt_trits.h`` has
    this arithmetic for the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

ALIGNMENT = 128
BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048)
SCALE_BYTES = 4
FLOAT_NAMES = ("fp32", "fp16", "bf16")
NF4_LEVELS = (-127, -92, -71, -56, -43, -31, -20, -10, 0, 12, 23, 36, 50, 67, 88, 127)
NF4_BOUNDS = tuple((low + high) / 2 for low, high in pairwise(NF4_LEVELS))
NF4_SCALE = 84 << 23  # bits of 2**-43, the FP32 scale of byte 0; bytes count in steps of 2**21 from here
NF4_NEAREST = 3 << 18  # added before a scale is truncated to such a step: 3/8 of it has the smallest error
GROUP = 5  # blocks whose trits share their bytes
CHUNK = 64  # blocks with one count of those before them that are sent whole
HEADROOM = 1.0625  # headroom of a new scale: its largest code may still grow by a sixteenth
KEPT_FROM, KEPT_TO = 90.0, 127.49  # range, in scales, of a block's largest value that keeps its scale


@dataclass(frozen=True)
class BlockSpec:
    """Defines how a tensor is quantized.

    Attributes:
        bits: 8 or 4 per value.
        block_size: elements that share one scale; one of ``BLOCK_SIZES``, 64 in NF4.
        nf4: whether 4-bit values select levels of a codebook and scales are bytes; see Note [NF4].

    Raises:
        ValueError: for other bits or block sizes.
    """

    bits: int
    block_size: int = 256
    nf4: bool = False
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ValueError(f"quantization to {self.bits} bits is not known; choose int8, int4 or nf4")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size {self.block_size} is not supported; choose one of {list(BLOCK_SIZES)}")
        if self.nf4 and (self.bits, self.block_size) != (4, 64):
            raise ValueError(f"nf4 has 4 bits in blocks of 64, not {self.bits} in blocks of {self.block_size}")

    @classmethod
    def named(cls, name: str, block_size: int) -> BlockSpec:
        """Return the format that a config names: "int8" or "int4" in blocks of this size, or "nf4"."""
        return NF4 if name == NF4.name else cls(int(name.removeprefix("int")), block_size)

    @property
    def name(self) -> str:
        """Return the name that configs give to the format."""
        return "nf4" if self.nf4 else f"int{self.bits}"

    @property
    def levels(self) -> int:
        """Return the largest value ``L``, 127 or 7; the smallest is ``-L``."""
        return (1 << (self.bits - 1)) - 1

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block's values."""
        return self.block_size * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of a block's scale."""
        return 1 if self.nf4 else SCALE_BYTES

    @cached_property
    def code(self) -> tuple[int, int, int]:
        """Return the format as operators take it: bits, block size, 1 for NF4."""
        return self.bits, self.block_size, int(self.nf4)

    def blocks(self, numel: int) -> int:
        """Return the number of blocks that hold ``numel`` values."""
        return -(-numel // self.block_size)

    def scales_offset(self, numel: int) -> int:
        """Byte at which the scales begin."""
        return padded(self.blocks(numel) * self.block_bytes)

    def nbytes(self, numel: int) -> int:
        """Bytes of one message of ``numel`` values; 0 for none."""
        blocks = -(-numel // self.block_size)
        values, scales = blocks * self.block_size * self.bits // 8, blocks * self.scale_bytes
        return ALIGNMENT * (-(-values // ALIGNMENT) + -(-scales // ALIGNMENT))

    def __str__(self) -> str:
        return f"{self.name}/{self.block_size}"


NF4 = BlockSpec(4, 64, nf4=True)


@dataclass(frozen=True)
class Cast:
    """Defines values that are sent as floats: no blocks, no scales, no padding.

    Attributes:
        dtype: "fp32", "fp16" or "bf16".
    """

    dtype: str
    block_size: ClassVar[int] = 1
    lossy: ClassVar[bool] = False

    @property
    def bits(self) -> int:
        """Return the bits of a value."""
        return 32 if self.dtype == "fp32" else 16

    @cached_property
    def code(self) -> tuple[int, int, int]:
        """Return the format as operators take it: bits, block size, index in ``FLOAT_NAMES``."""
        return self.bits, 1, FLOAT_NAMES.index(self.dtype)

    def nbytes(self, numel: int) -> int:
        """Bytes of one message of ``numel`` values."""
        return numel * self.bits // 8

    def __str__(self) -> str:
        return self.dtype


Format = BlockSpec | Cast
"""The format in which values are sent."""


def format_of(code: Sequence[int]) -> Format:
    """Return the format that has this code."""
    bits, block_size, kind = code
    return Cast(FLOAT_NAMES[kind]) if block_size == 1 else BlockSpec(bits, block_size, nf4=bool(kind))


def padded(nbytes: int) -> int:
    """Round bytes up to the alignment of every plane of a message."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class TritSpec:
    """Computes the sizes of a message with changes of blocks of ``block_size`` values; see Note [Trits]."""

    block_size: int

    def before_offset(self, blocks: int) -> int:
        """Return the byte at which the counts begin; the mask begins at 128."""
        return padded(1) + padded(-(-blocks // CHUNK) * CHUNK // 8)

    def scales_offset(self, blocks: int) -> int:
        """Byte at which the scales begin."""
        return self.before_offset(blocks) + padded(-(-blocks // CHUNK) * 4)

    def codes_offset(self, blocks: int, escaped: int) -> int:
        """Return the byte at which the codes of ``escaped`` blocks begin."""
        return self.scales_offset(blocks) + padded(escaped * SCALE_BYTES)

    def trits_offset(self, blocks: int, escaped: int) -> int:
        """Return the byte at which the trits begin."""
        return self.codes_offset(blocks, escaped) + escaped * self.block_size

    def nbytes(self, blocks: int, escaped: int) -> int:
        """Return the bytes of a message. They grow with ``escaped``, so a buffer for the largest count fits all."""
        return padded(self.trits_offset(blocks, escaped) + -(-(blocks - escaped) // GROUP) * self.block_size)
