# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The GPU kernels, run thread by thread on a CPU, give the reference's bits, on wavefronts of 32 and of 64 lanes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from op_builder import source_dir
from op_builder.jit import cache_dir
from tests.kernels import golden
from tests.kernels import gpu_library as gpu
from tests.kernels.gpu_library import GpuLibrary, KernelError, Settings
from zero_topo.quant import reference
from zero_topo.quant.native import Native
from zero_topo.quant.pieces import FLOATS, Piece
from zero_topo.quant.spec import BlockSpec, Reduce, Total

PLAIN = Settings(wave=32)
OTHER = Settings(wave=64, descending=True, most_blocks=3)
"""As far from the first as can be: what a kernel computes must not depend on any of these."""

CASES = [
    *(pytest.param(PLAIN, fmt, id=f"wave32-{fmt}") for fmt in golden.FORMATS),
    *(pytest.param(OTHER, fmt, id=f"wave64-{fmt}") for fmt in golden.FEW_FORMATS),
]
BOTH = [pytest.param(PLAIN, id="wave32"), pytest.param(OTHER, id="wave64")]

MANY = [(1, None), (2, None), (3, 1), (4, 1), (129, None), (130, 0), (130, 77), (130, 129), (9408, 5000)]
"""Messages side by side, and which of them is left out."""

NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python's mmap does not name."""

OK, BAD_SPEC, BAD_DTYPE, BAD_SIZE, NO_TABLE, BAD_ALIGNMENT, LAUNCH_FAILED = 0, 1, 2, 3, 6, 7, 8


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """The kernels, compiled for the emulation."""
    return gpu.emulated(source_dir(), cache_dir())


@pytest.mark.parametrize(("chosen", "fmt"), CASES)
def test_operations(library: ctypes.CDLL, chosen: Settings, fmt: golden.Format) -> None:
    """Messages, values and sums of every format are the reference's; nothing is written where no piece is."""
    golden.check_operations(GpuLibrary(library, chosen), fmt)


@pytest.mark.parametrize("chosen", BOTH)
@pytest.mark.parametrize("spec", golden.SPECS, ids=str)
def test_requantize(library: ctypes.CDLL, chosen: Settings, spec: BlockSpec) -> None:
    """Messages of sums are the reference's, in the same and in other bits."""
    golden.check_requantize(GpuLibrary(library, chosen), spec)


@pytest.mark.parametrize("chosen", BOTH)
def test_sparse(library: ctypes.CDLL, chosen: Settings) -> None:
    """Masks, picks and sketches are the reference's."""
    golden.check_sparse(GpuLibrary(library, chosen))


