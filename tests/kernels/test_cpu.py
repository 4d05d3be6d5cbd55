# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the CPU kernels alone may do wrong, at each instruction set: roundings of every value, and
results that go past the caches.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.backends import CPU, SPLIT
from tests.kernels.golden import BITS, calm, quantized, same
from tests.kernels.operators import Operators
from tests.marks import often
from zero_topo.quant.operands import DTYPES, FLOATS, View, from_sources, to_members, view_of
from zero_topo.quant.spec import NF4, BlockSpec, Cast, Format

NAN_BITS = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}
whole = pytest.mark.parametrize("backend", CPU, indirect=True)
split = pytest.mark.parametrize("backend", SPLIT, indirect=True)
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@split
@dtypes
def test_nf4_at_the_middle_of_two_levels(backend: Operators, dtype: torch.dtype) -> None:
    """The lower level; the upper one from the next number on. So too at the ends, which scales that
    are rounded down leave above 128.
    """
    middles = [-109.5, -81.5, -63.5, -49.5, -37, -25.5, -15, -5, 6, 17.5, 29.5, 43, 58.5, 77.5]
    ends = [107.5, -142.0, -128, -127, 127, 128, 142]
    exact = torch.tensor(middles + ends).to(dtype)
    bits = exact.view(BITS[dtype])
    near = torch.cat([exact, (bits + 1).view(dtype), (bits - 1).view(dtype)])[:62]
    for scale in (1.0, 1.25, 1.5, 1.75):
        for largest in (127.0, 142.0):
            block = torch.cat([near, torch.tensor([largest, -largest], dtype=dtype)])
            quantized(backend, [view_of(block * scale)], NF4)


@split
@pytest.mark.parametrize("exponent", [-43, 0, 20], ids="2^{}".format)
def test_nf4_of_every_bf16(backend: Operators, exponent: int) -> None:
    """Each number up to a block's largest, for each mantissa of a scale: the smallest scales, those
    near one, and the largest.
    """
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for mantissa in (1.0, 1.25, 1.5, 1.75):
        for level in (127.0, 136.0):
            largest = torch.tensor(level * mantissa * 2.0**exponent).bfloat16()
            numbers = every[every.abs() <= largest]
            numbers = numbers[: len(numbers) // 63 * 63].view(-1, 63)
            blocks = torch.cat([numbers, largest.expand(len(numbers), 1)], dim=1)
            quantized(backend, [view_of(blocks)], NF4)


@split
@pytest.mark.parametrize("dtype", often((torch.bfloat16,), FLOATS), ids=str)
@pytest.mark.parametrize(
    "spec", [BlockSpec("int8"), BlockSpec("int4", 2048), *map(Cast, DTYPES)], ids=str
)
def test_millions(backend: Operators, spec: Format, dtype: torch.dtype) -> None:
    """So many that results go past the caches, from and to addresses that are no multiple of a
    cache line's; rows that are short, long, filled up and end early, of two members.
    """
    wide = calm(2_500_001, dtype)[1:]
    pieces = [
        View(wide, 1, 2_500_000, 2_500_000),
        View(wide, 7, 170_007, 350_001, 2, 175_000, present=170_001),
        View(wide, 25_001, 47, 100, 2, 51, present=45),
    ]
    for piece in pieces:
        messages = quantized(backend, [piece], spec)
        nbytes = messages.numel()
        ahead = 2 if isinstance(spec, Cast) else 0
        room = torch.empty(ahead + 2 * nbytes + 16, dtype=torch.uint8)[ahead:]
        came = room.as_strided((2, nbytes), (nbytes + 16, 1))
        came.copy_(messages.view(1, -1))
        table = from_sources(came.unflatten(1, messages.shape))
        same(backend, "dequantize_reduce", table, spec, [piece], 0.5, True)
        same(backend, "dequantize_reduce", to_members(messages), spec, [piece])


@whole
@dtypes
@pytest.mark.parametrize("bits", [8, 4])
def test_overflow_is_one_nan(backend: Operators, dtype: torch.dtype, bits: int) -> None:
    """A block with Inf inside becomes NaN of the same bits at every level (the golden suite accepts
    any NaN).
    """
    spec = BlockSpec(f"int{bits}", 64)
    x = torch.ones(70)
    x[3] = torch.inf
    out = torch.zeros(70, dtype=dtype)
    messages = to_members(quantized(backend, [view_of(x)], spec))
    backend.dequantize_reduce(messages, spec, [view_of(out)])
    assert set(out[:64].view(BITS[dtype]).tolist()) == {NAN_BITS[dtype]}
    assert out[64:].float().tolist() == [1.0] * 6


@whole
@dtypes
def test_every_half_rounds_as_the_reference(backend: Operators, dtype: torch.dtype) -> None:
    """Output roundings at all exponents: each scale of either sign, times each INT8 value, denormal
    results too.
    """
    spec = BlockSpec("int8", 64)
    scales = torch.arange(0, 2**32, 2**32 // 4096 - 977)[:4096].to(torch.uint32).view(torch.float32)
    numel = 64 * scales.numel()
    message = torch.arange(spec.nbytes(numel)).to(torch.uint8)
    message[spec.scales_offset(numel) :].view(torch.float32)[:4096] = scales
    out = [view_of(torch.zeros(numel, dtype=dtype))]
    same(backend, "dequantize_reduce", to_members(message), spec, out)


@whole
@dtypes
@pytest.mark.parametrize("wire", DTYPES)
def test_every_half_is_cast_as_the_reference_does(
    backend: Operators, dtype: torch.dtype, wire: str
) -> None:
    """All FP16 and BF16 there are; FP32 on either side of every place where rounding to them
    changes.
    """
    bits = torch.arange(2**16, dtype=torch.int32)
    x = bits.to(torch.int16)
    if dtype == torch.float32:
        halves = x.view(torch.float16).float().view(torch.int32)
        places = torch.cat([(bits << 16) + 0x8000, halves])
        x = torch.cat([places + off for off in (-0x1000, -1, 0, 1, 0x1000)])
    pieces = [view_of(x.view(dtype))]
    messages = to_members(quantized(backend, pieces, Cast(wire)))
    same(backend, "dequantize_reduce", messages, Cast(wire), pieces)
