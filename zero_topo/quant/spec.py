# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines the message formats with all offsets and sizes, without torch: quantized values, changes
of INT8 weights.

One message holds values and scales, so one collective sends both::

    [values: ceil(n / B) blocks of B, tail zero-padded; padded to 128 bytes]
    [scales: fp32, in NF4 one byte, one per block; padded to 128 bytes]

INT4 packs two values a byte, the low nibble is the even element; values are two's complement. Cost
model, meter and collectives all use :meth:`BlockSpec.nbytes`. ``csrc/zt_wire.h`` has this
arithmetic for the kernels.

Note [NF4]
    The 4-bit value ``v``, -8 to 7, stands for ``NF4_LEVELS[v + 8]``: the quantiles of a normal
    distribution of QLoRA (arXiv 2305.14314), in units of 1/127 and mirrored, so that zero is
    encoded as zero. Levels are dense near zero, where most values lie. A block has 64 values. Its
    scale is a byte ``b``: ``2**-43 * (1 + b % 4 / 4) * 2**(b // 4)``, four scales per power of two.
    255 is NaN. INT4 in blocks of 256 has as many bits per value. See ``csrc/zt_nf4.h``.

Note [Changes]
    A message encodes how the INT8 weights of ``n`` blocks of ``B`` values changed. Most do not
    change. Blocks are cut into tiles of ``T = min(B, 128)`` values, and each tile with ``c``
    changes takes the smaller of two forms, which begin with the positions of its changes:

    - a list: a byte for each change, in ascending order: its position in the tile, plus 128 if the
      weight decreases;
    - a mask: ``T / 8`` bytes, bit ``i % 8`` of byte ``i / 8`` set if value ``i`` changes; then, for
      each change in ascending order, a bit set if the weight decreases, padded to whole bytes.

    A tile therefore takes ``min(c, T / 8 + ceil(c / 8))`` bytes, none if nothing changes; the list
    wins a tie. Where a weight of the tile changes by more than 1, as when an optimizer makes up for
    many steps at once, the positions are without signs, and the new weights follow, a byte each:
    ``min(c, T / 8) + c`` bytes. A block whose scale changes, or that has a tile with more than
    ``7/8 T`` changes, is sent whole. With ``W`` such blocks, the message is::

        [ends: two uint32 per 32 blocks, the blocks sent whole and the bytes of changes up to their
         end; padded to 128]
        [counts: uint8 per tile: ``c``, ``128 + c`` if one change is larger than 1, or 255 in all
         tiles of a block sent whole; padded to 128 bytes]
        [scales: fp32, one per block sent whole, in order; padded to 128 bytes]
        [codes: int8, B per block sent whole, in order]
        [changes: the tiles of the other blocks, in order; padded to 128 bytes]

    With ``ends`` and ``counts`` any block can be decoded without those before its 32.
    ``csrc/zt_changes.h`` has this arithmetic for the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, NamedTuple

ALIGNMENT = 128
BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048)
SCALE_BYTES = 4
FLOAT_NAMES = ("fp32", "fp16", "bf16")
NF4_LEVELS = (-127, -92, -71, -56, -43, -31, -20, -10, 0, 12, 23, 36, 50, 67, 88, 127)
NF4_BOUNDS = tuple((low + high) / 2 for low, high in pairwise(NF4_LEVELS))
# Bits of 2**-43, the FP32 scale of byte 0; bytes count in steps of 2**21 from here
NF4_SCALE = 84 << 23
# Added before a scale is truncated to such a step: 3/8 of it has the smallest error
NF4_NEAREST = 3 << 18
BLOCK = 256  # values that share a scale in the INT8 and INT4 of a config
TILE = 128  # values whose changes are listed together: a position and a sign fit into a byte
CHUNK = 32  # blocks with one entry in ``ends``
LARGE = 128  # added to the count of a tile in which a weight changes by more than 1
WHOLE = 255  # count of the tiles of a block that is sent whole
HEADROOM = 1.0625  # headroom of a new scale: its largest code may still grow by a sixteenth
KEPT_FROM = 90.0
KEPT_TO = 127.49  # range, in scales, of a block's largest value that keeps its scale


class Kind(NamedTuple):
    """Defines how the values of a block are encoded.

    Attributes:
        bits: per value.
        levels: the largest value ``L`` of a linear kind; the smallest is ``-L``.
        scale_bytes: of a block's scale.
        block_sizes: numbers of values that may share a scale.
        number: with the bits, identifies the kind in the code that kernels take.
    """

    bits: int
    levels: int
    scale_bytes: int
    block_sizes: tuple[int, ...]
    number: int


KINDS = {
    "int8": Kind(8, 127, SCALE_BYTES, BLOCK_SIZES, 0),
    "int4": Kind(4, 7, SCALE_BYTES, BLOCK_SIZES, 0),
    "nf4": Kind(4, 7, 1, (64,), 1),
}
"""By the name that configs give. A new kind is served by the backends that list it; see
``select``.
"""

