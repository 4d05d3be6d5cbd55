# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The operators as a backend of the golden suite, and backends of the suite as kernels of the
operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zero_topo.quant import operators, reference
from zero_topo.quant.operands import Change, Codes, Masters, Messages, View, described
from zero_topo.quant.operators import OPS
from zero_topo.quant.spec import Format

LEVELS = {"scalar": 0, "avx2": 1, "avx512": 2}


class Operators:
    """The operators on views, formats and messages, in place of what their schemas take.

    Args:
        kernels: a backend in Python; None is whatever serves the device of the arguments.
        device: where its tensors are.

    Attributes:
        name: in ``backends.py``.
    """

    name = ""

    def __init__(self, kernels: ModuleType | None = None, device: str = "cpu") -> None:
        self.kernels = kernels
        self.device = device

    def _kernel(self, name: str) -> Any:
        return getattr(OPS, name).default if self.kernels is None else getattr(self.kernels, name)

    def quantize(self, pieces: Sequence[View], spec: Format, out: Messages) -> None:
        """Pieces -> messages."""
        given = described(pieces)[:2]
        self._kernel("quantize")(*given, spec.code, out.table, out.without_member)

    def dequantize_reduce(
        self,
        messages: Messages,
        spec: Format,
        pieces: Sequence[View],
        factor: float = 1.0,
        accumulate: bool = False,
    ) -> None:
        """Sums of messages -> pieces."""
        left_out = messages.without_source, messages.without_member
        given = described(pieces)[:2]
        reduce = self._kernel("dequantize_reduce")
        reduce(messages.table, *left_out, spec.code, *given, factor, accumulate)

    def requantize(
        self,
        messages: Messages,
        source: Format,
        spec: Format,
        out: Messages,
        numel: int,
        factor: float = 1.0,
    ) -> None:
        """Sums of messages -> messages."""
        sums, made = (messages.table, messages.without_source), (out.table, out.without_member)
        self._kernel("requantize")(*sums, source.code, *made, spec.code, numel, factor)

    def codes_assess(self, masters: Masters, codes: Codes, *made: Tensor) -> None:
        """Scales, counts, steps and sizes."""
        table, *own = masters
        self._kernel("codes_assess")(table, own, *codes, *made)

    def codes_emit(self, masters: Masters, codes: Codes, change: Change, message: Tensor) -> None:
        """Masters -> codes and message."""
        table, *own = masters
        self._kernel("codes_emit")(table, own, *codes, *change, message)

    def codes_apply(self, messages: Messages, codes: Codes) -> None:
        """Messages -> codes."""
        self._kernel("codes_apply")(messages.table, messages.without_member, *codes)

    def __getattr__(self, name: str) -> Any:
        return self._kernel(name)


REFERENCE = Operators(reference)


@contextmanager
def serving(backend: Operators) -> Iterator[None]:
    """Within it a backend of the golden suite serves its device."""
    if backend.kernels is None:
        yield
        return
    device = torch.device(backend.device)
    before = operators.use("reference", device)
    withdraw = operators._serve_python(backend.kernels, device.type.upper())
    try:
        yield
    finally:
        withdraw()
        operators.use(before, device)


@contextmanager
def limited(
    module: ModuleType, level: int = -1, values: int = 1 << 15, threads: int = 1
) -> Iterator[Operators]:
    """Within it the CPU's kernels serve, with these instructions, values per piece of work, and
    threads.
    """
    threads_before, before = torch.get_num_threads(), operators.use("native", operators.CPU)
    module.limit(level, values)
    torch.set_num_threads(threads)
    try:
        yield Operators()
    finally:
        torch.set_num_threads(threads_before)
        module.limit(-1, 1 << 15)
        operators.use(before, operators.CPU)


@contextmanager
def serving_module(module: Any) -> Iterator[Operators]:
    """Within it a module of ``csrc/zt_binding.cpp`` serves the CPU."""
    before = operators.use("reference", operators.CPU)
    module.serve("CPU")
    try:
        yield Operators()
    finally:
        module.serve("")
        operators.use(before, operators.CPU)
