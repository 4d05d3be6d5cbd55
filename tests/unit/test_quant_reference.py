# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The arithmetic contract, checked against a scalar model that follows its sentences with Python
floats. ``tests/kernels`` compares the reference with each backend, in every layout of values and
messages.
"""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from zero_topo.quant import ops
from zero_topo.quant.operands import FLOATS, View, view_of
from zero_topo.quant.spec import NF4, NF4_LEVELS, BlockSpec

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
    if not all(map(math.isfinite, values)):
        return [math.nan] * len(values)
    levels, interval = spec.levels, max(map(abs, values))
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


ORDINARY = st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100)
SPECIAL = st.sampled_from([math.nan, math.inf, -math.inf])


@given(
    st.lists(ORDINARY | SPECIAL, min_size=1, max_size=130),
    st.sampled_from(SPECS),
    st.sampled_from(FLOATS),
)
@example([1.0] * 70 + [math.inf, 2.0], BlockSpec("int4", 64), torch.float32)
@example([1.0, math.nan], BlockSpec("int8", 64), torch.float32)
@example([2.0**-99], BlockSpec("int8", 64), torch.float32)  # not yet nothing
@example([2.0**27, 1.0], NF4, torch.float32)
@example([2.0**28], NF4, torch.float32)
@example([7e-13, -7e-13, 1e-12], NF4, torch.float32)
def test_any_values_equal_the_scalar_model(
    values: list[float], spec: BlockSpec, dtype: torch.dtype
) -> None:
    """What is not finite makes its whole block NaN, and no other."""
    x = torch.tensor(values).to(dtype)
    torch.testing.assert_close(
        roundtrip(x, spec), torch.tensor(scalar_model(x, spec)), rtol=0, atol=0, equal_nan=True
    )


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
    with pytest.raises(ValueError, match="make it contiguous"):  # no rows and columns
        view_of(torch.arange(24.0).view(2, 3, 4).permute(2, 1, 0))
    with pytest.raises(ValueError, match="adjacent"):
        View(torch.ones(10, 2)[:, 0], 1, 10, 10)
