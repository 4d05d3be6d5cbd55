# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The CPU kernels keep to their arrays, by AddressSanitizer; other compilers make the same bits."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from op_builder.jit import cache_dir
from tests.launching import ROOT, output

FLAGS = [
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
]
FLAGS += ["-O1", "-g1"]
ON_CPU = "(scalar or avx2 or avx512)"
"""Tests of the CPU's kernels."""


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
    path = Path(output(["g++", f"-print-file-name={name}"]).strip())
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
        ("test_malformed.py", "not wave"),
        ("test_golden.py", f"{ON_CPU} and not fenced"),
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
    environment = built_with(f"{compiler}{len(flags)}", compiler, flags)
    check_kernel_tests(environment, "test_cpu.py")
    check_kernel_tests(environment, "test_golden.py", ON_CPU)
