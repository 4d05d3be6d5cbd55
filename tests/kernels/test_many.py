# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""No backend has a limit of messages: 9,408 nodes may send, and this rank's own is left out among theirs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from op_builder import source_dir
from op_builder.jit import cache_dir
from tests.kernels import golden
from tests.kernels import gpu_library as gpu
from zero_topo.quant.native import Native, load
from zero_topo.quant.ops import BackendUnavailable
from zero_topo.quant.reference import Reduce
from zero_topo.quant.spec import BlockSpec

CASES = [(1, None), (2, None), (3, 1), (4, 1), (129, None), (130, 0), (130, 77), (130, 129), (9408, 5000)]
"""Messages side by side, and which of them is left out."""


@pytest.fixture(scope="module")
def emulated() -> gpu.GpuLibrary:
    """The GPU kernels on this CPU."""
    return gpu.GpuLibrary(gpu.emulated(source_dir(), cache_dir()))


@pytest.mark.parametrize(("sources", "hole"), CASES)
def test_gpu_kernels(emulated: gpu.GpuLibrary, sources: int, hole: int | None) -> None:
    """Evenly spaced messages are found by their spacing."""
    golden.check_many(emulated, sources, hole)


@pytest.mark.parametrize(("left_out", "even"), [((), 1), ((0, 2), 1), ((3, 5), 0), ((4, 5), 0), (range(1, 7), 1)])
def test_what_is_even(emulated: gpu.GpuLibrary, left_out: Sequence[int], even: int) -> None:
    """One hole at the most, of one message."""
    rows = [row for i, row in enumerate(torch.zeros(8, 16, dtype=torch.uint8).unbind()) if i not in left_out]
    assert emulated.library.zt_gpu_even(gpu.c_messages(rows), len(rows)) == even


def test_cpu_kernels() -> None:
    """They take lists of any length."""
    try:
        native = load(torch.device("cpu"))
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    golden.check_many(native, 9408, 5000)


def test_the_binding_for_gpus() -> None:
    """The torch module that an engine on a GPU calls, over the emulated kernels; uneven messages are copied."""
    native = Native(gpu.bound(source_dir()), lambda: 0)
    golden.check_many(native, 130, 77)
    spec = BlockSpec(8, 64)
    rows = [golden.messages_of(spec, 64, 5)[i] for i in (3, 0, 1, 4, 2)]
    sums = [torch.empty(64), torch.empty(64)]
    golden.reference.dequantize_reduce(rows, spec, [golden.whole(sums[0])], Reduce())
    native.dequantize_reduce(rows, spec, [golden.whole(sums[1])], Reduce())
    golden.assert_same(sums[1], sums[0], "uneven")
    fmt = golden.Format(golden.SPECS[0], torch.bfloat16)
    golden.check_quantize(native, fmt)
    golden.check_dequantize(native, fmt)
    golden.check_reduce(native, fmt, sources=(3,))
    golden.check_masks(native)
    golden.check_selection(native, torch.bfloat16)
    golden.check_sketch(native)
