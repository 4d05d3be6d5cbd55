# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The CPU kernels without torch's build system: a C compiler, ctypes, and a backend for the golden suite.

``ZT_TEST_CXXFLAGS`` adds flags for the compiler; tests/kernels/test_cpu_sanitizers.py asks for sanitizers by it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from op_builder import source_dir
from op_builder.jit import cache_dir
from tests.kernels.c_types import (
    DTYPES,
    CChange,
    CCodes,
    CMasters,
    CMessages,
    CPart,
    CReduce,
    CSpec,
    c_change,
    c_codes,
    c_masters,
    c_messages,
    c_part,
    c_pieces,
    c_spec,
)
from zero_topo.quant.codes import Change, Codes, Masters, Part
from zero_topo.quant.messages import Messages
from zero_topo.quant.pieces import Piece, total_numel
from zero_topo.quant.spec import BlockSpec, Cast, Reduce, Total

FLAGS_VARIABLE = "ZT_TEST_CXXFLAGS"
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra", "-Werror")
LANES = 1024
LEVELS = {"scalar": 0, "avx2": 1, "avx512": 2}


class Range(ctypes.Structure):
    """zt_range."""

    _fields_ = [("begin", ctypes.c_int64), ("end", ctypes.c_int64)]


_PTR, _I32, _I64, _U64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_float
SIGNATURES: dict[str, list[Any]] = {
    "zt_cpu_quantize": [CSpec, _PTR, _I32, CMessages, Range, _I32],
    "zt_cpu_dequantize_reduce": [CSpec, CMessages, _PTR, _I32, CReduce, Range, _I32],
    "zt_cpu_requantize": [CSpec, CMessages, CSpec, CMessages, _I64, CReduce, Range, _I32],
    "zt_cpu_mask_pack": [_PTR, _I64, _PTR, Range],
    "zt_cpu_mask_unpack": [_PTR, _I64, _PTR, Range],
    "zt_cpu_count_above": [_PTR, _I32, _F32, Range, _PTR, _I32],
    "zt_cpu_compact_above": [_PTR, _I32, _F32, Range, _I64, _PTR, _PTR, _PTR, _I32],
    "zt_cpu_row_largest": [_PTR, _I64, _I64, _PTR, Range],
    "zt_cpu_sketch_insert": [_PTR, _I64, _U64, _I64, _PTR, Range],
    "zt_cpu_sketch_peel": [_PTR, _PTR, _I64, _U64, _I64, _PTR, Range, _PTR, _PTR],
    "zt_cpu_codes_assess": [CMasters, CCodes, CPart, _PTR, _PTR, Range, _I32],
    "zt_cpu_codes_emit": [CMasters, CCodes, CPart, CChange, _PTR, _I64, Range, _I32],
    "zt_cpu_codes_apply": [CMessages, CCodes, CPart, Range, _I32],
}
# At a level of the caller's choice.
SPLIT = ("mask_pack", "mask_unpack", "sketch_insert", "sketch_peel")
SIGNATURES |= {f"zt_cpu_{name}_at": [*SIGNATURES[f"zt_cpu_{name}"], _I32] for name in SPLIT}


def sources() -> list[Path]:
    """The C++ files of the CPU kernels."""
    return [*sorted(source_dir().glob("zt_cpu*.cpp")), source_dir() / "zt_error.cpp"]


# What the header has as inline functions.
EXPORTS = """
#include "zt_kernels.h"
extern "C" int64_t zt_test_sketch_work(int64_t n, int64_t rows) { return zt_sketch_work(n, rows); }
"""


