# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The wire formats are written twice, in Python and in C headers: the two agree on every size, and
on INT8 scales.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from op_builder import source_dir
from tests.kernels import golden
from tests.launching import output
from tests.marks import late
from zero_topo.quant import reference
from zero_topo.quant.spec import BLOCK_SIZES, BlockSpec, ChangeSpec, Format

PROGRAM = r"""
#include <inttypes.h>
#include <stdio.h>
#include "zt_wire.h"

int main(void) {
    zt_wire_spec s;
    int64_t n;
    const char *row = "%" SCNd32 " %" SCNd32 " %" SCNd32 " %" SCNd64;
    while (scanf(row, &s.bits, &s.block_size, &s.dtype, &n) == 4) {
        printf("%d %" PRId64, zt_wire_valid(s), zt_wire_blocks(s, n));
        printf(" %" PRId64, zt_wire_scales_offset(s, n));
        printf(" %" PRId64 "\n", zt_wire_nbytes(s, n));
    }
    return 0;
}
"""

CHANGES = r"""
#include <inttypes.h>
#include <stdio.h>
#include "zt_changes.h"

int main(void) {
    int32_t b;
    int64_t n, w, c;
    uint32_t bits[2];
    float x[2];
    while (scanf("%" SCNd32 " %" SCNd64 " %" SCNd64 " %" SCNd64, &b, &n, &w, &c) == 4 &&
           scanf("%" SCNu32 " %" SCNu32, bits, bits + 1) == 2) {
        memcpy(x, bits, sizeof x);
        x[0] = zt_codes_scale(x[0], x[1]);
        x[1] = zt_codes_inverse(x[1]);
        memcpy(bits, x, sizeof x);
        printf("%d %" PRId64, zt_changes_valid(b), zt_changes_counts_offset(n));
        printf(" %" PRId64, zt_changes_valid(b) ? zt_changes_scales_offset(b, n) : 0);
        printf(" %" PRId64, zt_changes_valid(b) ? zt_changes_codes_offset(b, n, w) : 0);
        printf(" %" PRId64, zt_changes_valid(b) ? zt_changes_offset(b, n, w) : 0);
        printf(" %" PRId64, zt_changes_valid(b) ? zt_changes_nbytes(b, n, w, c) : 0);
        printf(" %" PRIu32 " %" PRIu32 "\n", bits[0], bits[1]);
    }
    return 0;
}
"""

