# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The compiled module that the engine loads, behind its torch binding: the reference's bits, on one
and two threads.

On the CPU, or where ``ZERO_TOPO_TEST_DEVICE`` says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.device import DEVICE, ON_GPU
from tests.kernels import golden, golden_codes, golden_members
from tests.kernels.operators import Operators
from zero_topo.quant import operators, ops
from zero_topo.quant.operands import FLOATS, from_sources, to_members
from zero_topo.quant.operators import BackendUnavailable
from zero_topo.quant.spec import BlockSpec, Cast

# On the CPU test_cpu.py tries each instruction set
pytestmark = [] if ON_GPU else [pytest.mark.long]

BLOCKS = golden.GPU_FORMATS if ON_GPU else golden.FEW_FORMATS[::5]
FORMATS = [*BLOCKS, *golden.CAST_FORMATS[::4]]
FATES = golden_codes.FATES if ON_GPU else ("mixed",)

LARGE = 2**31 + 2**20 if ON_GPU and "ZERO_TOPO_TEST_SMALL" not in os.environ else 2**20


@pytest.fixture(scope="module")
def native() -> Iterator[Operators]:
    """The kernels for this processor; compiled here if no one has yet."""
    try:
        before = operators.use("native", DEVICE)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    yield Operators()
    operators.use(before, DEVICE)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """That many of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_operation_gives_the_references_bits(native: Operators, fmt: golden.Format) -> None:
    """Arguments arrive in the kernels as they were given."""
    golden.check_operations(native, fmt, DEVICE.type, sources=(3,))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "fmt", [golden.GPU_FORMATS[0], golden.GPU_FORMATS[-1], *golden.CAST_FORMATS[1::3]], ids=str
)
def test_all_members_are_served_in_one_call(native: Operators, fmt: golden.Format) -> None:
    """Tables, strides and what is left out arrive as they were given."""
    golden_members.check_members(native, fmt, DEVICE.type)


@pytest.mark.parametrize("spec", [*golden.SERVED, Cast("fp16")], ids=str)
def test_sums_are_quantized_again(native: Operators, spec: golden.Spec) -> None:
    """As the operation above, without a detour through memory."""
    golden.check_requantize(native, spec, DEVICE.type)


def test_roundings(native: Operators) -> None:
    """Half way between two values the even one, at every exponent; denormals; the smallest and
    largest blocks.
    """
    golden.check_roundings(native, DEVICE.type)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_threads_share_the_work_without_changing_a_bit(
    native: Operators, dtype: torch.dtype
) -> None:
    """Large enough to be split: several million values, an odd number."""
    golden.check_quantize(
        native, golden.Format(BlockSpec("int4"), dtype), DEVICE.type, numels=[3_000_001]
    )
    golden.check_dequantize(
        native, golden.Format(BlockSpec("int8"), dtype), DEVICE.type, numels=[2_000_003]
    )
    golden.check_quantize(
        native, golden.Format(Cast("bf16"), dtype), DEVICE.type, numels=[2_500_003]
    )
    golden.check_dequantize(
        native, golden.Format(Cast("fp32"), dtype), DEVICE.type, numels=[2_500_003]
    )


@pytest.mark.usefixtures("threads")
def test_the_sparse_operations_give_the_references_values(native: Operators) -> None:
    """Masks, selections and sketches."""
    golden.check_sparse(native, DEVICE.type)
    x = golden.values(300_001, torch.float32, 2).to(DEVICE)
    indices, selected = (
        torch.empty(300_001, dtype=kind, device=DEVICE) for kind in (torch.int64, torch.float32)
    )
    found = int(native.compact_above(x, 0.5, indices, selected))
    assert torch.equal(indices[:found], (x.abs() < 0.5).logical_not().nonzero()[:, 0])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("fate", FATES)
def test_codes_have_the_references_bits(native: Operators, fate: str) -> None:
    """Tables, parts and what is left out arrive as they were given; enough blocks to be split."""
    for layout in (*golden_codes.RAGGED, *golden_codes.SINGLE, golden_codes.single(1283)):
        golden_codes.check_codes(native, layout, fate, DEVICE.type)
    golden_codes.check_extremes(native, device=DEVICE.type)


@pytest.mark.usefixtures("threads")
def test_nothing_is_limited_by_its_number(native: Operators) -> None:
    """Messages of 9,408 nodes but this rank's own, 5,000 pieces, 1,000 members."""
    golden_members.check_many(native, 9408, 5000, DEVICE.type)
    golden_members.check_many_pieces(native, 5000, DEVICE.type)
    golden_members.check_many_members(native, 1000, DEVICE.type)


def test_large_tensors(native: Operators) -> None:
    """On a GPU more values than 32 bits count."""
    golden.check_large(native, LARGE, DEVICE.type)


def test_large_codes(native: Operators) -> None:
    """On a GPU more codes than 32 bits count."""
    golden_codes.check_large(native, LARGE, DEVICE.type)


def test_what_the_kernels_refuse_is_an_error(native: Operators) -> None:
    """A message of the wrong size is not read: the binding says which rule it breaks."""
    short = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(RuntimeError, match="zero_topo kernels: "):
        out = to_members(short.new_zeros(384))
        native.requantize(from_sources(short[None]), BlockSpec("int8"), BlockSpec("int8"), out, 3)
    with pytest.raises(ValueError, match="384 contiguous bytes"):
        ops.dequantize(short, BlockSpec("int8"), torch.empty(3, device=DEVICE))
