# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The GPU kernels, run thread by thread on a CPU, give the reference's bits, on wavefronts of 32
and of 64 threads.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.kernels import golden
from tests.kernels.gpu_library import BOTH, OTHER, PLAIN, Emulated, Settings
from tests.marks import often
from zero_topo.quant import reference
from zero_topo.quant.operands import DTYPES
from zero_topo.quant.spec import BlockSpec, Cast

FORMATS = [*golden.GPU_FORMATS, *golden.CAST_FORMATS]
OFTEN = [*product([PLAIN], FORMATS[::4]), *product([OTHER], FORMATS[2::4])]


@pytest.mark.parametrize("case", often(OFTEN, product([PLAIN, OTHER], FORMATS)), ids=str)
def test_operations(emulated: Emulated, case: tuple[Settings, golden.Format]) -> None:
    """Messages, values and sums of every format are the reference's; nothing is written where no
    piece is.
    """
    chosen, fmt = case
    golden.check_operations(emulated(chosen), fmt)


@pytest.mark.parametrize("chosen", BOTH)
@pytest.mark.parametrize("spec", [*golden.SERVED, *map(Cast, DTYPES)], ids=str)
def test_requantize(emulated: Emulated, chosen: Settings, spec: golden.Spec) -> None:
    """Messages of sums are the reference's, in the same and in other bits."""
    golden.check_requantize(emulated(chosen), spec)


@pytest.mark.parametrize("chosen", BOTH)
def test_sparse(emulated: Emulated, chosen: Settings) -> None:
    """Masks, selections and sketches are the reference's."""
    golden.check_sparse(emulated(chosen))


@pytest.mark.parametrize("offset", [1, 7, 8])
def test_masks_anywhere(emulated: Emulated, offset: int) -> None:
    """Masks and bits that begin at no round address."""
    mask = torch.rand(3000) < 0.4
    expected, bits = (torch.full((400,), 0xA5, dtype=torch.uint8) for _ in range(2))
    n = mask.numel() - offset
    size = -(-n // 8)
    reference.mask_pack(mask[offset:], expected[offset : offset + size])
    backend = emulated()
    backend.mask_pack(mask[offset:], bits[offset : offset + size])
    assert torch.equal(bits, expected)
    back = torch.ones(3000, dtype=torch.bool)
    backend.mask_unpack(bits[offset : offset + size], back[offset:])
    assert torch.equal(back[offset:], mask[offset:]) and bool(back[:offset].all())


@pytest.mark.parametrize("chosen", BOTH)
def test_roundings(emulated: Emulated, chosen: Settings) -> None:
    """Half way between two values the even one, at every exponent; denormals; the smallest and
    largest blocks.
    """
    golden.check_roundings(emulated(chosen))


@pytest.mark.parametrize("spec", golden.SERVED, ids=str)
def test_padding_of_messages_does_not_count(emulated: Emulated, spec: BlockSpec) -> None:
    """Whatever lies behind the last value of a message: the padding of the message of the sum
    stands for zeros.
    """
    blocks = 16384 // spec.block_size
    numel = blocks * spec.block_size + 3
    messages = golden.messages_of(spec, numel, 3)[1:]
    for message in messages:
        message[numel * spec.bits // 8 + 1 : (blocks + 1) * spec.block_bytes] = 0x77
    golden.same_again(emulated(OTHER), messages, spec, spec, (numel, 1.0))
