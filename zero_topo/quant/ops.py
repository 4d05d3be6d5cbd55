# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The quantization operations: one definition, whose arguments are checked here, whatever backend is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from zero_topo.quant.pieces import Piece, Pieces, piece_of, pieces_to_read, total_numel
from zero_topo.quant.spec import ALIGNMENT, BlockSpec, Reduce, Total

PLAIN = Reduce()
Target = TypeVar("Target", bound=Pieces)


class BackendUnavailable(Exception):
    """A backend cannot serve a device here; the message says why, in one line."""


class Backend(Protocol):
    """What a backend implements; arguments are checked, nothing is empty, tensors are on one device it serves."""

    def quantize(self, pieces: Sequence[Piece], spec: BlockSpec, out: Tensor) -> None:
        """The concatenated pieces -> one message."""

    def dequantize(self, message: Tensor, spec: BlockSpec, pieces: Sequence[Piece]) -> None:
        """One message -> the pieces."""

    def dequantize_reduce(
        self, messages: Sequence[Tensor], spec: BlockSpec, pieces: Sequence[Piece], reduce: Reduce
    ) -> None:
        """The messages' sum -> the pieces."""

    def requantize(
        self, messages: Sequence[Tensor], source: BlockSpec, spec: BlockSpec, out: Tensor, total: Total
    ) -> None:
        """The messages' sum -> one message."""


class Quantizer:
    """Block quantization by one backend, with the argument checks that every backend relies on.

    Attributes:
        name: the backend, as ``ZERO_TOPO_QUANT`` names it.
    """

    def __init__(self, name: str, backend: Backend) -> None:
        self.name = name
        self._backend = backend

    def quantize(self, x: Pieces, spec: BlockSpec, out: Tensor | None = None) -> Tensor:
        """Quantize a tensor, or pieces one after the other, into one wire message.

        Args:
            x: FP32, FP16 or BF16; a tensor's elements are taken in row-major order, without a copy if it is
                contiguous or a matrix with adjacent columns.
            spec: bits, block size, symmetry.
            out: uint8 of ``spec.nbytes(numel)`` bytes, contiguous; allocated if None.

        Returns:
            ``out``.

        Raises:
            ValueError: for another dtype of ``x`` or an ``out`` of the wrong size.
        """
        pieces = pieces_to_read(x)
        numel = total_numel(pieces)
        if out is None:
            out = torch.empty(spec.nbytes(numel), dtype=torch.uint8, device=pieces[0].flat.device)
        _check_message(out, spec, numel)
        if numel:
            self._backend.quantize(pieces, spec, out)
        return out

    def dequantize(self, message: Tensor, spec: BlockSpec, out: Target) -> Target:
        """Dequantize one message into a tensor of any strides, or pieces (FP32, FP16 or BF16); returns ``out``.

        Raises:
            ValueError: if the message does not hold as many values of this spec as there is room for.
        """
        with _Target(out) as pieces:
            numel = total_numel(pieces)
            _check_message(message, spec, numel)
            if numel:
                self._backend.dequantize(message, spec, pieces)
        return out

    def dequantize_reduce(
        self, messages: Sequence[Tensor], spec: BlockSpec, out: Target, reduce: Reduce = PLAIN
    ) -> Target:
        """Sum the dequantized messages, in the order given, into a tensor or pieces; returns ``out``.

        Args:
            messages: one per source.
            spec: theirs.
            out: FP32, FP16 or BF16; the sum itself is FP32, rounded once when it is written.
            reduce: factor and accumulation.

        Raises:
            ValueError: for no message, or one of the wrong size.
        """
        if not messages:
            raise ValueError("nothing to reduce: give at least one message")
        with _Target(out) as pieces:
            numel = total_numel(pieces)
            for message in messages:
                _check_message(message, spec, numel)
            if numel:
                self._backend.dequantize_reduce(messages, spec, pieces, reduce)
        return out

    def requantize(
        self, messages: Sequence[Tensor], source: BlockSpec, spec: BlockSpec, out: Tensor, total: Total
    ) -> Tensor:
        """Sum the dequantized messages and quantize the sum, without a detour through memory.

        Args:
            messages: one per source, each of ``total.numel`` values of ``source``.
            source: the spec they have.
            spec: the spec ``out`` shall have; block size and symmetry are those of ``source``.
            out: uint8 of ``spec.nbytes(total.numel)`` bytes.
            total: number of values, and a factor for the sum.

        Returns:
            ``out``.

        Raises:
            ValueError: for no message, one of the wrong size, or specs whose blocks differ.
        """
        if not messages:
            raise ValueError("nothing to reduce: give at least one message")
        if (source.block_size, source.symmetric) != (spec.block_size, spec.symmetric):
            raise ValueError(f"cannot requantize {source} to {spec}: block size and symmetry must stay")
        for message in messages:
            _check_message(message, source, total.numel)
        _check_message(out, spec, total.numel)
        if total.numel:
            self._backend.requantize(messages, source, spec, out, total)
        return out


class _Target:
    """Tensors or pieces to write, as pieces; a tensor of unusual strides is written by way of a contiguous one."""

    def __init__(self, out: Pieces) -> None:
        self._detours: list[tuple[Tensor, Tensor]] = []
        self._pieces = [self._piece(part) for part in ([out] if isinstance(out, Tensor | Piece) else out)]

    def _piece(self, part: Tensor | Piece) -> Piece:
        found = part if isinstance(part, Piece) else piece_of(part)
        if found is not None:
            return found
        assert isinstance(part, Tensor)
        copy = part.contiguous()
        self._detours.append((part, copy))
        return Piece(copy.view(-1), 1, copy.numel(), copy.numel())

    def __enter__(self) -> list[Piece]:
        return self._pieces

    def __exit__(self, *error: object) -> None:
        for part, copy in self._detours:
            part.copy_(copy)


def _check_message(message: Tensor, spec: BlockSpec, numel: int) -> None:
    size = spec.nbytes(numel)
    if message.dtype != torch.uint8 or message.numel() != size or not message.is_contiguous():
        raise ValueError(
            f"a {spec} message of {numel} values is {size} contiguous bytes of uint8 (a multiple of {ALIGNMENT}), "
            f"not {message.numel()} of {message.dtype}"
        )
