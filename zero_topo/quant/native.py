# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of `csrc/` as a backend, for tensors on CPUs and on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from zero_topo.quant import sparse_reference
from zero_topo.quant.code_ops import Change, Codes, Masters, Part
from zero_topo.quant.messages import Messages
from zero_topo.quant.ops import BackendUnavailable
from zero_topo.quant.pieces import DTYPES, FLOATS, Piece
from zero_topo.quant.spec import Cast, Format, Reduce, Total


def load(device: torch.device) -> Native:
    """The kernels for a device, compiled if this is their first use.

    Raises:
        BackendUnavailable: if they are not built and cannot be.
    """
    from zero_topo.op_builder.builder import CPUBuilder, GPUBuilder
    from zero_topo.op_builder.jit import BuildError

    if device.type not in ("cpu", "cuda"):
        raise BackendUnavailable(f"there are no native kernels for {device.type}")
    try:
        module = (CPUBuilder if device.type == "cpu" else GPUBuilder)().load()
    except BuildError as error:
        raise BackendUnavailable(str(error)) from error
    return Native(module, _no_stream if device.type == "cpu" else _stream)


def _no_stream() -> int:
    return 0


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


class Native:
    """One compiled module; operations as in :class:`zero_topo.quant.ops.Backend`, of the sparse modes and of codes.

    Args:
        module: of ``csrc/zt_binding.cpp``.
        stream: the current stream's handle, 0 on a CPU.
    """

    def __init__(self, module: ModuleType, stream: Callable[[], int]) -> None:
        self._module, self._stream = module, stream
        self._tables = module.Tables()  # of more pieces than travel with a launch on a GPU

    def _state(self) -> tuple[object, int]:
        return self._tables, self._stream()

    def quantize(self, pieces: Sequence[Piece], spec: Format, out: Messages) -> None:
        """The concatenated pieces of each member -> its message."""
        made = _format(spec), out.table, _without(out)
        self._module.quantize(*_described(pieces), *made, *self._state())

    def dequantize_reduce(self, messages: Messages, spec: Format, pieces: Sequence[Piece], reduce: Reduce) -> None:
        """The sum of each member's messages -> its pieces."""
        came, options = (messages.table, _without(messages)), (reduce.factor, reduce.accumulate)
        self._module.dequantize_reduce(*came, _format(spec), *_described(pieces), *options, *self._state())

    def requantize(self, messages: Messages, source: Format, spec: Format, out: Messages, total: Total) -> None:
        """The sum of each member's messages -> one message."""
        came, formats = (messages.table, (_without(messages)[0], _without(out)[1])), (_format(source), _format(spec))
        self._module.requantize(*came, *formats, out.table, total.numel, total.factor, self._stream())

    # -- sparse modes ----------------------------------------------------------------------------------------------

    def mask_pack(self, mask: Tensor, bits: Tensor) -> None:
        """Booleans ``[n]`` -> bytes ``[ceil(n / 8)]``."""
        self._module.mask_pack(mask, bits, self._stream())

    def mask_unpack(self, bits: Tensor, mask: Tensor) -> None:
        """And back."""
        self._module.mask_unpack(bits, mask, self._stream())

    def count_above(self, x: Tensor, threshold: float) -> Tensor:
        """How many ``|x[i]| >= threshold``, int64 ``[1]``."""
        found: Tensor = self._module.count_above(x, threshold, self._stream())
        return found

    def compact_above(self, x: Tensor, threshold: float, indices: Tensor, values: Tensor) -> Tensor:
        """Their indices and values, as many as there is room for; how many there are, int64 ``[1]``."""
        found: Tensor = self._module.compact_above(x, threshold, indices, values, self._stream())
        return found

    def row_largest(self, x: Tensor, indices: Tensor) -> None:
        """The columns of each row's largest magnitudes; for GPUs nothing is compiled, torch's own selection serves."""
        if hasattr(self._module, "row_largest"):
            self._module.row_largest(x, indices, self._stream())
        else:
            sparse_reference.row_largest(x, indices)

    def sketch_insert(self, x: Tensor, seed: int, sketch: Tensor) -> None:
        """FP32 ``[members, n]`` -> count sketches ``[members, rows, 1024]``."""
        self._module.sketch_insert(x, seed, sketch, self._stream())

    def sketch_peel(self, sketch: Tensor, bits: Tensor, seed: int, out: Tensor) -> Tensor:
        """And back, given the mask; how many elements were only estimated, int64 ``[1]``."""
        left: Tensor = self._module.sketch_peel(sketch, bits, seed, out, self._stream())
        return left

    # -- codes -----------------------------------------------------------------------------------------------------

    def codes_assess(self, masters: Masters, codes: Codes, part: Part, scales: Tensor, escaped: Tensor) -> None:
        """Each block's scale from now on, and whether it escapes."""
        self._module.codes_assess(*_owned(masters), *_coded(codes, part), scales, escaped, self._stream())

    def codes_emit(self, masters: Masters, codes: Codes, part: Part, change: Change, message: Tensor) -> None:
        """Bring codes and scales up to date, and write scales, codes and trits of the message."""
        made = [change.scales, change.order, change.count]
        self._module.codes_emit(*_owned(masters), *_coded(codes, part), made, message, self._stream())

    def codes_apply(self, messages: Messages, codes: Codes, part: Part) -> None:
        """Bring the rows of all members but the one left out up to date."""
        self._module.codes_apply(messages.table, _without(messages), *_coded(codes, part), self._stream())


def _owned(masters: Masters) -> tuple[Tensor, list[int]]:
    return masters.table, [masters.first, masters.member]


def _coded(codes: Codes, part: Part) -> tuple[list[Tensor], list[int]]:
    return [codes.held, codes.slots, codes.slot_of], [codes.block, part.begin, part.end, part.rows, part.members]


def _format(spec: Format) -> tuple[int, int, int]:
    if isinstance(spec, Cast):
        return spec.bits, 1, FLOATS.index(DTYPES[spec.dtype])
    return spec.bits, spec.block_size, 0


def _without(messages: Messages) -> tuple[int, ...]:
    return tuple(-1 if left is None else left for left in (messages.without_source, messages.without_member))


def _described(pieces: Sequence[Piece]) -> tuple[list[Tensor], list[int]]:
    shapes = [(p.rows, p.columns, p.width, p.stride, p.member_stride) for p in pieces]
    return [p.flat for p in pieces], [number for shape in shapes for number in shape]
