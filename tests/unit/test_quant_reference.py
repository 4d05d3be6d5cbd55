# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The arithmetic contract, checked against a scalar model that follows its sentences with Python
floats.
"""

from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from zero_topo.quant import ops
from zero_topo.quant.operands import DTYPES, FLOATS, View, view_of
from zero_topo.quant.spec import NF4, NF4_LEVELS, BlockSpec, Cast

EVEN = [BlockSpec(f"int{bits}", size) for bits in (8, 4) for size in (64, 256)]
SPECS = [*EVEN, NF4]


def f32(x: float) -> float:
    """Round a Python float to FP32 (correct for one operation on FP32 inputs: double rounding is
    innocuous).
    """
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def scalar_block(values: list[float], spec: BlockSpec) -> list[float]:
    """What must come back of one padded block in FP32, by the contract's sentences."""
    levels, interval = spec.levels, max(abs(v) for v in values)
    if not math.isfinite(interval):
        return [math.nan] * len(values)
    if spec.name == "nf4":
        return scalar_nf4(values, f32(interval / 127))
    if interval < 2.0**-100:
        return [0.0] * len(values)
    inverse, scale = f32(levels / interval), f32(interval / levels)
    steps = [max(-levels, min(levels, round(f32(v * inverse)))) for v in values]
    return [f32(step * scale) for step in steps]


