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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

from op_builder import jit
from zero_topo.quant.pieces import Piece
from zero_topo.quant.spec import BlockSpec, Reduce, Total

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
# Switching stacks looks like a smashed one to the checks of -D_FORTIFY_SOURCE.
COMPILE = ("g++", "-std=c++17", "-O1", "-ffp-contract=off", *WARNINGS, "-fPIC", "-U_FORTIFY_SOURCE")
LIBRARY = "libzt_gpu.so"
BULKY = ("*.ii", "*.cui", "*.bc", "*.cudafe*", "*.fatbin*")
"""What compilers keep that no test reads."""

CHUNK = 4096
MOST_BLOCKS = 1 << 20


class CSpec(Structure):
    """``zt_wire_spec``."""

    _fields_ = [("bits", c_int32), ("block_size", c_int32), ("symmetric", c_int32)]


class CPiece(Structure):
    """``zt_piece``."""

    _fields_ = [("data", c_void_p), ("rows", c_int64), ("columns", c_int64), ("row_stride", c_int64)]
    _fields_ += [("limit", c_int64), ("dtype", c_int32)]


class CMessage(Structure):
    """``zt_message``."""

    _fields_ = [("data", c_void_p), ("nbytes", c_int64)]


class CReduce(Structure):
    """``zt_reduce``."""

    _fields_ = [("factor", c_float), ("accumulate", c_int32)]


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


