# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the CPU kernels alone may do wrong, at each instruction set: roundings of every value, and
results that go past the caches.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels import golden
from tests.kernels.backends import CPU, SPLIT
from tests.kernels.operators import Operators
from zero_topo.quant.operands import DTYPES, FLOATS, View, to_members
from zero_topo.quant.spec import NF4, BlockSpec, Cast

NAN_BITS = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}
whole = pytest.mark.parametrize("backend", CPU, indirect=True)
split = pytest.mark.parametrize("backend", SPLIT, indirect=True)


@split
def test_nf4_at_the_middle_of_two_levels(backend: Operators) -> None:
    """The lower level, in every dtype; the upper one from the next number on. So too at the ends,
    which scales that are rounded down leave above 128.
    """
    middles = torch.tensor(
        [-109.5, -81.5, -63.5, -49.5, -37, -25.5, -15, -5, 6, 17.5, 29.5, 43, 58.5, 77.5, 107.5]
    )
    ends = torch.tensor([-142.0, -128, -127, 127, 128, 142])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        exact = torch.cat([middles, ends]).to(dtype)
        bits = exact.view(torch.int32 if dtype == torch.float32 else torch.int16)
        near = torch.cat([exact, (bits + 1).view(dtype), (bits - 1).view(dtype)])[:62]
        for scale in (1.0, 1.25, 1.5, 1.75):
            for largest in (127.0, 142.0):
                block = torch.cat([near, torch.tensor([largest, -largest], dtype=dtype)]) * scale
                golden.same_message(backend, [View(block.to(dtype), 1, 64, 64)], NF4)


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
            blocks = torch.cat([numbers, largest.expand(len(numbers), 1)], dim=1).contiguous()
            numel = blocks.numel()
            golden.same_message(backend, [View(blocks.view(-1), 1, numel, numel)], NF4)


LARGE = [
    ("bf16 rows with gaps", torch.bfloat16, BlockSpec("int8", 256), (2003, 2560, 2600)),
    ("fp32 in one run", torch.float32, BlockSpec("int4", 2048), (1, 9_000_001, 9_000_001)),
    ("fp16 odd rows", torch.float16, BlockSpec("int8", 64), (4001, 1111, 1200)),
]


@split
@pytest.mark.parametrize(
    ("dtype", "spec", "shape"), [case[1:] for case in LARGE], ids=[case[0] for case in LARGE]
)
def test_millions(
    backend: Operators, dtype: torch.dtype, spec: BlockSpec, shape: tuple[int, int, int]
) -> None:
    """Several million elements, where results go past the caches; the last row ends early."""
    rows, columns, stride = shape
    limit = rows * stride - (stride - columns) - columns // 2
    source = golden.calm(limit, dtype)
    message = golden.same_message(backend, [View(source, rows, columns, stride)], spec)
    stored = View(torch.full_like(source, 3.25), rows, columns, stride)
    golden.same_sums(backend, torch.stack([message] * 2), spec, [stored], (0.5, True))


@split
@pytest.mark.parametrize("fmt", golden.CAST_FORMATS[::2], ids=str)
def test_millions_of_casts(backend: Operators, fmt: golden.Format) -> None:
    """So many that results go past the caches, from and to addresses that are no multiple of a
    cache line's; rows that are short, long, filled up and end early, of two members.
    """
    wide = golden.calm(2_500_001, fmt.dtype)[1:]
    layouts = [
        [View(wide, 1, 2_500_000, 2_500_000)],
        [View(wide, 7, 170_007, 350_001, 2, 175_000, present=170_001)],
        [View(wide, 25_001, 47, 100, 2, 51, present=45), golden.whole(torch.ones(2, 1, 3))],
    ]
    for pieces in layouts:
        message = golden.same_message(backend, pieces, fmt.spec).view(pieces[0].members, -1)
        apart = torch.zeros(2, message.numel() + 2, dtype=torch.uint8)[:, 2:].view(
            2, *message.shape
        )
        golden.same_values(backend, apart[0].copy_(message), fmt.spec, pieces)
        apart[1].copy_(message)
        golden.same_sums(backend, apart, fmt.spec, golden.blank(pieces), (0.5, True))


@whole
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_overflow_is_one_nan(backend: Operators, dtype: torch.dtype, bits: int) -> None:
    """A block with Inf inside becomes NaN of the same bits at every level (the golden suite accepts
    any NaN).
    """
    spec = BlockSpec(f"int{bits}", 64)
    x = torch.ones(70)
    x[3] = torch.inf
    message = torch.empty(spec.nbytes(70), dtype=torch.uint8)
    backend.quantize([golden.whole(x)], spec, to_members(message))
    out = torch.zeros(70, dtype=dtype)
    backend.dequantize_reduce(to_members(message), spec, [golden.whole(out)])
    found = out[:64].view(torch.int32 if dtype == torch.float32 else torch.int16)
    assert set(found.tolist()) == {NAN_BITS[dtype]}
    assert out[64:].float().tolist() == [1.0] * 6


@whole
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_half_rounds_as_the_reference(backend: Operators, dtype: torch.dtype) -> None:
    """Output roundings at all exponents: each scale of either sign, times each INT8 value, denormal
    results too.
    """
    spec = BlockSpec("int8", 64)
    scales = torch.arange(0, 2**32, 2**32 // 4096 - 977)[:4096].to(torch.uint32).view(torch.float32)
    numel = 64 * scales.numel()
    message = torch.arange(spec.nbytes(numel)).to(torch.uint8)
    offset = spec.scales_offset(numel)
    message[offset : offset + 4 * scales.numel()].view(torch.float32).copy_(scales)
    golden.same_values(backend, message, spec, [golden.whole(torch.zeros(numel, dtype=dtype))])


@whole
@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_half_is_cast_as_the_reference_does(
    backend: Operators, dtype: torch.dtype, wire: str
) -> None:
    """All FP16 and BF16 there are; FP32 on either side of every place where rounding to them
    changes.
    """
    bits = torch.arange(2**16, dtype=torch.int32)
    x = bits.to(torch.int16).view(dtype) if dtype != torch.float32 else None
    if x is None:
        places = torch.cat(
            [
                (bits << 16) + 0x8000,
                bits.to(torch.int16).view(torch.float16).float().view(torch.int32),
            ]
        )
        x = torch.cat(
            [places - 0x1000, *(places + off for off in range(-1, 2)), places + 0x1000]
        ).view(torch.float32)
    pieces = [golden.whole(x)]
    golden.same_values(
        backend, golden.same_message(backend, pieces, Cast(wire)), Cast(wire), pieces
    )
