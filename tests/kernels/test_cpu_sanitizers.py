# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The kernel tests again, in a process whose kernels are compiled with AddressSanitizer and UBSan."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import cpu_library
from tests.launching import ROOT

FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g1"]

MISTAKES = r"""
#include <limits.h>
#include <stdint.h>

extern "C" int zt_test_read(const uint8_t *p, int64_t i) { return p[i]; }
extern "C" void zt_test_write(uint8_t *p, int64_t i) { p[i] = 1; }
extern "C" int zt_test_add(int a) { return INT_MAX + a; }
"""

MAKE_A_MISTAKE = """
import ctypes, sys, torch
library = ctypes.CDLL(sys.argv[1])
exact = torch.zeros(1000, dtype=torch.uint8)
argument = [ctypes.c_void_p(exact.data_ptr()), ctypes.c_int64(int(sys.argv[3]))]
getattr(library, sys.argv[2])(*argument[: 1 + (sys.argv[2] != "zt_test_add")])
print("done")
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """For a process that loads sanitized kernels; skips where the compiler has no sanitizers."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    libraries = [_library(name) for name in ("libasan.so", "libubsan.so")]
    return {
        **os.environ,
        cpu_library.FLAGS_VARIABLE: " ".join(FLAGS),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }


def _library(name: str) -> str:
    asked = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(asked.stdout.strip())
    if not path.is_absolute():
        pytest.skip(f"g++ has no {name}")
    return str(path)


def test_the_kernel_tests_pass_under_sanitizers(environment: dict[str, str]) -> None:
    """No access out of bounds and nothing undefined in anything that the other two files do."""
    tests = [str(ROOT / "tests" / "kernels" / name) for name in ("test_cpu.py", "test_cpu_malformed.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not clang", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " passed" in done.stdout and " failed" not in done.stdout


@pytest.mark.parametrize(
    ("mistake", "index", "seen"),
    [
        ("zt_test_read", 1000, "heap-buffer-overflow"),
        ("zt_test_read", -1, "heap-buffer-overflow"),
        ("zt_test_write", 1000, "heap-buffer-overflow"),
        ("zt_test_add", 0, "signed integer overflow"),
        ("zt_test_write", 999, None),
    ],
)
def test_mistakes_are_seen(
    environment: dict[str, str], tmp_path: Path, mistake: str, index: int, seen: str | None
) -> None:
    """One byte beyond a torch tensor, and one overflow, end such a process; an access within does not."""
    source = tmp_path / "mistakes.cpp"
    source.write_text(MISTAKES)
    library = tmp_path / "mistakes.so"
    subprocess.run(["g++", "-shared", "-fPIC", *FLAGS, str(source), "-o", str(library)], check=True)
    command = [sys.executable, "-c", MAKE_A_MISTAKE, str(library), mistake, str(index)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if seen is None:
        assert done.returncode == 0 and "done" in done.stdout, done.stderr
    else:
        assert done.returncode != 0 and seen in done.stderr, done.stderr
