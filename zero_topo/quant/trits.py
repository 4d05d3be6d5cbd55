# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The wire format of changed INT8 codes, every offset and size; without torch.

A message says how the codes of ``n`` blocks of ``B`` values became what they are. Most codes change by -1, 0 or +1,
and five such trits fit into a byte (3**5 = 243): 1.6 bits a value. A block in which one code changes by more, or whose
scale changes, *escapes*: it is sent whole. One bit a block tells which; ``E`` blocks escape::

    [E: uint32; padded to 128 bytes]
    [mask: a bit per block, block i is bit i % 8 of byte i / 8, zero-padded to 64 blocks; padded to 128 bytes]
    [before: uint32 per 64 blocks, how many escape before these; padded to 128 bytes]
    [scales: fp32, one per escaped block, in order; padded to 128 bytes]
    [codes: int8, B per escaped block, in order]
    [trits: B bytes for five blocks that do not escape, in order; padded to 128 bytes]

Byte ``j`` of five blocks is the sum of ``(change + 1) * 3**k`` of value ``j`` of block ``k``; blocks that are missing
from the last five count as 0. ``before`` lets any block be decoded by itself. ``csrc/zt_trits.h`` is the same
arithmetic for the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_topo.quant.spec import SCALE_BYTES, padded

GROUP = 5  # blocks that share their bytes
CHUNK = 64  # blocks with one count of those that escaped before
HEADROOM = 1.0625  # a new scale leaves room for a sixteenth more
KEPT_FROM, KEPT_TO = 90.0, 127.49  # times the scale: a block's largest value in between keeps the scale it has


@dataclass(frozen=True)
class TritSpec:
    """Sizes of a message of blocks of ``block_size`` values."""

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
