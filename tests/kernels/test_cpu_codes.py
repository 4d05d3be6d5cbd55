# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Codes by the CPU kernels, every instruction set: the reference's bits, however the work is split."""

from __future__ import annotations

import ctypes

import pytest

from tests.kernels import golden_codes
from tests.kernels.cpu_library import CpuKernels


@pytest.mark.parametrize("fate", golden_codes.FATES)
@pytest.mark.parametrize("cuts", [1, 9])
def test_codes_have_the_references_bits(library: ctypes.CDLL, level: int, fate: str, cuts: int) -> None:
    """Blocks of every kind and size, numbers of them around those of a group and a chunk, in any number of calls."""
    backend = CpuKernels(library, level, cuts)
    for layout in (*golden_codes.RAGGED, *golden_codes.SINGLE):
        golden_codes.check_codes(backend, layout, fate)


def test_all_bytes_that_trits_may_come_in(library: ctypes.CDLL, level: int) -> None:
    """Each byte's five digits."""
    golden_codes.check_bytes(CpuKernels(library, level, cuts=3))
