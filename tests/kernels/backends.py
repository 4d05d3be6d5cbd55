# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Every way to run the kernels, by name: ``with opened(name) as backend``.

- ``scalar``, ``avx2``, ``avx512``: the CPU's kernels at an instruction set, each operation in one
  piece of work. With ``split``: in pieces of 64 values, for four threads. With ``fenced``: every
  argument ends, or begins, where memory does.
- ``wave32``, ``wave64``: the GPU kernels, built for a CPU by the emulation. What a kernel computes
  must not depend on its settings, so the second has all of them as far from the first as can be.
- ``native``: what the engine loads for the device of the tests (``ZERO_TOPO_TEST_DEVICE``).
- ``triton``: on a GPU, or in Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from op_builder import source_dir
from op_builder.jit import BuildError
from tests.device import DEVICE, ON_GPU
from tests.kernels.gpu_library import OTHER, PLAIN, Settings, bound
from tests.kernels.operators import LEVELS, Operators, limited, serving_module
from zero_topo.quant import operators
from zero_topo.quant.operators import BackendUnavailable

CPU = tuple(LEVELS)
SPLIT = tuple(f"{level} split" for level in LEVELS)
FENCED = tuple(f"{level} fenced {side}" for level in LEVELS for side in ("end", "beginning"))
GPU = ("wave32", "wave64")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NATIVE = ("native",) if ON_GPU else ()
TRITON = ("triton",) if INTERPRETED or torch.cuda.is_available() else ()


@cache
def cpu_module() -> ModuleType:
    """The compiled module; compiled here if no one has yet."""
    from op_builder.builder import CPUBuilder  # imports DeepSpeed

    try:
        return CPUBuilder().load()
    except BuildError as error:
        pytest.skip(str(error))


@cache
def gpu_module() -> ModuleType:
    """The GPU kernels, compiled for the emulation, behind the binding that an engine on a GPU
    loads.
    """
    return bound(source_dir())


def configure(s: Settings = PLAIN) -> None:
    """Set how the emulated GPU behaves."""
    call = ctypes.CDLL(gpu_module().__file__).zt_emulation_configure
    numbers = (ctypes.c_int64(n) for n in (s.most_blocks, s.first_block, s.shared_tiles))
    call(s.wave, int(s.descending), *numbers)


@contextmanager
def opened(name: str) -> Iterator[Operators]:
    """Within it a backend serves; skips, saying so, where this machine cannot run it."""
    with _opened(name) as kernels:
        kernels.name = name
        yield kernels


@contextmanager
def _opened(name: str) -> Iterator[Operators]:
    level, *how = name.split()
    if level in LEVELS:
        module = cpu_module()
        if LEVELS[level] > module.best_level():
            pytest.skip(f"this processor has no {level}")
        work = {"values": 64, "threads": 4} if how == ["split"] else {}
        with limited(module, LEVELS[level], **work) as kernels:
            yield Fenced(how[1] == "end") if "fenced" in how else kernels
    elif level in GPU:
        with serving_module(gpu_module()) as kernels:
            configure(PLAIN if level == "wave32" else OTHER)
            yield kernels
    elif level == "triton":
        from zero_topo.quant import triton

        yield Operators(triton, "cpu" if INTERPRETED else "cuda")
    else:
        try:
            before = operators.use("native", DEVICE)
        except BackendUnavailable as reason:
            pytest.skip(str(reason))
        yield Operators(device=DEVICE.type)
        operators.use(before, DEVICE)


class FencedMemory:
    """Tensors that end (or begin) where memory does: an access beyond is a segmentation fault,
    whatever makes it.
    """

    def __init__(self, at_end: bool) -> None:
        self._at_end = at_end
        self._maps: list[mmap.mmap] = []

    def tensor(self, numel: int, dtype: torch.dtype, slack: int = 0) -> Tensor:
        """Zeros, with an inaccessible page behind (or before) them; ``slack`` bytes lie between."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        page = mmap.PAGESIZE
        size = numel * dtype.itemsize + slack
        memory = mmap.mmap(-1, (-(-size // page) + 1) * page)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        fence = begin + len(memory) - page if self._at_end else begin
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0
        self._maps.append(memory)
        offset = len(memory) - page - size if self._at_end else page
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)


def run_of(x: Tensor) -> Tensor:
    """The elements of memory from a tensor's first to its last."""
    sides = zip(x.shape, x.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in sides) if x.numel() else 0
    return x.as_strided((extent,), (1,))


class Fenced(Operators):
    """What serves the CPU, with a fence at every argument."""

    def __init__(self, at_end: bool) -> None:
        super().__init__()
        self._at_end = at_end

    def _kernel(self, name: str) -> Callable[..., Any]:
        kernel = super()._kernel(name)
        fence = FencedMemory(self._at_end)
        # INT8 weights begin at multiples of 16 bytes and end anywhere
        unit = 16 if name.startswith("codes") else 1

        def fenced(x: Tensor) -> Tensor:
            run = run_of(x)
            slack = -run.nbytes % unit if x.dtype == torch.uint8 else 0
            made = fence.tensor(run.numel(), x.dtype, slack)
            return made.copy_(run).as_strided(x.shape, x.stride())

        def call(*arguments: Any) -> Any:
            inside = tree_map_only(Tensor, fenced, list(arguments))
            result = kernel(*inside)
            for own, made in zip(tree_leaves(list(arguments)), tree_leaves(inside), strict=True):
                if isinstance(own, Tensor):
                    run_of(own).copy_(run_of(made))
            return result

        return call