class KernelError(Exception):
    """A function returned something else than ZT_OK; carries the status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text}")
        self.status = status


PREFIX = "zt_gpu_"
SIGNATURES: dict[str, list[Any]] = {
    "quantize": [CSpec, POINTER(CPiece), c_int32, CMessage],
    "dequantize": [CSpec, CMessage, POINTER(CPiece), c_int32],
    "dequantize_reduce": [CSpec, POINTER(CMessage), c_int32, POINTER(CPiece), c_int32, CReduce],
    "requantize": [CSpec, POINTER(CMessage), c_int32, CSpec, CMessage, c_int64, CReduce],
    "mask_pack": [c_void_p, c_int64, c_void_p],
    "mask_unpack": [c_void_p, c_int64, c_void_p],
    "count_above": [c_void_p, c_int32, c_int64, c_float, c_void_p],
    "compact_above": [c_void_p, c_int32, c_int64, c_float, c_void_p, c_int64, c_void_p, c_void_p],
    "sketch_insert": [c_void_p, c_int64, c_uint64, c_int64, c_void_p],
    "sketch_peel": [c_void_p, c_void_p, c_int64, c_uint64, c_int64, c_void_p, c_void_p, c_void_p],
}


@dataclass(frozen=True)
class GpuLibrary:
    """A backend over a shared library of the kernels, with the functions of `zero_topo.quant.reference`.

    Attributes:
        library: the loaded library.
        settings: of the emulated GPU; set before every call, because all backends of a library share them. None if
            the library is for a real GPU, and the tensors are on it.
    """

    library: ctypes.CDLL
    settings: Settings | None = field(default_factory=Settings)

    def status(self, function: str, *arguments: Any) -> int:
        """Call a function of the library with the settings of this backend."""
        s = self.settings
        if s is not None:
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

    def _why(self) -> str:
        if self.settings is None:
            return "no emulation that could say why"
        self.library.zt_emulation_error.restype = c_char_p
        return str(self.library.zt_emulation_error().decode())

    def quantize(self, pieces: Sequence[Piece], spec: BlockSpec, out: Tensor) -> None:
        """pieces -> message."""
        self.call("quantize", c_spec(spec), c_pieces(pieces), len(pieces), c_message(out))

    def dequantize(self, message: Tensor, spec: BlockSpec, pieces: Sequence[Piece]) -> None:
        """message -> pieces."""
        self.call("dequantize", c_spec(spec), c_message(message), c_pieces(pieces), len(pieces))

    def dequantize_reduce(
        self, messages: Sequence[Tensor], spec: BlockSpec, pieces: Sequence[Piece], reduce: Reduce
    ) -> None:
        """Sum of messages -> pieces."""
        wanted = CReduce(reduce.factor, int(reduce.accumulate))
        messages = self._side_by_side(messages)
        c = c_messages(messages), len(messages), c_pieces(pieces), len(pieces)
        self.call("dequantize_reduce", c_spec(spec), *c, wanted)

    def requantize(
        self, messages: Sequence[Tensor], source: BlockSpec, spec: BlockSpec, out: Tensor, total: Total
    ) -> None:
        """Sum of messages -> message."""
        messages = self._side_by_side(messages)
        c = c_spec(source), c_messages(messages), len(messages), c_spec(spec), c_message(out)
        self.call("requantize", *c, total.numel, CReduce(total.factor, 0))

    def _side_by_side(self, messages: Sequence[Tensor]) -> Sequence[Tensor]:
        """As the binding does it: what is not evenly spaced is copied."""
        even = self.library.zt_gpu_even(c_messages(messages), len(messages))
        return messages if even else torch.stack(list(messages)).unbind()

    def mask_pack(self, mask: Tensor, bits: Tensor) -> None:
        """Booleans -> bits."""
        self.call("mask_pack", mask.data_ptr(), mask.numel(), bits.data_ptr())

    def mask_unpack(self, bits: Tensor, mask: Tensor) -> None:
        """Bits -> booleans."""
        self.call("mask_unpack", bits.data_ptr(), mask.numel(), mask.data_ptr())

    def _partials(self, x: Tensor, threshold: float) -> Tensor:
        partial = torch.full((-(-x.numel() // CHUNK),), -1, device=x.device)
        self.call("count_above", x.data_ptr(), DTYPES[x.dtype], x.numel(), threshold, partial.data_ptr())
        return partial

    def count_above(self, x: Tensor, threshold: float) -> Tensor:
        """How many reach the threshold."""
        return self._partials(x, threshold).sum().view(1)

    def compact_above(self, x: Tensor, threshold: float, indices: Tensor, values: Tensor) -> Tensor:
        """Which do."""
        partial = self._partials(x, threshold)
        offsets = partial.cumsum(0) - partial
        c = x.data_ptr(), DTYPES[x.dtype], x.numel(), threshold, offsets.data_ptr()
        self.call("compact_above", *c, indices.numel(), indices.data_ptr(), values.data_ptr())
        return partial.sum().view(1)

    def sketch_insert(self, x: Tensor, seed: int, sketch: Tensor) -> None:
        """Sketch of x."""
        self.call("sketch_insert", x.data_ptr(), x.numel(), seed, sketch.shape[0], sketch.data_ptr())

    def sketch_peel(self, sketch: Tensor, bits: Tensor, seed: int, out: Tensor) -> Tensor:
        """x from its sketch."""
        left = torch.zeros(1, dtype=torch.int64, device=out.device)
        rows, lanes = sketch.shape
        size = (4 * rows + -(-out.numel() // lanes)) * lanes
        work = torch.full((size,), 0xA5, dtype=torch.uint8, device=out.device)
        c = sketch.data_ptr(), bits.data_ptr(), out.numel(), seed, rows, out.data_ptr(), work.data_ptr()
        self.call("sketch_peel", *c, left.data_ptr())
        return left


def c_spec(spec: BlockSpec) -> CSpec:
    """The specification in C."""
    return CSpec(spec.bits, spec.block_size, int(spec.symmetric))


def c_pieces(pieces: Sequence[Piece]) -> ctypes.Array[CPiece]:
    """The pieces in C."""
    made = [
        CPiece(p.flat.data_ptr(), p.rows, p.columns, p.stride, p.flat.numel(), DTYPES[p.flat.dtype]) for p in pieces
    ]
    return (CPiece * max(1, len(made)))(*made)


def c_message(message: Tensor) -> CMessage:
    """A message in C."""
    return CMessage(message.data_ptr(), message.numel())


def c_messages(messages: Sequence[Tensor]) -> ctypes.Array[CMessage]:
    """Messages in C."""
    return (CMessage * max(1, len(messages)))(*map(c_message, messages))


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