def build(compiler: str = "g++", flags: Sequence[str] = ()) -> Path:
    """A shared library of the kernels, compiled unless that was done before.

    Raises:
        RuntimeError: with the compiler's messages.
    """
    chosen = (compiler, *FLAGS, *flags, *os.environ.get(FLAGS_VARIABLE, "").split())
    digest = hashlib.sha256("\0".join([*chosen, EXPORTS]).encode())
    for path in [*sources(), *sorted(source_dir().glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    library = cache_dir() / f"zt_test_{digest.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as directory:
            os.replace(_compiled(chosen, Path(directory)), library)
    return library


def _compiled(command: Sequence[str], directory: Path) -> Path:
    exports = directory / "exports.cpp"
    exports.write_text(EXPORTS)

    def compile_one(source: Path) -> Path:
        target = directory / f"{source.stem}.o"
        _run([*command, f"-I{source_dir()}", "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, [*sources(), exports]))
    library = directory / "kernels.so"
    _run([*command, "-shared", *map(str, objects), "-o", str(library)])
    return library


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def load(library: Path) -> ctypes.CDLL:
    """The library with the functions' types."""
    loaded = ctypes.CDLL(str(library))
    for name, types in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, ctypes.c_int
    loaded.zt_test_sketch_work.argtypes, loaded.zt_test_sketch_work.restype = [_I64, _I64], _I64
    loaded.zt_error_text.restype = ctypes.c_char_p
    return loaded


@dataclass
class CpuKernels:
    """The kernels of one instruction set, as a backend of the golden suite.

    Attributes:
        library: what `load` returned.
        level: one of enum zt_level.
        cuts: into how many calls, at random places and in random order, each piece of work is split.
    """

    library: ctypes.CDLL
    level: int = -1
    cuts: int = 1
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def quantize(self, pieces: Sequence[Piece], spec: BlockSpec | Cast, out: Messages) -> None:
        """As the reference's."""
        given, total = c_pieces(pieces), _blocks(spec, total_numel(pieces), out)
        self._split("quantize", total, c_spec(spec), given, len(given), c_messages(out))

    def dequantize_reduce(
        self, messages: Messages, spec: BlockSpec | Cast, pieces: Sequence[Piece], reduce: Reduce
    ) -> None:
        """As the reference's."""
        given, how = c_pieces(pieces), CReduce(reduce.factor, int(reduce.accumulate))
        total = _blocks(spec, total_numel(pieces), messages)
        self._split("dequantize_reduce", total, c_spec(spec), c_messages(messages), given, len(given), how)

    def requantize(
        self, messages: Messages, source: BlockSpec | Cast, spec: BlockSpec | Cast, out: Messages, total: Total
    ) -> None:
        """As the reference's."""
        terms, how = (c_spec(source), c_messages(messages)), CReduce(total.factor, 0)
        arguments = (*terms, c_spec(spec), c_messages(out), total.numel, how)
        self._split("requantize", _blocks(spec, total.numel, out), *arguments)

    def mask_pack(self, mask: Tensor, bits: Tensor) -> None:
        """As the reference's."""
        self._split("mask_pack_at", mask.numel(), mask.data_ptr(), mask.numel(), bits.data_ptr(), multiple=8)

    def mask_unpack(self, bits: Tensor, mask: Tensor) -> None:
        """As the reference's."""
        self._split("mask_unpack_at", mask.numel(), bits.data_ptr(), mask.numel(), mask.data_ptr(), multiple=8)

    def count_above(self, x: Tensor, threshold: float) -> Tensor:
        """As the reference's."""
        return torch.tensor([sum(self._count(x, threshold, part) for part in self._ranges(x.numel(), 8))])

    def compact_above(self, x: Tensor, threshold: float, indices: Tensor, values: Tensor) -> Tensor:
        """As the reference's; split, each call goes on where the ones before it, by their counts, end."""
        found = ctypes.c_int64()
        total = 0
        for part in sorted(self._ranges(x.numel(), 8), key=lambda part: part.begin):
            done = min(total, indices.numel())
            targets = (indices.numel() - done, indices[done:].data_ptr(), values[done:].data_ptr(), ctypes.byref(found))
            self._call("compact_above", x.data_ptr(), DTYPES[x.dtype], threshold, part, *targets, self.level)
            total += found.value
        return torch.tensor([total])

    def row_largest(self, x: Tensor, indices: Tensor) -> None:
        """As the reference's."""
        for part in self._ranges(len(x)):
            self._call("row_largest", x.data_ptr(), x.shape[1], indices.shape[1], indices.data_ptr(), part)

    def sketch_insert(self, x: Tensor, seed: int, sketch: Tensor) -> None:
        """As the reference's."""
        for own, made in zip(x, sketch, strict=True):
            self._split("sketch_insert_at", LANES, own.data_ptr(), own.numel(), seed, len(made), made.data_ptr())

    def sketch_peel(self, sketch: Tensor, bits: Tensor, seed: int, out: Tensor) -> Tensor:
        """As the reference's."""
        rows, left, total = sketch.shape[0], ctypes.c_int64(), 0
        work = torch.empty(self.library.zt_test_sketch_work(out.numel(), rows), dtype=torch.uint8)
        given = (sketch.data_ptr(), bits.data_ptr(), out.numel(), seed, rows, out.data_ptr())
        for part in self._ranges(LANES):
            self._call("sketch_peel_at", *given, part, work.data_ptr(), ctypes.byref(left), self.level)
            total += left.value
        return torch.tensor([total])

    def codes_assess(self, masters: Masters, codes: Codes, part: Part, scales: Tensor, escaped: Tensor) -> None:
        """As the reference's."""
        given = c_masters(masters), c_codes(codes), c_part(part)
        self._split("codes_assess", part.blocks, *given, scales.data_ptr(), escaped.data_ptr())

    def codes_emit(self, masters: Masters, codes: Codes, part: Part, change: Change, message: Tensor) -> None:
        """As the reference's."""
        given = c_masters(masters), c_codes(codes), c_part(part), c_change(change)
        self._split("codes_emit", part.blocks, *given, message.data_ptr(), message.numel())

    def codes_apply(self, messages: Messages, codes: Codes, part: Part) -> None:
        """As the reference's."""
        total = part.blocks * part.members
        self._split("codes_apply", total, c_messages(messages), c_codes(codes), c_part(part))

    def _count(self, x: Tensor, threshold: float, part: Range) -> int:
        found = ctypes.c_int64()
        self._call("count_above", x.data_ptr(), DTYPES[x.dtype], threshold, part, ctypes.byref(found), self.level)
        return found.value

    def _ranges(self, total: int, multiple: int = 1) -> list[Range]:
        inner = sorted(self.random.randrange(total // multiple + 1) * multiple for _ in range(self.cuts - 1))
        ranges = [Range(*pair) for pair in pairwise([0, *inner, total])]
        self.random.shuffle(ranges)
        return ranges

    def _split(self, name: str, total: int, *arguments: Any, multiple: int = 1) -> None:
        for part in self._ranges(total, multiple):
            self._call(name, *arguments, part, self.level)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, f"zt_cpu_{name}")(*arguments)
        if status:
            raise ValueError(f"{name}: {self.library.zt_error_text(status).decode()}")


def _blocks(spec: BlockSpec | Cast, numel: int, messages: Messages) -> int:
    """Of all members; those of casts are values."""
    return (numel if isinstance(spec, Cast) else spec.blocks(numel)) * messages.members