_NAMES = {(kind.bits, kind.number): name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class BlockSpec:
    """Defines how a tensor is quantized.

    Attributes:
        name: one of ``KINDS``.
        block_size: elements that share one scale.
        bits, levels, scale_bytes: those of the kind.

    Raises:
        ValueError: for another name or block size.
    """

    name: str
    block_size: int = 256
    bits: int = field(init=False, compare=False, repr=False)
    levels: int = field(init=False, compare=False, repr=False)
    scale_bytes: int = field(init=False, compare=False, repr=False)
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        kind = KINDS.get(self.name)
        if kind is None:
            raise ValueError(
                f"quantization to {self.name} is not known; choose one of {list(KINDS)}"
            )
        if self.block_size not in kind.block_sizes:
            raise ValueError(
                f"block_size {self.block_size} is not supported by {self.name}; choose one of "
                f"{list(kind.block_sizes)}"
            )
        for attribute in ("bits", "levels", "scale_bytes"):
            object.__setattr__(self, attribute, getattr(kind, attribute))

    @classmethod
    def named(cls, name: str) -> BlockSpec:
        """Return the format that a config names."""
        sizes = KINDS[name].block_sizes
        return cls(name, sizes[0] if len(sizes) == 1 else BLOCK)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block's values."""
        return self.block_size * self.bits // 8

    @cached_property
    def code(self) -> tuple[int, int, int]:
        """Return the format as operators take it: bits, block size, number of the kind."""
        return self.bits, self.block_size, KINDS[self.name].number

    def blocks(self, numel: int) -> int:
        """Return the number of blocks that hold ``numel`` values."""
        return -(-numel // self.block_size)

    def scales_offset(self, numel: int) -> int:
        """Byte at which the scales begin."""
        return padded(self.blocks(numel) * self.block_bytes)

    def nbytes(self, numel: int) -> int:
        """Bytes of one message of ``numel`` values; 0 for none."""
        blocks = -(-numel // self.block_size)
        values = blocks * self.block_size * self.bits // 8
        scales = blocks * self.scale_bytes
        return ALIGNMENT * (-(-values // ALIGNMENT) + -(-scales // ALIGNMENT))

    def __str__(self) -> str:
        return f"{self.name}/{self.block_size}"


NF4 = BlockSpec("nf4", 64)


@dataclass(frozen=True)
class Cast:
    """Defines values that are sent as floats: no blocks, no scales, no padding.

    Attributes:
        dtype: "fp32", "fp16" or "bf16".
    """

    dtype: str
    block_size: ClassVar[int] = 1
    lossy: ClassVar[bool] = False

    @cached_property
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
    bits, block_size, number = code
    if block_size == 1:
        return Cast(FLOAT_NAMES[number])
    return BlockSpec(_NAMES[bits, number], block_size)


def padded(nbytes: int) -> int:
    """Round bytes up to the alignment of every plane of a message."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Offsets(NamedTuple):
    """The bytes at which the planes of a message with changes begin, and that after its end. The
    ends of the blocks come first, at 0.
    """

    counts: int
    scales: int
    codes: int
    changes: int
    end: int


@dataclass(frozen=True)
class ChangeSpec:
    """Computes the sizes of a message with changes of blocks of ``block_size`` values; see Note
    [Changes].
    """

    block_size: int

    @property
    def tile(self) -> int:
        """Return the number of values of a tile."""
        return min(self.block_size, TILE)

    @property
    def most(self) -> int:
        """Return the largest number of changes of a tile; a block with more in one of its tiles is
        sent whole.
        """
        return self.tile - self.tile // 8

    @property
    def tiles(self) -> int:
        """Return the number of tiles of a block."""
        return max(1, self.block_size // TILE)

    def offsets(self, blocks: int, whole: int = 0, changes: int = 0) -> Offsets:
        """Return where the planes of a message of ``blocks`` blocks begin.

        Args:
            blocks: blocks that the message describes.
            whole: of these, the blocks that are sent whole.
            changes: bytes of the changes of the others.
        """
        counts = padded(-(-blocks // CHUNK) * 8)
        scales = counts + padded(blocks * self.tiles)
        codes = scales + padded(whole * SCALE_BYTES)
        changed = codes + whole * self.block_size
        return Offsets(counts, scales, codes, changed, padded(changed + changes))

    def nbytes(self, blocks: int, whole: int, changes: int) -> int:
        """Return the bytes of a message with ``whole`` blocks sent whole and ``changes`` bytes of
        changes.
        """
        return self.offsets(blocks, whole, changes).end

    def largest(self, blocks: int) -> int:
        """Return the bytes of the largest message: all blocks are sent whole."""
        return self.offsets(blocks, blocks).end
