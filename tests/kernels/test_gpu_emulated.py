# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The GPU kernels, run thread by thread on a CPU, give the reference's bits, on wavefronts of 32 and of 64 lanes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from op_builder import source_dir
from tests.kernels import golden
from tests.kernels import gpu_library as gpu
from tests.kernels.gpu_library import BOTH, OK, OTHER, PLAIN, GpuLibrary, KernelError, Settings
from zero_topo.quant import reference
from zero_topo.quant.operands import DTYPES
from zero_topo.quant.spec import BlockSpec, Cast

CASES = [
    *(pytest.param(PLAIN, fmt, id=f"wave32-{fmt}") for fmt in (*golden.FORMATS, *golden.CAST_FORMATS)),
    *(pytest.param(OTHER, fmt, id=f"wave64-{fmt}") for fmt in (*golden.FEW_FORMATS, *golden.CAST_FORMATS)),
]

LAUNCH_FAILED = 8


@pytest.mark.parametrize(("chosen", "fmt"), CASES)
def test_operations(library: ctypes.CDLL, chosen: Settings, fmt: golden.Format) -> None:
    """Messages, values and sums of every format are the reference's; nothing is written where no piece is."""
    golden.check_operations(GpuLibrary(library, chosen), fmt)


@pytest.mark.parametrize("chosen", BOTH)
@pytest.mark.parametrize("spec", [*golden.SPECS, *map(Cast, DTYPES)], ids=str)
def test_requantize(library: ctypes.CDLL, chosen: Settings, spec: golden.Spec) -> None:
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


@pytest.mark.parametrize("chosen", BOTH)
def test_roundings(library: ctypes.CDLL, chosen: Settings) -> None:
    """Half way between two values the even one, at every exponent; denormals; the smallest and largest blocks."""
    golden.check_roundings(GpuLibrary(library, chosen))


@pytest.mark.parametrize("spec", [BlockSpec(8, 64), BlockSpec(4, 2048)], ids=str)
def test_padding_of_messages_does_not_count(library: ctypes.CDLL, spec: BlockSpec) -> None:
    """Whatever lies behind the last value of a message: the padding of the message of the sum stands for zeros."""
    blocks = 16384 // spec.block_size
    numel = blocks * spec.block_size + 3
    messages = golden.messages_of(spec, numel, 3)[1:]
    for message in messages:
        message[numel * spec.bits // 8 + 1 : (blocks + 1) * spec.block_bytes] = 0x77
    golden.same_again(GpuLibrary(library, OTHER), messages, spec, spec, (numel, 1.0))


def test_few_thread_blocks(library: ctypes.CDLL) -> None:
    """Launches of fewer thread blocks than there is work for, which walk on."""
    backend, fmt = GpuLibrary(library, OTHER), golden.Format(BlockSpec(4, 64), torch.float16)
    for few in (fmt, golden.Format(Cast("bf16"), torch.float16)):
        golden.check_quantize(backend, few, numels=[20001])
        golden.check_dequantize(backend, few, numels=[20001])


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
    for path in [*source_dir().glob("zt_*.h"), *(source_dir() / f"zt_gpu_{name}.cu" for name in ("blocks", "casts"))]:
        (tmp_path / path.name).write_text(path.read_text().replace(right, wrong))
    library, fmt = gpu.emulated(tmp_path, tmp_path), golden.Format(BlockSpec(8, 256), torch.float32)
    golden.check_quantize(GpuLibrary(library, OTHER), fmt)
    with pytest.raises(KernelError):
        golden.check_quantize(GpuLibrary(library, PLAIN), fmt)
