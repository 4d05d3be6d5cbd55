# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The kernels keep to their arrays: the tests again with AddressSanitizer and UBSan, and arrays
fenced by the MMU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from op_builder.jit import cache_dir
from tests.kernels import golden
from tests.kernels.operators import Operators, limited
from tests.launching import ROOT, output
from zero_topo.quant.operands import FLOATS, Messages, View, to_members, total_numel
from zero_topo.quant.spec import BlockSpec, Cast

FLAGS = [
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
]
FLAGS += ["-O1", "-g1"]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """For a process that loads sanitized kernels; skips where the compiler has no sanitizers."""
    return {
        **built_with("sanitized", "g++", FLAGS),
        "LD_PRELOAD": " ".join(_library(name) for name in ("libasan.so", "libubsan.so")),
        # Leaks are Python's own; short stacks and a small quarantine make allocations cheap.
        "ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=2:quarantine_size_mb=16",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def built_with(name: str, compiler: str, flags: Sequence[str]) -> dict[str, str]:
    """For a process whose kernels another compiler makes, or one with more flags; they are kept for
    the next run.

    The binding is compiled without these flags and unoptimized, in half the time.
    """
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    directory = cache_dir() / f"zt_test_{name}"
    directory.mkdir(parents=True, exist_ok=True)
    wrapper = directory / compiler  # the last flags win
    real, more = shutil.which(compiler), " ".join(flags)
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *zt_binding.cpp*) exec {real} "$@" -O0 ;; *) exec {real} "$@" '
        f"{more} ;; esac\n"
    )
    wrapper.chmod(0o755)
    return {**os.environ, "CXX": str(wrapper), "TORCH_EXTENSIONS_DIR": str(directory)}


def _library(name: str) -> str:
    asked = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    path = Path(asked.stdout.strip())
    if not path.is_absolute():
        pytest.skip(f"g++ has no {name}")
    return str(path)


def check_kernel_tests(environment: Mapping[str, str], name: str, which: str = "") -> None:
    """Tests of the kernels pass in a process with this environment."""
    tests = str(ROOT / "tests" / "kernels" / name)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        which,
        tests,
    ]
    said = output(command, cwd=ROOT, env=environment)
    assert " passed" in said and " failed" not in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("test_cpu.py", ""),
        ("test_cpu_malformed.py", ""),
        ("test_cpu_codes.py", "mixed or changes or refused or any"),
    ],
)
def test_the_kernel_tests_pass_under_sanitizers(
    environment: dict[str, str], name: str, which: str
) -> None:
    """No access out of bounds and nothing undefined in anything that the other files do."""
    check_kernel_tests(environment, name, which)


@pytest.mark.long
@pytest.mark.parametrize(
    ("compiler", "flags"), [("clang++", []), ("g++", ["-DZT_X86=0"])], ids=["clang", "no x86"]
)
def test_other_builds_have_the_same_bits(compiler: str, flags: list[str]) -> None:
    """Another compiler vectorises in its own way; without x86 instructions the plain kernels are
    the best.
    """
    for name in ("test_cpu.py", "test_cpu_codes.py"):
        check_kernel_tests(built_with(f"{compiler}{len(flags)}", compiler, flags), name)


FENCED: list[golden.Spec] = [
    *(spec for spec in golden.SPECS if spec.block_size in (64, 512)),
    *golden.CASTS,
]