def scalar_nf4(values: list[float], unit: float) -> list[float]:
    """A block in NF4: its scale is the nearest below 11/8 of a step, its values go to the nearest
    level.
    """
    # Unit = (2 * mantissa) * 2**(exponent - 1), 2 * mantissa in [1, 2)
    mantissa, exponent = math.frexp(unit)
    step = 4 * (exponent - 1 + 43) + math.floor(4 * (2 * mantissa - 1) + 3 / 8) if unit else 0
    if step > 254:
        return [math.nan] * len(values)
    scale = 2.0**-43 * (1 + max(step, 0) % 4 / 4) * 2.0 ** (max(step, 0) // 4)
    inverse = f32(1 / scale)
    nearest = (
        min(NF4_LEVELS, key=lambda level: (abs(f32(v * inverse) - level), level)) for v in values
    )
    return [f32(level * scale) for level in nearest]


def scalar_model(x: torch.Tensor, spec: BlockSpec) -> list[float]:
    """What dequantize(quantize(x)) must give in FP32."""
    values, size = x.float().tolist(), spec.block_size
    padded = values + [0.0] * (-len(values) % size)
    blocks = (
        scalar_block(padded[begin : begin + size], spec) for begin in range(0, len(values), size)
    )
    return [value for block in blocks for value in block][: len(values)]


def roundtrip(x: torch.Tensor, spec: BlockSpec) -> torch.Tensor:
    return ops.dequantize(ops.quantize(x, spec), spec, torch.empty(x.shape))


@given(
    st.lists(
        st.floats(
            width=32,
            allow_nan=False,
            allow_infinity=False,
            min_value=-(2.0**100),
            max_value=2.0**100,
        ),
        min_size=1,
        max_size=130,
    ),
    st.sampled_from(SPECS),
    st.sampled_from(FLOATS),
)
@example([2.0**-99], BlockSpec("int8", 64), torch.float32)  # not yet nothing
@example([2.0**27, 1.0], NF4, torch.float32)
@example([2.0**28], NF4, torch.float32)
@example([7e-13, -7e-13, 1e-12], NF4, torch.float32)
def test_any_finite_values_equal_the_scalar_model(
    values: list[float], spec: BlockSpec, dtype: torch.dtype
) -> None:
    x = torch.tensor(values).to(dtype)
    torch.testing.assert_close(
        roundtrip(x, spec), torch.tensor(scalar_model(x, spec)), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_overflow_poisons_its_whole_block_and_no_other(spec: BlockSpec, bad: float) -> None:
    x = torch.ones(3 * spec.block_size)
    x[spec.block_size + 3] = bad
    back = roundtrip(x, spec).view(3, -1)
    assert back[1].isnan().all()
    ones = roundtrip(torch.ones(spec.block_size), spec)
    assert torch.equal(back[0], ones) and torch.equal(back[2], ones)


def test_wrong_arguments_are_refused_with_the_sizes() -> None:
    spec = BlockSpec("int8")
    with pytest.raises(ValueError, match="int64"):
        ops.quantize(torch.ones(3, dtype=torch.int64), spec)
    with pytest.raises(ValueError, match="384 contiguous bytes"):
        ops.dequantize(torch.zeros(383, dtype=torch.uint8), spec, torch.empty(3))
    with pytest.raises(ValueError, match="nothing to reduce"):
        ops.dequantize_reduce(torch.empty(0, 384, dtype=torch.uint8), spec, torch.empty(3))
    with pytest.raises(ValueError, match="are not a view"):
        View(torch.ones(10), 2, 5, 4)
    with pytest.raises(ValueError, match="adjacent"):
        View(torch.ones(10, 2)[:, 0], 1, 10, 10)


@st.composite
def drawn_pieces(draw: st.DrawFn) -> tuple[View, list[int | None]]:
    """A piece of the numbers 1, 2, 3, ... and the place of each of its values, None if it does not
    exist.
    """
    members, rows, present = (
        draw(st.integers(1, 3)),
        draw(st.integers(0, 5)),
        draw(st.integers(0, 7)),
    )
    columns, gap, limit = (
        present + draw(st.integers(0, 3)),
        draw(st.integers(0, 4)),
        draw(st.integers(0, 90)),
    )
    stride, apart = present + gap, present + draw(st.integers(0, 3))
    stride, member_stride = (
        (members * apart, apart) if draw(st.booleans()) else (stride, rows * stride)
    )
    piece = View(
        torch.arange(1.0, limit + 1), rows, columns, stride, members, member_stride, present
    )
    values = itertools.product(range(members), range(rows), range(columns))
    places = [m * member_stride + r * stride + c if c < present else None for m, r, c in values]
    return piece, [place if place is not None and place < limit else None for place in places]


@given(drawn_pieces())
def test_a_piece_reads_and_writes_what_exists(drawn: tuple[View, list[int | None]]) -> None:
    """Element (m, r, c) is flat[m * member_stride + r * stride + c], zero beyond the end and beyond
    the columns that are present; writing touches no other element, and a member alone is what it is
    among the others.
    """
    piece, places = drawn
    assert piece.read().flatten().tolist() == [
        0.0 if place is None else place + 1.0 for place in places
    ]
    assert torch.equal(
        torch.cat([piece.member(m).read() for m in range(piece.members)]), piece.read()
    )
    expected = piece.flat.clone()
    piece.write(-torch.arange(1.0, len(places) + 1))
    for value, place in enumerate(places):
        if place is not None:
            expected[place] = -(value + 1.0)
    assert piece.flat.tolist() == expected.tolist()


def test_all_members_at_once_are_each_alone() -> None:
    """Messages of a [members, rows, columns] tensor, in any table, are those of its matrices; one
    is left alone.
    """
    spec, x = (
        BlockSpec("int8", 64),
        torch.randn(6, 4, 50, generator=torch.Generator().manual_seed(5)),
    )
    table = torch.zeros(3, 2, spec.nbytes(200), dtype=torch.uint8).transpose(0, 1)
    ops.quantize(x, spec, table, without=4)
    out = ops.dequantize(table, spec, torch.ones(6, 4, 50), without=4)
    for m, message in enumerate(table.reshape(6, -1)):
        alone = ops.quantize(x[m], spec)
        assert not message.any() if m == 4 else torch.equal(message, alone)
        assert torch.equal(out[m], torch.ones(4, 50) if m == 4 else roundtrip(x[m], spec))
    with pytest.raises(ValueError, match="5 messages are not one for each of 6"):
        ops.quantize(x, spec, torch.empty(5, spec.nbytes(200), dtype=torch.uint8))


@pytest.mark.parametrize("wire", DTYPES)
def test_casts_sum_in_fp32_and_round_once(wire: str) -> None:
    """Values that are sent as floats are rounded when they leave, and their sum when it is written;
    sources in order.
    """
    parts, dtype = torch.randn(3, 2, 100, generator=torch.Generator().manual_seed(8)), DTYPES[wire]
    messages = torch.stack([ops.quantize(part[:, None], Cast(wire)) for part in parts])
    assert torch.equal(messages.view(dtype), parts.to(dtype))
    out = ops.dequantize_reduce(
        messages, Cast(wire), torch.ones(2, 1, 100).bfloat16(), 1 / 3, True, 1
    )
    expected = 1 + (parts[0].to(dtype).float() + parts[2].to(dtype).float()) * torch.tensor(1 / 3)
    assert torch.equal(out[:, 0], expected.bfloat16())


@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.sampled_from(SPECS))
def test_pieces_are_one_message(numels: list[int], spec: BlockSpec) -> None:
    """Blocks run on from piece to piece: the message is that of the concatenation."""
    parts = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in numels]
    message = ops.quantize([view_of(part) for part in parts], spec)
    assert torch.equal(message, ops.quantize(torch.cat(parts), spec))
    out = [torch.empty(n) for n in numels]
    ops.dequantize(message, spec, [view_of(part) for part in out])
    assert torch.equal(torch.cat(out), roundtrip(torch.cat(parts), spec))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_reduction_sums_in_order_then_scales_then_accumulates_then_rounds(
    spec: BlockSpec,
) -> None:
    """Parts in the order given; then three roundings: factor, accumulation, dtype of the output."""
    stored = torch.randn(300, generator=torch.Generator().manual_seed(9)).bfloat16()
    parts = [torch.randn(300, generator=torch.Generator().manual_seed(s)) * 10**s for s in range(4)]
    messages = torch.stack([ops.quantize(p, spec) for p in parts])
    total = ops.dequantize_reduce(messages, spec, torch.empty(300))
    assert torch.equal(total, sum((roundtrip(part, spec) for part in parts), torch.zeros(300)))
    out = ops.dequantize_reduce(messages, spec, stored.clone(), 1 / 3, accumulate=True)
    assert torch.equal(out, (stored.float() + total * torch.tensor(1 / 3)).bfloat16())
    again = ops.requantize(messages, spec, torch.empty_like(messages[0]), 300)
    assert torch.equal(again, ops.quantize(total, spec))
