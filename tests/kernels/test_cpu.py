# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The CPU kernels give the reference's bits, at every instruction set that this processor has."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch

from tests.kernels import cpu_library, golden
from tests.kernels.cpu_library import LEVELS, CpuKernels
from zero_topo.quant.pieces import FLOATS, Piece
from zero_topo.quant.spec import BlockSpec, Reduce

NAN_BITS = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}


@pytest.fixture
def whole(library: ctypes.CDLL, level: int) -> CpuKernels:
    """A backend that does each operation in one call."""
    return CpuKernels(library, level)


@pytest.fixture
def split(library: ctypes.CDLL, level: int) -> CpuKernels:
    """A backend that splits each operation at random places into four calls, in random order."""
    return CpuKernels(library, level, cuts=4)


@pytest.mark.parametrize("fmt", golden.FEW_FORMATS, ids=str)
def test_quantize_and_dequantize(whole: CpuKernels, fmt: golden.Format) -> None:
    """Messages, padding included, of every size and layout; values, and nothing besides them."""
    golden.check_quantize(whole, fmt)
    golden.check_dequantize(whole, fmt)


# One tile a block, and several.
@pytest.mark.parametrize("fmt", [f for f in golden.FORMATS if f.spec.block_size in (64, 256)], ids=str)
def test_reduce(whole: CpuKernels, fmt: golden.Format) -> None:
    """Sums of up to eight messages, scaled and accumulated."""
    golden.check_reduce(whole, fmt)


@pytest.mark.parametrize("spec", golden.SPECS, ids=str)
def test_requantize(whole: CpuKernels, spec: BlockSpec) -> None:
    """Messages of sums, to the same and to other bits."""
    golden.check_requantize(whole, spec)


@pytest.mark.parametrize("cuts", [1, 4], ids=["whole", "split"])
def test_sparse(library: ctypes.CDLL, level: int, cuts: int) -> None:
    """Masks to bits and back, picks above a threshold, count sketches and their inverse, with the work split or not."""
    golden.check_sparse(CpuKernels(library, level, cuts))


@pytest.mark.parametrize("fmt", [f for f in golden.FORMATS if f.spec.block_size in (128, 512, 1024)][::5], ids=str)
def test_split_work(split: CpuKernels, fmt: golden.Format) -> None:
    """Any split of the blocks among calls, in any order, gives the same bytes."""
    golden.check_operations(split, fmt, sources=(1, 2))
    golden.check_requantize(split, fmt.spec, sources=(3,))


LARGE = [
    ("bf16 rows with gaps", torch.bfloat16, BlockSpec(8, 256), (2003, 2560, 2600)),
    ("fp32 in one run", torch.float32, BlockSpec(4, 2048), (1, 9_000_001, 9_000_001)),
    ("fp16 odd rows", torch.float16, BlockSpec(8, 64, symmetric=False), (4001, 1111, 1200)),
]


@pytest.mark.parametrize(("dtype", "spec", "shape"), [case[1:] for case in LARGE], ids=[case[0] for case in LARGE])
def test_millions(split: CpuKernels, dtype: torch.dtype, spec: BlockSpec, shape: tuple[int, int, int]) -> None:
    """Several million elements, where results go past the caches; the last row ends early."""
    rows, columns, stride = shape
    limit = rows * stride - (stride - columns) - columns // 2
    source = golden.calm(limit, dtype)
    message = golden.same_message(split, [Piece(source, rows, columns, stride)], spec)
    held = Piece(torch.full_like(source, 3.25), rows, columns, stride)
    golden.same_sums(split, [message, message], spec, [held], Reduce(0.5, accumulate=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_overflow_is_one_nan(whole: CpuKernels, dtype: torch.dtype, bits: int) -> None:
    """A block with Inf inside becomes NaN of the same bits at every level (the golden suite accepts any NaN)."""
    spec = BlockSpec(bits, 64)
    x = torch.ones(70)
    x[3] = torch.inf
    message = torch.empty(spec.nbytes(70), dtype=torch.uint8)
    whole.quantize([golden.whole(x)], spec, message)
    out = torch.zeros(70, dtype=dtype)
    whole.dequantize(message, spec, [golden.whole(out)])
    found = out[:64].view(torch.int32 if dtype == torch.float32 else torch.int16)
    assert set(found.tolist()) == {NAN_BITS[dtype]}
    assert out[64:].float().tolist() == [1.0] * 6


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_half_rounds_as_the_reference(whole: CpuKernels, dtype: torch.dtype) -> None:
    """Output roundings at all exponents: each scale of either sign, times each INT8 value, denormal results too."""
    spec = BlockSpec(8, 64)
    scales = torch.arange(0, 2**32, 2**32 // 4096 - 977)[:4096].to(torch.uint32).view(torch.float32)
    numel = 64 * scales.numel()
    message = torch.arange(spec.nbytes(numel)).to(torch.uint8)
    offset = spec.scales_offset(numel)
    message[offset : offset + 4 * scales.numel()].view(torch.float32).copy_(scales)
    golden.same_values(whole, message, spec, [golden.whole(torch.zeros(numel, dtype=dtype))])


def test_clang_builds_the_same_kernels() -> None:
    """Another compiler raises instruction sets in its own way; nothing else changes."""
    if shutil.which("clang++") is None:
        pytest.skip("clang++ is not installed")
    library = cpu_library.load(cpu_library.build("clang++"))
    for level in range(library.zt_cpu_best_level() + 1):
        golden.check_a_little(CpuKernels(library, level))


def test_other_processors_have_the_scalar_kernels() -> None:
    """Where there are no x86 instructions, the plain kernels are the best and the others are refused."""
    library = cpu_library.load(cpu_library.build(flags=["-DZT_X86=0"]))
    assert library.zt_cpu_best_level() == LEVELS["scalar"]
    golden.check_a_little(CpuKernels(library))
    with pytest.raises(ValueError, match="lacks the instructions"):
        golden.check_a_little(CpuKernels(library, LEVELS["avx2"]))


def test_every_status_has_a_sentence(library: ctypes.CDLL) -> None:
    """zt_error_text says something of its own for each status of the header, and something for any other number."""
    texts = [library.zt_error_text(status).decode() for status in range(9)]
    assert len(set(texts)) == 9 and "an unknown error" not in texts
    assert library.zt_error_text(-5) == library.zt_error_text(99) == b"an unknown error"
