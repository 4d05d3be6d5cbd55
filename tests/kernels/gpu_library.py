# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The GPU kernels as a Python backend for tests: built for a CPU by the emulation, called through their C interface.

`Settings` are those of `csrc/zt_gpu_emulation.h`: what a kernel computes must not depend on any of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import cpp_extension

from op_builder import jit
from tests.kernels import c_types
from tests.kernels.c_types import (
    CChange,
    CCodes,
    CMasters,
    CMessages,
    CPart,
    CPiece,
    CReduce,
    CSpec,
    c_messages,
    c_pieces,
    c_spec,
)
from zero_topo.quant import reference
from zero_topo.quant.operands import FLOATS, Change, Codes, Masters, Messages, Part, View
from zero_topo.quant.spec import Format

WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
# Switching stacks looks like a smashed one to the checks of -D_FORTIFY_SOURCE.
COMPILE = ("g++", "-std=c++17", "-O1", "-ffp-contract=off", *WARNINGS, "-fPIC", "-U_FORTIFY_SOURCE")
LIBRARY = "libzt_gpu.so"
BULKY = ("*.ii", "*.cui", "*.bc", "*.cudafe*", "*.fatbin*")
"""What compilers keep that no test reads."""

CHUNK = 4096
MOST_BLOCKS = 1 << 20


@dataclass(frozen=True)
class Settings:
    """How the emulated GPU behaves.

    Attributes:
        wave: lanes of a wavefront, 32 or 64.
        descending: run the highest thread of a block first.
        most_blocks: thread blocks of a launch at most.
        first_block: leave out the thread blocks below this one.
    """

    wave: int = 32
    descending: bool = False
    most_blocks: int = MOST_BLOCKS
    first_block: int = 0


PLAIN = Settings(wave=32)
OTHER = Settings(wave=64, descending=True, most_blocks=3)
"""As far from the first as can be: what a kernel computes must not depend on any of these."""
BOTH = [pytest.param(PLAIN, id="wave32"), pytest.param(OTHER, id="wave64")]