class FencedMemory:
    """Tensors that end (or begin) where memory does: an access beyond is a segmentation fault,
    whatever makes it.
    """

    def __init__(self, at_end: bool) -> None:
        self._at_end = at_end
        self._maps: list[mmap.mmap] = []

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros, with an inaccessible page behind (or before) them."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        page, size = mmap.PAGESIZE, numel * dtype.itemsize
        memory = mmap.mmap(-1, (-(-size // page) + 1) * page)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        fence = begin + len(memory) - page if self._at_end else begin
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0
        self._maps.append(memory)
        return torch.frombuffer(
            memory,
            dtype=dtype,
            count=numel,
            offset=len(memory) - page - size if self._at_end else page,
        )

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """The values of another tensor."""
        return self.tensor(x.numel(), x.dtype).copy_(x.view(-1))


def everything_fenced(backend: Operators, n: int, fenced: FencedMemory) -> None:
    """Each operation on n elements, every array fenced."""
    for dtype in FLOATS:
        x = fenced.copy(golden.values(n, dtype))
        found = int(backend.count_above(x, 0.5))
        backend.compact_above(
            x, 0.5, fenced.tensor(found, torch.int64), fenced.tensor(found, dtype)
        )
        backend.compact_above(
            x, 0.0, fenced.tensor(found // 2, torch.int64), fenced.tensor(found // 2, dtype)
        )
        if dtype == torch.float32:
            k = -(-n // 20)
            largest = fenced.tensor(k, torch.int64).view(1, k)
            backend.row_largest(x.view(1, n), largest)
            if n <= 1 << 15:
                form, size = [n, k, 3, 0], -(-(k + (n >> 3) + 4 * k) // 8) + 4
                packet = fenced.tensor(size, torch.uint8).view(1, size)
                backend.ternary_encode(x.view(1, n), largest, form, packet)
                begins, values = (
                    fenced.tensor(1, torch.int64).zero_().view(1, 1),
                    fenced.tensor(k, torch.float32),
                )
                backend.ternary_decode(packet, begins, form, fenced.tensor(k, torch.int64), values)
        for spec in FENCED:
            rows = n // 2 + 1
            last = 3 * (rows + 4) + rows - 7  # the second member's
            two = View(
                fenced.tensor(max(last, 1), dtype),
                2,
                rows + 3,
                rows + 4,
                2,
                2 * (rows + 4),
                present=rows,
            )
            pieces = [View(x[: n // 2 * 2], 1, n // 2, n // 2, 2, n // 2), two]
            table = fenced.tensor(2 * spec.nbytes(total_numel(pieces)), torch.uint8).view(
                1, 1, 2, -1
            )
            out = Messages(table)
            backend.quantize(pieces, spec, out)
            backend.dequantize_reduce(out, spec, pieces)
            twice = Messages(table.expand(3, 1, 2, -1), without_source=1)
            backend.dequantize_reduce(twice, spec, pieces, 0.5, accumulate=True)
            summed = Messages(fenced.tensor(table.numel(), torch.uint8).view(1, 2, 1, -1))
            backend.requantize(twice, spec, spec, summed, total_numel(pieces))
    bits, mask = fenced.tensor(-(-n // 8), torch.uint8), fenced.copy(torch.arange(n) % 3 == 0)
    backend.mask_pack(mask, bits)
    backend.mask_unpack(bits, mask)
    sketch, values = fenced.tensor(7 * 1024, torch.float32).view(7, 1024), fenced.copy(mask.float())
    backend.sketch_insert(values[None], 5, sketch[None])
    backend.sketch_peel(sketch, bits, 5, values)


def streams_fenced(backend: Operators, n: int, fenced: FencedMemory) -> None:
    """So many elements that results go past the caches, to an address that is no multiple of a
    cache line's.
    """
    values = fenced.tensor(n, torch.bfloat16)
    for spec in (BlockSpec("int8", 256), Cast("bf16"), Cast("fp32")):
        message = fenced.tensor(spec.nbytes(n), torch.uint8)
        for piece in (
            View(values, 1, n, n),
            View(values[1:], 1, n, n),
            View(values, n // 9000, 9000, 9001),
        ):
            part = (
                message
                if piece.numel == n
                else fenced.tensor(spec.nbytes(piece.numel), torch.uint8)
            )
            backend.quantize([piece], spec, to_members(part))
            backend.dequantize_reduce(to_members(part), spec, [piece])


@pytest.mark.parametrize("at_end", [True, False], ids=["end", "beginning"])
def test_nothing_beyond_any_array_is_touched(module: ModuleType, level: int, at_end: bool) -> None:
    """Neither read nor written, also by instructions that sanitizers do not see (masked ones, for
    example).
    """
    child = os.fork()
    if child == 0:  # a fault ends this process only
        status = 1
        try:
            with limited(module, level) as kernels:
                for n in (1, 7, 64, 65, 200, 1100):
                    everything_fenced(kernels, n, FencedMemory(at_end))
                streams_fenced(kernels, 4_500_001, FencedMemory(at_end))
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