COMPILERS = {
    "gcc": [
        "gcc",
        "-std=c99",
        "-Wall",
        "-Wextra",
        "-Wconversion",
        "-Werror",
        "-pedantic",
        "-x",
        "c",
    ],
    "g++": ["g++", "-std=c++17", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-x", "c++"],
    "nvcc": ["nvcc", "-std=c++17", "-x", "cu"],
    "hipcc": [
        "env",
        "HIP_PLATFORM=amd",
        "hipcc",
        "-std=c++17",
        "-x",
        "hip",
        "--offload-arch=gfx90a",
    ],
}

Case = tuple[Format, int]
EDGES = [0, 1, 2, 1023, 99991, 2**20 + 1]
EDGES += [block + off for block in (64, 128, 256, 2048) for off in (-1, 0, 1)]
KNOWN = [*golden.BLOCKS, *golden.CASTS]
LARGE = [2**31 - 1, 2**31, 2**31 + 1, 2**32 + 255, 3 * 2**33 + 7, 2**40 - 1, 2**52 + 1]


def asked(program: Path, cases: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """(valid, blocks, scales offset, nbytes) of (bits, block size, dtype, elements)."""
    lines = "".join(" ".join(map(str, case)) + "\n" for case in cases)
    return [
        [int(word) for word in line.split()] for line in output([program], input=lines).splitlines()
    ]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Asks the header, compiled as C."""
    return compiled("gcc", tmp_path_factory.mktemp("wire"))


def compiled(compiler: str, directory: Path, text: str = PROGRAM) -> Path:
    """A program of those above, built with one of the compilers; skips, saying so, where the
    machine lacks it.
    """
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    source, program = directory / "wire.c", directory / "wire"
    source.write_text(text)
    command = [*COMPILERS[compiler], f"-I{source_dir()}", str(source), "-o", str(program)]
    output(command)
    return program


def check(program: Path, cases: Sequence[Case]) -> None:
    """The header's numbers are those of zero_topo.quant.spec, with 1 for a valid specification."""
    given = [(*spec.code, n) for spec, n in cases]
    for (spec, n), (valid, blocks, *offsets, nbytes) in zip(
        cases, asked(program, given), strict=True
    ):
        assert (valid, nbytes) == (1, spec.nbytes(n)), spec
        if isinstance(spec, BlockSpec):
            assert [blocks, *offsets] == [spec.blocks(n), spec.scales_offset(n)], spec
        else:
            assert blocks == n


def test_header_agrees_at_every_edge(program: Path) -> None:
    """Around block and padding boundaries, and past 31, 32 and 40 bits, for every known
    specification.
    """
    check(program, [(spec, numel) for spec in KNOWN for numel in [*EDGES, *LARGE]])


BAD_BLOCKS = [(7, 256, 0), (8, 100, 0), (8, 32, 0), (4, 4096, 0), (8, -64, 0), (8, 256, 1)]
BAD_CASTS = [(16, 1, 0), (32, 1, 1), (16, 1, 3), (16, 1, -1), (8, 1, 0)]


@pytest.mark.parametrize("bad", [*BAD_BLOCKS, *BAD_CASTS])
def test_header_refuses_what_the_format_does_not_know(program: Path, bad: tuple[int, ...]) -> None:
    """zt_wire_valid is 0 for other bits, block sizes and types; the kernels' callers check it
    first.
    """
    assert asked(program, [(*bad, 1)])[0][0] == 0


@pytest.mark.parametrize("compiler", ["g++", late("nvcc"), late("hipcc")])
def test_header_compiles_as(compiler: str, tmp_path: Path) -> None:
    """The same text is C++, CUDA and HIP; where it can run, it gives the same numbers."""
    check(compiled(compiler, tmp_path), [(BlockSpec("int4", 256), 2**33 + 5)])
    check_changes(compiled(compiler, tmp_path, CHANGES), [(256, 2**33 + 5, 7, 2**34)])


def check_changes(program: Path, cases: Sequence[tuple[int, int, int, int]]) -> None:
    """Sizes of (block size, blocks, whole, changes) are those of `ChangeSpec`, scales those of the
    reference.
    """
    generator = torch.Generator().manual_seed(len(cases))
    old = 2.0 ** torch.randint(-100, 120, (len(cases),), generator=generator)
    top = old * torch.linspace(80.0, 140.0, len(cases))
    special = torch.tensor([torch.nan, torch.inf, 0.0, 1e-42, 3.3e38, 2.0**-100, 2.0**-101, 0.01])
    top[::3], old[::5] = (
        special.repeat(len(cases))[: len(top[::3])],
        special[[0, 2, 7]].repeat(len(cases))[: len(old[::5])],
    )
    lines = zip(cases, bits_of(top), bits_of(old), strict=True)
    answers = asked(program, [(*case, *numbers) for case, *numbers in lines])
    for (block, blocks, whole, changes), (valid, *offsets, nbytes, _, _) in zip(
        cases, answers, strict=True
    ):
        spec = ChangeSpec(block)
        assert (*offsets, nbytes) == spec.offsets(blocks, whole, changes) and valid == 1
    scales = reference.scales_from_now(top, old)
    assert [answer[-2] for answer in answers] == bits_of(scales)
    assert [answer[-1] for answer in answers] == bits_of(torch.where(old > 0, 1 / old, 0.0))


def bits_of(x: torch.Tensor) -> list[int]:
    """The bits of floats, as numbers from 0 on."""
    return [bits & 0xFFFFFFFF for bits in x.view(torch.int32).tolist()]


def test_header_of_changes_agrees(tmp_path: Path) -> None:
    """Around chunks and padding, and past 32 bits; scales that stay, change, and are none."""
    program = compiled("gcc", tmp_path, CHANGES)
    edges = [n for n in [*EDGES, *LARGE] if n < 2**41]
    check_changes(
        program, [(b, n, w, 3 * n) for b in BLOCK_SIZES for n in edges for w in {0, n // 3, n}]
    )
    assert all(asked(program, [(b, 1, 0, 0, 0, 0)])[0][0] == 0 for b in (1, 32, 100, 4096, -64, 0))