class KernelError(Exception):
    """A function returned something else than ZT_OK; carries the status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text}")
        self.status = status


OK = 0
PREFIX = "zt_gpu_"
PIECES = [POINTER(CPiece), c_int32, c_void_p]
"""And a table of them."""
SIGNATURES: dict[str, list[Any]] = {
    "quantize": [CSpec, *PIECES, CMessages],
    "dequantize_reduce": [CSpec, CMessages, *PIECES, CReduce],
    "requantize": [CSpec, CMessages, CSpec, CMessages, c_int64, CReduce],
    "mask_pack": [c_void_p, c_int64, c_void_p],
    "mask_unpack": [c_void_p, c_int64, c_void_p],
    "count_above": [c_void_p, c_int32, c_int64, c_float, c_void_p],
    "compact_above": [c_void_p, c_int32, c_int64, c_float, c_void_p, c_int64, c_void_p, c_void_p],
    "sketch_insert": [c_void_p, c_int64, c_int64, c_uint64, c_int64, c_void_p],
    "sketch_peel": [c_void_p, c_void_p, c_int64, c_uint64, c_int64, c_void_p, c_void_p, c_void_p],
    "aged_adamw": [c_types.CAged],
    "codes_assess": [CMasters, CCodes, CPart, c_void_p, c_void_p, c_void_p, c_void_p],
    "codes_emit": [CMasters, CCodes, CPart, CChange, c_void_p, c_int64],
    "codes_apply": [CMessages, CCodes, CPart],
}


@dataclass(frozen=True)
class GpuLibrary:
    """A backend over a shared library of the kernels, with the functions of `zero_topo.quant.reference`.

    Attributes:
        library: the loaded library.
        settings: of the emulated GPU; set before every call, because all backends of a library share them.
    """

    library: ctypes.CDLL
    settings: Settings = PLAIN

    def status(self, function: str, *arguments: Any) -> int:
        """Call a function of the library with the settings of this backend."""
        s = self.settings
        numbers = c_int64(s.most_blocks), c_int64(s.first_block)
        self.library.zt_emulation_configure(s.wave, int(s.descending), *numbers)
        return int(getattr(self.library, function)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """Call ``zt_gpu_<name>`` on the default stream.

        Raises:
            KernelError: unless it returns ZT_OK.
        """
        getattr(self.library, PREFIX + name).argtypes = [*SIGNATURES[name], c_void_p]
        status = self.status(PREFIX + name, *arguments, None)
        if status:
            raise KernelError(status, self._why())

    def status_of(self, name: str, *arguments: Any) -> int:
        """The status that ``zt_gpu_<name>`` returns."""
        try:
            self.call(name, *arguments)
        except KernelError as error:
            return error.status
        return OK

    def _why(self) -> str:
        self.library.zt_emulation_error.restype = c_char_p
        return str(self.library.zt_emulation_error().decode())

    def quantize(self, pieces: Sequence[View], spec: Format, out: Messages) -> None:
        """pieces -> messages."""
        with self._described(pieces) as described:
            self.call("quantize", c_spec(spec), *described, c_messages(out))

    def dequantize_reduce(
        self, messages: Messages, spec: Format, pieces: Sequence[View], factor: float = 1.0, accumulate: bool = False
    ) -> None:
        """Sums of messages -> pieces."""
        with self._described(pieces) as described:
            self.call(
                "dequantize_reduce", c_spec(spec), c_messages(messages), *described, CReduce(factor, int(accumulate))
            )

    def requantize(
        self, messages: Messages, source: Format, spec: Format, out: Messages, numel: int, factor: float = 1.0
    ) -> None:
        """Sums of messages -> messages."""
        c = c_spec(source), c_messages(messages), c_spec(spec), c_messages(out)
        self.call("requantize", *c, numel, CReduce(factor, 0))

    @contextlib.contextmanager
    def _described(self, pieces: Sequence[View]) -> Iterator[tuple[ctypes.Array[CPiece], int, int | None]]:
        """The pieces in C, and where their table is meanwhile."""
        c = c_pieces(pieces), len(pieces)
        self.library.zt_gpu_table_bytes.restype = c_int64
        table = torch.empty(self.library.zt_gpu_table_bytes(len(pieces)), dtype=torch.uint8)
        if table.numel():
            assert self.status("zt_gpu_table", *c, c_void_p(table.data_ptr())) == 0
            table = table.to(pieces[0].flat.device)
        yield *c, table.data_ptr() or None

    def mask_pack(self, mask: Tensor, bits: Tensor) -> None:
        """Booleans -> bits."""
        self.call("mask_pack", mask.data_ptr(), mask.numel(), bits.data_ptr())

    def mask_unpack(self, bits: Tensor, mask: Tensor) -> None:
        """Bits -> booleans."""
        self.call("mask_unpack", bits.data_ptr(), mask.numel(), mask.data_ptr())

    def _partials(self, x: Tensor, threshold: float) -> Tensor:
        partial = torch.full((-(-x.numel() // CHUNK),), -1, device=x.device)
        self.call("count_above", x.data_ptr(), FLOATS.index(x.dtype), x.numel(), threshold, partial.data_ptr())
        return partial

    def count_above(self, x: Tensor, threshold: float) -> Tensor:
        """How many reach the threshold."""
        return self._partials(x, threshold).sum().view(1)

    def compact_above(self, x: Tensor, threshold: float, indices: Tensor, values: Tensor) -> Tensor:
        """Which do."""
        partial = self._partials(x, threshold)
        offsets = partial.cumsum(0) - partial
        c = x.data_ptr(), FLOATS.index(x.dtype), x.numel(), threshold, offsets.data_ptr()
        self.call("compact_above", *c, indices.numel(), indices.data_ptr(), values.data_ptr())
        return partial.sum().view(1)

    def row_largest(self, x: Tensor, indices: Tensor) -> None:
        """Torch's own selection, as on a GPU."""
        reference.row_largest(x, indices)

    ternary_encode = staticmethod(reference.ternary_encode)
    ternary_decode = staticmethod(reference.ternary_decode)

    def sketch_insert(self, x: Tensor, seed: int, sketch: Tensor) -> None:
        """Sketch of x."""
        self.call("sketch_insert", x.data_ptr(), *x.shape, seed, sketch.shape[1], sketch.data_ptr())

    def sketch_peel(self, sketch: Tensor, bits: Tensor, seed: int, out: Tensor) -> Tensor:
        """x from its sketch."""
        left = torch.zeros(1, dtype=torch.int64, device=out.device)
        rows, lanes = sketch.shape
        size = (4 * rows + -(-out.numel() // lanes)) * lanes
        work = torch.full((size,), 0xA5, dtype=torch.uint8, device=out.device)
        c = sketch.data_ptr(), bits.data_ptr(), out.numel(), seed, rows, out.data_ptr(), work.data_ptr()
        self.call("sketch_peel", *c, left.data_ptr())
        return left

    def aged_adamw(self, p: Tensor, *others: Any) -> None:
        """Weights, moments and ages."""
        *state, table, settings = others
        addresses = [x.data_ptr() for x in (p, *state)]
        self.call("aged_adamw", c_types.CAged(*addresses, p.numel(), table.data_ptr(), *settings))

    def codes_assess(self, masters: Masters, codes: Codes, part: Part, *made: Tensor) -> None:
        """Scales, counts, steps and sizes."""
        self.call("codes_assess", *c_owned(masters, codes, part), *(tensor.data_ptr() for tensor in made))

    def codes_emit(self, masters: Masters, codes: Codes, part: Part, change: Change, message: Tensor) -> None:
        """Masters -> codes and message."""
        made = message.data_ptr(), message.numel()
        self.call("codes_emit", *c_owned(masters, codes, part), c_types.c_change(change), *made)

    def codes_apply(self, messages: Messages, codes: Codes, part: Part) -> None:
        """Messages -> codes."""
        self.call("codes_apply", c_messages(messages), c_types.c_codes(codes), c_types.c_part(part))


def c_owned(masters: Masters, codes: Codes, part: Part) -> tuple[CMasters, CCodes, CPart]:
    """What is a member's own, in C."""
    return c_types.c_masters(masters), c_types.c_codes(codes), c_types.c_part(part)


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
    """The directory in which all steps were run, now or earlier on the same sources; those of a stage side by side.

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
    done = subprocess.run(step.words, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(step.words)}\n{done.stdout}{done.stderr}"
    (directory / step.log).write_text(done.stdout + done.stderr)


def bound(source: Path) -> ModuleType:
    """The torch binding as it is built for a GPU, over the emulated kernels: its tensors lie on the CPU.

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
        where: dict[str, Any] = {"extra_include_paths": [str(source)], "build_directory": str(directory)}
        cpp_extension.load("zt_gpu_bound", names, extra_cflags=list(flags), is_python_module=False, **where)

    return jit.load(
        jit.Recipe(
            "zt_gpu_bound", (*sources, *kernels, *source.glob("zt_*.h")), (*flags, torch.__version__), compile_in
        )
    )


def emulated(source: Path, cache: Path) -> ctypes.CDLL:
    """The kernels in a directory, compiled for the emulation unless the cache has them, and loaded."""
    files = kernel_sources(source)
    compiles = [
        Step((*COMPILE, "-x", "c++", "-c", str(path), "-o", f"{path.stem}.o"), f"{path.stem}.log") for path in files
    ]
    link = Step((*COMPILE, *(f"{path.stem}.o" for path in files), "-o", LIBRARY, "-shared"), "link.log")
    return ctypes.CDLL(str(built("zt_gpu_emulated", [compiles, [link]], source, cache) / LIBRARY))
