# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The settings of the sync mode ``ternary``, and the bits that follow from them.

Note [Positions]
    Of every block of 4096 elements equally many are picked, so that messages have one length, which nobody has to ask
    for. Ascending positions travel as Elias-Fano codes (Vigna, "Quasi-succinct indices", WSDM 2013): the lower bits of
    each as they are, the upper ones as a bit vector that has, for each value of them, a 1 for each pick and then a 0.
    That is within half a bit a pick of what any code needs, and every block can be decoded by itself.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from zero_topo.config.sparse_config import SparseSync
from zero_topo.config.sync_settings import Dtype

BLOCK = 4096


class TernarySync(SparseSync):
    """The largest elements of every block, each as a sign, and one scale for the block."""

    mode: Literal["ternary"] = Field(
        "ternary", description="Signs of each block's largest elements, their positions, and one scale a block."
    )
    density: float = Field(0.05, gt=0, le=1, description="Share of the elements of each block that a rank picks.")
    value_dtype: Dtype = Field("bf16", description="Type of a block's scale on the wire.")

    @property
    def picks(self) -> int:
        """Of each block."""
        return min(BLOCK, max(1, math.ceil(self.density * BLOCK)))

    @property
    def low_bits(self) -> int:
        """Of a position, as they are: as many as make the block shortest."""
        return min(range(BLOCK.bit_length()), key=lambda low: self.picks * low + (BLOCK >> low))

    @property
    def high_bits(self) -> int:
        """Of the vector of a block that says the upper bits of all its positions."""
        return self.picks + (BLOCK >> self.low_bits)

    @property
    def block_bits(self) -> int:
        """Of a block beside its scale: positions and signs."""
        return self.high_bits + self.picks * (self.low_bits + 1)