@pytest.mark.parametrize("offset", [1, 7, 8])
def test_masks_anywhere(library: ctypes.CDLL, offset: int) -> None:
    """Masks and bits that begin at no round address."""
    mask = torch.rand(3000) < 0.4
    expected, bits = (torch.full((400,), 0xA5, dtype=torch.uint8) for _ in range(2))
    n = mask.numel() - offset
    size = -(-n // 8)
    reference.mask_pack(mask[offset:], expected[offset : offset + size])
    backend = GpuLibrary(library)
    backend.mask_pack(mask[offset:], bits[offset : offset + size])
    assert torch.equal(bits, expected)
    back = torch.ones(3000, dtype=torch.bool)
    backend.mask_unpack(bits[offset : offset + size], back[offset:])
    assert torch.equal(back[offset:], mask[offset:]) and bool(back[:offset].all())


@st.composite
def pieces_anywhere(draw: st.DrawFn) -> list[Piece]:
    """Some pieces of any shape, dtype, alignment and missing end."""
    made = []
    for _ in range(draw(st.integers(1, 5))):
        rows, columns = draw(st.integers(1, 6)), draw(st.sampled_from([1, 3, 8, 16, 40, 64, 129, 256, 700]))
        stride = columns + draw(st.sampled_from([0, 1, 8, 100]))
        extent, offset = (rows - 1) * stride + columns, draw(st.sampled_from([0, 0, 1, 4, 8]))
        flat = golden.values(offset + draw(st.sampled_from([extent, extent, 2 * extent, extent // 2])), draw(DTYPES))
        made.append(Piece(flat[offset:], rows, columns, stride))
    return made


DTYPES = st.sampled_from(FLOATS)
SPECS = st.sampled_from([BlockSpec(8, 64), BlockSpec(4, 256), BlockSpec(4, 512, False), BlockSpec(8, 2048)])


@given(pieces=pieces_anywhere(), spec=SPECS, chosen=st.sampled_from([PLAIN, OTHER]))
def test_pieces_anywhere(library: ctypes.CDLL, pieces: list[Piece], spec: BlockSpec, chosen: Settings) -> None:
    """Whatever the pieces: they are read, written and added to where they lie and nowhere else."""
    backend = GpuLibrary(library, chosen)
    message = golden.same_message(backend, pieces, spec)
    held = [Piece(p.flat.nan_to_num(0.5), p.rows, p.columns, p.stride) for p in pieces]
    golden.same_sums(backend, [message] * 3, spec, held, Reduce(0.3, accumulate=True))


@pytest.mark.parametrize("spec", [BlockSpec(8, 64), BlockSpec(4, 64), BlockSpec(8, 64, False)], ids=str)
def test_smallest_and_largest_blocks(library: ctypes.CDLL, spec: BlockSpec) -> None:
    """Blocks whose size is at the bound of being zero, just below it, and the largest there is."""
    sizes = torch.tensor([2.0**-100, 2.0**-100 * (1 - 2.0**-24), 2.0**-99, torch.finfo(torch.float32).max, 2.0**-149])
    x = (sizes[:, None] * torch.linspace(0, 1, 64).square()).view(-1)
    message = golden.same_message(GpuLibrary(library), [golden.whole(x)], spec)
    scales = message[spec.scales_offset(x.numel()) :][:20].view(torch.float32)
    assert (scales > 0).tolist() == [True, False, True, True, False]


@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 8), (torch.float16, 11)], ids=["bf16", "fp16"])
def test_rounding_of_ties(library: ctypes.CDLL, dtype: torch.dtype, digits: int) -> None:
    """Values half way between two of the output type go to the even one, small ones of FP16 become its denormals."""
    spec, numel = BlockSpec(8, 64), 64 * 4
    message = torch.zeros(spec.nbytes(numel), dtype=torch.uint8)
    message[:numel] = torch.arange(numel) % 256
    scales = torch.tensor([1 + 2.0**-digits, 1 + 3 * 2.0**-digits, 2.0**-24, 600.5])
    message[spec.scales_offset(numel) :][:16] = scales.view(torch.uint8)
    golden.same_values(GpuLibrary(library), message, spec, [golden.whole(torch.empty(numel, dtype=dtype))])


@pytest.mark.parametrize("spec", [BlockSpec(8, 64), BlockSpec(4, 2048, False)], ids=str)
def test_padding_of_messages_does_not_count(library: ctypes.CDLL, spec: BlockSpec) -> None:
    """Whatever lies behind the last value of a message: the padding of the message of the sum stands for zeros."""
    blocks = 16384 // spec.block_size
    numel = blocks * spec.block_size + 3
    messages = golden.messages_of(spec, numel, 3)[1:]
    for message in messages:
        message[numel * spec.bits // 8 + 1 : (blocks + 1) * spec.block_bytes] = 0x77
    golden.same_again(GpuLibrary(library, OTHER), messages, spec, spec, Total(numel))


def test_few_thread_blocks(library: ctypes.CDLL) -> None:
    """Launches of fewer thread blocks than there is work for, which walk on."""
    backend, fmt = GpuLibrary(library, OTHER), golden.Format(BlockSpec(4, 64), torch.float16)
    golden.check_quantize(backend, fmt, numels=[20001])
    golden.check_dequantize(backend, fmt, numels=[20001])


def test_as_many_as_one_call_takes(library: ctypes.CDLL) -> None:
    """64 pieces go into one launch; those without elements do not count."""
    parts = [golden.whole(golden.calm(5 + i, torch.float32)) for i in range(64)]
    parts += [Piece(torch.empty(0), 0, 3, 3)] * 9
    golden.same_message(GpuLibrary(library), parts, BlockSpec(4, 128))


@pytest.mark.parametrize(("sources", "hole"), MANY)
def test_many_messages(library: ctypes.CDLL, sources: int, hole: int | None) -> None:
    """9,408 nodes may send, this rank's own message left out among theirs: evenly spaced ones go by their spacing."""
    golden.check_many(GpuLibrary(library), sources, hole)


@pytest.mark.parametrize(("left_out", "even"), [((), 1), ((0, 2), 1), ((3, 5), 0), ((4, 5), 0), (range(1, 7), 1)])
def test_what_is_even(library: ctypes.CDLL, left_out: Sequence[int], even: int) -> None:
    """One hole at the most, of one message."""
    rows = [row for i, row in enumerate(torch.zeros(8, 16, dtype=torch.uint8).unbind()) if i not in left_out]
    assert library.zt_gpu_even(gpu.c_messages(rows), len(rows)) == even


def test_the_binding_for_torch() -> None:
    """The torch module that an engine on a GPU calls, over the emulated kernels; uneven messages are copied."""
    native = Native(gpu.bound(source_dir()), lambda: 0)
    golden.check_many(native, 130, 77)
    spec = BlockSpec(8, 64)
    rows = [golden.messages_of(spec, 64, 5)[i] for i in (3, 0, 1, 4, 2)]
    golden.same_sums(native, rows, spec, [golden.whole(torch.ones(64))], Reduce())
    golden.check_a_little(native)


@pytest.fixture
def huge() -> Iterator[Callable[[int, torch.dtype], Tensor]]:
    """Makes tensors of zeros that take memory only where they are touched."""
    maps = []

    def make(numel: int, dtype: torch.dtype) -> Tensor:
        size = numel * torch.empty(0, dtype=dtype).element_size()
        maps.append(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE))
        return torch.frombuffer(maps[-1], dtype=dtype)

    yield make


def test_pieces_beyond_32_bits(library: ctypes.CDLL, huge: Callable[[int, torch.dtype], Tensor]) -> None:
    """Rows over 2^31 elements (and 2^32 bytes) apart are found, read and written."""
    backend, spec, stride = GpuLibrary(library), BlockSpec(8, 256), 2**31 + 24
    flat = huge(2 * stride + 1000, torch.bfloat16)
    piece = Piece(flat, 3, 999, stride)
    for row in range(3):
        flat[row * stride : row * stride + 999] = golden.calm(999, torch.bfloat16, row)
    packed = [golden.whole(torch.cat([flat[row * stride : row * stride + 999] for row in range(3)]))]
    expected, actual = (torch.full((spec.nbytes(2997),), fill, dtype=torch.uint8) for fill in (1, 2))
    reference.quantize(packed, spec, expected)
    backend.quantize([piece], spec, actual)
    golden.assert_same(actual, expected, "quantize")
    reference.dequantize(expected, spec, packed)
    backend.dequantize(actual, spec, [piece])
    for row in range(3):
        golden.assert_same(flat[row * stride : row * stride + 999], packed[0].flat[row * 999 :][:999], f"row {row}")


@pytest.mark.parametrize(
    ("spec", "quantized", "dequantized"),
    [(BlockSpec(8, 256), 32, 32), (BlockSpec(4, 2048, False), 8, 4)],
    ids=["int8/256", "int4/2048a"],
)
def test_messages_beyond_32_bits(
    library: ctypes.CDLL,
    huge: Callable[[int, torch.dtype], Tensor],
    spec: BlockSpec,
    quantized: int,
    dequantized: int,
) -> None:
    """The last blocks of a message of over 2^32 values: of all thread blocks, only those that have these are run."""
    whole, rest = 2**32, 2 * spec.block_size + 40
    before, blocks = whole // spec.block_size, spec.blocks(rest)
    x, message = huge(whole + rest, torch.float16), huge(spec.nbytes(whole + rest), torch.uint8)
    x[whole:] = golden.calm(rest, torch.float16)
    last = Settings(most_blocks=2**31, first_block=before // quantized)
    GpuLibrary(library, last).quantize([golden.whole(x)], spec, message)
    small = torch.empty(spec.nbytes(rest), dtype=torch.uint8)
    reference.quantize([golden.whole(x[whole:])], spec, small)
    for offset, here, size in [
        (before * spec.block_bytes, 0, blocks * spec.block_bytes),
        (spec.scales_offset(whole + rest) + 4 * before, spec.scales_offset(rest), 4 * blocks),
        (spec.zero_points_offset(whole + rest) + 4 * before, spec.zero_points_offset(rest), 4 * blocks),
    ]:
        assert torch.equal(message[offset : offset + size], small[here : here + size])
    wanted = torch.empty(rest, dtype=torch.float16)
    reference.dequantize(small, spec, [golden.whole(wanted)])
    x[whole:] = 0
    last = Settings(most_blocks=2**31, first_block=before // dequantized)
    GpuLibrary(library, last).dequantize(message, spec, [golden.whole(x)])
    golden.assert_same(x[whole:], wanted, "dequantize")


def test_refusals(library: ctypes.CDLL) -> None:
    """What the C interface cannot do it says, without a launch; nothing at all is done gladly."""
    spec, x = BlockSpec(8, 256), torch.ones(300)
    message = torch.zeros(spec.nbytes(300) + 16, dtype=torch.uint8)
    fits = message[:-16]
    backend = GpuLibrary(library)

    def status(name: str, *arguments: object) -> int:
        try:
            backend.call(name, *arguments)
        except KernelError as error:
            return error.status
        return OK

    def quantize(wire: gpu.CSpec | None = None, to: Tensor = fits, count: int = 1, **fields: object) -> int:
        pieces = gpu.c_pieces([golden.whole(x)] * max(count, 1))
        for name, value in fields.items():
            setattr(pieces[0], name, value)
        return status("quantize", wire or gpu.c_spec(spec), pieces, count, gpu.c_message(to))

    assert quantize() == OK
    assert quantize(gpu.CSpec(7, 256, 1)) == BAD_SPEC
    assert quantize(dtype=3) == BAD_DTYPE
    assert quantize(to=message) == BAD_SIZE
    assert quantize(to=message[8:-8]) == BAD_ALIGNMENT
    assert quantize(to=message[16:]) == OK
    assert quantize(rows=-1) == BAD_SIZE
    assert quantize(limit=-1) == BAD_SIZE
    assert quantize(rows=2, columns=150, row_stride=149) == BAD_SIZE
    assert quantize(rows=2**40, columns=2**40) == BAD_SIZE
    assert quantize(data=0) == BAD_SIZE
    assert quantize(count=65) == TOO_MANY
    assert quantize(count=-1) == BAD_SIZE
    assert quantize(to=message[:0], count=0) == OK
    many, uneven = [fits, message[16:]], [fits, fits]
    pieces = gpu.c_pieces([golden.whole(x)]), 1
    reduce = gpu.CReduce(1.0, 0)
    assert status("dequantize_reduce", gpu.c_spec(spec), gpu.c_messages(many), 2, *pieces, reduce) == OK
    assert status("dequantize_reduce", gpu.c_spec(spec), gpu.c_messages(uneven), 2, *pieces, reduce) == UNEVEN
    assert status("dequantize_reduce", gpu.c_spec(spec), gpu.c_messages(many), 0, *pieces, reduce) == BAD_SIZE
    other = gpu.c_spec(BlockSpec(8, 512))
    arguments = gpu.c_messages(many), 1, gpu.c_spec(spec), gpu.c_message(fits), 300
    assert status("requantize", gpu.c_spec(spec), *arguments, reduce) == OK
    assert status("requantize", other, *arguments, reduce) == BAD_SPEC
    assert status("requantize", gpu.c_spec(spec), *arguments, gpu.CReduce(1.0, 1)) == BAD_SPEC
    assert status("count_above", x.data_ptr(), 3, 300, 1.0, fits.data_ptr()) == BAD_DTYPE
    assert status("sketch_insert", x.data_ptr(), 300, 1, 2, fits.data_ptr()) == BAD_SIZE


PROBE = r"""
#include "zt_gpu_portable.h"

struct zt_probe {
    uint32_t *out;
    int width, odd;
};

/* Each lane's partner. With `odd`, one lane does not come. */
ZT_KERNEL(64) zt_probe_shuffle(ZT_ARGUMENTS zt_probe a) {
    if ((int)threadIdx.x == a.odd) return;
    a.out[threadIdx.x] = zt_shuffle_xor(threadIdx.x, a.width / 2, a.width);
}

ZT_KERNEL(64) zt_probe_ballot(ZT_ARGUMENTS zt_probe a) { a.out[threadIdx.x] = zt_ballot(threadIdx.x % 3 == 0); }

/* A neighbour's number through shared memory; with `odd`, without waiting for it. */
ZT_KERNEL(64) zt_probe_shared(ZT_ARGUMENTS zt_probe a) {
    __shared__ uint32_t shared[64];
    shared[threadIdx.x] = 0;
    __syncthreads();
    shared[threadIdx.x] = threadIdx.x + 1;
    if (!a.odd) __syncthreads();
    a.out[threadIdx.x] = shared[(threadIdx.x + 1) % 64];
}

ZT_KERNEL(64) zt_probe_vector(ZT_ARGUMENTS zt_probe a) { (void)zt_load<uint4>(a.out + a.odd); }

extern "C" int zt_probe_run(int which, uint32_t *out, int width, int odd) {
    void (*const kernels[])(zt_probe) = {zt_probe_shuffle, zt_probe_ballot, zt_probe_shared, zt_probe_vector};
    return zt_launch(kernels[which], 1, 64, zt_probe{out, width, odd}, nullptr);
}
"""
SHUFFLE, BALLOT, SHARED, VECTOR = range(4)
Probe = Callable[[Settings, int, int, int], list[int]]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    """Runs one of the kernels above, with a width and a thread (or -1) that misbehaves; what 64 threads wrote."""
    source = tmp_path_factory.mktemp("probe")
    (source / "zt_gpu_probe.cu").write_text(PROBE)
    for header in source_dir().glob("zt_*.h"):
        (source / header.name).write_text(header.read_text())
    probes = gpu.emulated(source, source)
    out = torch.zeros(64, dtype=torch.int32)

    def run(chosen: Settings, which: int, width: int, odd: int) -> list[int]:
        status = GpuLibrary(probes, chosen).status("zt_probe_run", which, ctypes.c_void_p(out.data_ptr()), width, odd)
        assert status in (OK, LAUNCH_FAILED)
        return [] if status else out.tolist()

    return run


def test_the_emulation_of_shuffles(probe: Probe) -> None:
    """A width above the wave's is refused, as is a lane that does not come; ballots are of 32 lanes on any wave."""
    assert probe(PLAIN, SHUFFLE, 32, -1) == [lane ^ 16 for lane in range(64)]
    assert probe(OTHER, SHUFFLE, 64, -1) == [lane ^ 32 for lane in range(64)]
    assert not probe(PLAIN, SHUFFLE, 64, -1)
    assert not probe(PLAIN, SHUFFLE, 16, 33)
    for chosen in (PLAIN, OTHER):
        ballots = probe(chosen, BALLOT, 0, 0)
        first, second = (sum((lane % 3 == 0) << (lane % 32) for lane in half) for half in (range(32), range(32, 64)))
        assert [word & 0xFFFFFFFF for word in ballots] == [first] * 32 + [second] * 32


def test_the_emulation_of_memory(probe: Probe) -> None:
    """A missing barrier shows under one of the orders; a misaligned vector is refused."""
    right = [(lane + 1) % 64 + 1 for lane in range(64)]
    assert all(probe(chosen, SHARED, 0, 0) == right for chosen in (PLAIN, OTHER))
    assert not all(probe(chosen, SHARED, 0, 1) == right for chosen in (PLAIN, OTHER))
    assert probe(PLAIN, VECTOR, 0, 4) and not probe(PLAIN, VECTOR, 0, 1)


def test_kernels_for_one_wave_size_are_seen(tmp_path: Path) -> None:
    """A quantization with shuffles over 64 lanes passes on wavefronts of 64 and not on those of 32."""
    right, wrong = "zt_shuffle_xor(most, by, lanes)", "zt_shuffle_xor(most, by, 64)"
    for path in [*source_dir().glob("zt_*.h"), source_dir() / "zt_gpu_blocks.cu"]:
        (tmp_path / path.name).write_text(path.read_text().replace(right, wrong))
    library, fmt = gpu.emulated(tmp_path, tmp_path), golden.Format(BlockSpec(8, 256), torch.float32)
    golden.check_quantize(GpuLibrary(library, OTHER), fmt)
    with pytest.raises(KernelError):
        golden.check_quantize(GpuLibrary(library, PLAIN), fmt)
