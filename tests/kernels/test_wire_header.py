# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The wire format is written twice, in Python and in a C header: the two agree on every size."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_builder import source_dir
from tests.kernels import golden
from tests.kernels.c_types import c_spec
from zero_topo.quant.spec import BlockSpec

PROGRAM = r"""
#include <inttypes.h>
#include <stdio.h>
#include "zt_wire.h"

int main(void) {
    zt_wire_spec s;
    int64_t n;
    while (scanf("%" SCNd32 " %" SCNd32 " %" SCNd32, &s.bits, &s.block_size, &s.symmetric) == 3 &&
           scanf("%" SCNd32 " %" SCNd64, &s.dtype, &n) == 2) {
        printf("%d %" PRId64 " %" PRId64, zt_wire_valid(s), zt_wire_blocks(s, n), zt_wire_scales_offset(s, n));
        printf(" %" PRId64 " %" PRId64 "\n", zt_wire_zero_points_offset(s, n), zt_wire_nbytes(s, n));
    }
    return 0;
}
"""

COMPILERS = {
    "gcc": ["gcc", "-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-pedantic", "-x", "c"],
    "g++": ["g++", "-std=c++17", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-x", "c++"],
    "nvcc": ["nvcc", "-std=c++17", "-x", "cu"],
    "hipcc": ["env", "HIP_PLATFORM=amd", "hipcc", "-std=c++17", "-x", "hip", "--offload-arch=gfx90a"],
}

Case = tuple[golden.Spec, int]
EDGES = [0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 2047, 2048, 2049, 99991, 2**20 + 1]
KNOWN: list[golden.Spec] = [*golden.SPECS, *golden.CASTS]
LARGE = [2**31 - 1, 2**31, 2**31 + 1, 2**32 + 255, 3 * 2**33 + 7, 2**40 - 1, 2**52 + 1]


def asked(program: Path, cases: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """(valid, blocks, scales offset, zero points offset, nbytes) of (bits, block size, symmetric, dtype, elements)."""
    lines = "".join(" ".join(map(str, case)) + "\n" for case in cases)
    output = subprocess.run([program], input=lines, capture_output=True, text=True, check=True).stdout
    return [[int(word) for word in line.split()] for line in output.splitlines()]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Asks the header, compiled as C."""
    return compiled("gcc", tmp_path_factory.mktemp("wire"))


def compiled(compiler: str, directory: Path) -> Path:
    """The program above, built with one of the compilers; skips, saying so, where the machine lacks it."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    source, program = directory / "wire.c", directory / "wire"
    source.write_text(PROGRAM)
    command = [*COMPILERS[compiler], f"-I{source_dir()}", str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def check(program: Path, cases: Sequence[Case]) -> None:
    """The header's numbers are those of zero_topo.quant.spec, with 1 for a valid specification."""
    specs = [c_spec(spec) for spec, _ in cases]
    given = [(s.bits, s.block_size, s.symmetric, s.dtype, n) for s, (_, n) in zip(specs, cases, strict=True)]
    for (spec, n), (valid, blocks, *offsets, nbytes) in zip(cases, asked(program, given), strict=True):
        assert (valid, nbytes) == (1, spec.nbytes(n)), spec
        if isinstance(spec, BlockSpec):
            assert [blocks, *offsets] == [spec.blocks(n), spec.scales_offset(n), spec.zero_points_offset(n)], spec
        else:
            assert blocks == n


def test_header_agrees_at_every_edge(program: Path) -> None:
    """Around block and padding boundaries, and past 31, 32 and 40 bits, for every known specification."""
    check(program, [(spec, numel) for spec in KNOWN for numel in [*EDGES, *LARGE]])


@given(st.lists(st.tuples(st.sampled_from(KNOWN), st.integers(0, 2**52)), min_size=1, max_size=200))
def test_header_agrees_anywhere(program: Path, cases: list[Case]) -> None:
    """Anywhere up to 2^52 elements."""
    check(program, cases)


BAD_BLOCKS = [(7, 256, 1), (8, 100, 1), (8, 32, 1), (4, 4096, 1), (8, -64, 1), (8, 256, 2)]
BAD_CASTS = [(16, 1, 0, 0), (32, 1, 0, 1), (32, 1, 1, 0), (16, 1, 0, 3), (16, 1, 0, -1), (8, 1, 0, 0), (8, 256, 1, 1)]


@pytest.mark.parametrize("bad", [*((*spec, 0) for spec in BAD_BLOCKS), *BAD_CASTS])
def test_header_refuses_what_the_format_does_not_know(program: Path, bad: tuple[int, ...]) -> None:
    """zt_wire_valid is 0 for other bits, block sizes, flags and types; the kernels' callers check it first."""
    assert asked(program, [(*bad, 1)])[0][0] == 0


@pytest.mark.parametrize("compiler", ["g++", "nvcc", "hipcc"])
def test_header_compiles_as(compiler: str, tmp_path: Path) -> None:
    """The same text is C++, CUDA and HIP; where it can run, it gives the same numbers."""
    check(compiled(compiler, tmp_path), [(BlockSpec(4, 256, False), 2**33 + 5)])
