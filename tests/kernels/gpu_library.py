# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The GPU kernels as a backend for tests: built for a CPU by the emulation, behind the binding for
torch.

`Settings` are those of `csrc/zt_gpu_emulation.h`: what a kernel computes must not depend on any of
them.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension

from op_builder import jit
from tests.launching import ended

LIBRARY = "libzt_gpu.so"
BULKY = ("*.ii", "*.cui", "*.bc", "*.cudafe*", "*.fatbin*")
"""What compilers keep that no test reads."""


@dataclass(frozen=True)
class Settings:
    """How the emulated GPU behaves.

    Attributes:
        wave: threads of a wavefront, 32 or 64.
        descending: run the highest thread of a block first.
        most_blocks: thread blocks of a launch at most.
        first_block: leave out the thread blocks below this one.
        shared_tiles: tiles that are left to share out when a thread block takes several at once.
    """

    wave: int = 32
    descending: bool = False
    most_blocks: int = 1 << 20
    first_block: int = 0
    shared_tiles: int = 1 << 12


PLAIN = Settings(wave=32)
OTHER = Settings(wave=64, descending=True, most_blocks=3, shared_tiles=1)
"""As far from the first as can be: what a kernel computes must not depend on any of these."""


@dataclass(frozen=True)
class Step:
    """A command of a compiler, run in the directory where its results shall lie.

    Attributes:
        words: the command; results have names without a directory.
        log: file for what it prints.
    """

    words: tuple[str, ...]
    log: str


def kernel_sources(directory: Path) -> list[Path]:
    """The kernels' source files."""
    return sorted(directory.glob("zt_gpu*.cu"))


def built(name: str, stages: Sequence[Sequence[Step]], source: Path, cache: Path) -> Path:
    """The directory in which all steps were run, now or earlier on the same sources; those of a
    stage side by side.

    Raises:
        AssertionError: with the compiler's messages, if a step fails.
    """
    digest = hashlib.sha256(repr(stages).encode())
    for path in [*kernel_sources(source), *sorted(source.glob("zt_*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    directory = cache / f"{name}_{digest.hexdigest()[:16]}"
    if not directory.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch, ThreadPoolExecutor(2) as pool:
            for stage in stages:
                list(pool.map(lambda step: _run(step, Path(scratch)), stage))
            with contextlib.suppress(OSError):  # another process was faster
                shutil.copytree(scratch, directory, ignore=shutil.ignore_patterns(*BULKY))
    return directory


def _run(step: Step, directory: Path) -> None:
    done = ended(step.words, cwd=directory)
    assert done.returncode == 0, f"{' '.join(step.words)}\n{done.stdout}{done.stderr}"
    (directory / step.log).write_text(done.stdout + done.stderr)


def bound(source: Path) -> ModuleType:
    """The torch binding as it is built for a GPU, over the emulated kernels: its tensors lie on the
    CPU.

    Raises:
        BuildError: if it does not compile.
    """
    flags = ("-O1", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-DZT_FOR_GPU")
    kernels = kernel_sources(source)
    sources = [source / "zt_binding.cpp", source / "zt_error.cpp"]

    def compile_in(directory: Path) -> None:
        for path in kernels:  # torch would give them to nvcc
            (directory / f"{path.stem}.cpp").write_text(f'#include "{path}"\n')
        names = [*map(str, sources), *(str(directory / f"{path.stem}.cpp") for path in kernels)]
        where: dict[str, Any] = {
            "extra_include_paths": [str(source)],
            "build_directory": str(directory),
        }
        cpp_extension.load(
            "zt_gpu_bound", names, extra_cflags=list(flags), is_python_module=False, **where
        )

    return jit.load(
        jit.Recipe(
            "zt_gpu_bound",
            (*sources, *kernels, *source.glob("zt_*.h")),
            (*flags, torch.__version__),
            compile_in,
        )
    )
