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

# Each in a process of its own, forked after the slow import: a mistake ends it.
MAKE_MISTAKES = """
import ctypes, os, sys, torch
library = ctypes.CDLL(sys.argv[1])
exact = torch.zeros(1000, dtype=torch.uint8)
for name, *numbers in (line.split() for line in sys.argv[2].splitlines()):
    if os.fork() == 0:
        pointer = [] if name == "zt_test_add" else [ctypes.c_void_p(exact.data_ptr())]
        getattr(library, name)(*pointer, *(ctypes.c_int64(int(number)) for number in numbers))
        os._exit(0)
    print(name, *numbers, os.wait()[1], flush=True)
    print("end of", name, *numbers, file=sys.stderr, flush=True)
"""

# What goes wrong, and what is said about it; an access within bounds is none.
SEEN = {
    "zt_test_read 1000": "heap-buffer-overflow",
    "zt_test_read -1": "heap-buffer-overflow",
    "zt_test_write 1000": "heap-buffer-overflow",
    "zt_test_add 1": "signed integer overflow",
    "zt_test_write 999": "",
}


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
        # Leaks are Python's own; short stacks and a small quarantine make allocations cheap.
        "ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=2:quarantine_size_mb=16",
        "UBSAN_OPTIONS": "print_stacktrace=1",
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


def test_mistakes_are_seen(environment: dict[str, str], tmp_path: Path) -> None:
    """One byte beyond a torch tensor, and one overflow, end such a process; an access within does not."""
    source, library = tmp_path / "mistakes.cpp", tmp_path / "mistakes.so"
    source.write_text(MISTAKES)
    subprocess.run(["g++", "-shared", "-fPIC", *FLAGS, str(source), "-o", str(library)], check=True)
    command = [sys.executable, "-c", MAKE_MISTAKES, str(library), "\n".join(SEEN)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    statuses = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert {name for name, status in statuses.items() if status != "0"} == {name for name, said in SEEN.items() if said}
    rest = done.stderr
    for name, said in SEEN.items():
        part, _, rest = rest.partition(f"end of {name}\n")
        assert said in part, part
