# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The quantization operations: one definition, whose arguments are checked here, whatever backend is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from zero_topo.quant.messages import Messages, check_messages, from_sources, to_members
from zero_topo.quant.pieces import Piece, Pieces, piece_of, pieces_to_read, total_numel
from zero_topo.quant.spec import BlockSpec, Format, Reduce, Total

PLAIN = Reduce()
Target = TypeVar("Target", bound=Pieces)


class BackendUnavailable(Exception):
    """A backend cannot serve a device here; the message says why, in one line."""


class Backend(Protocol):
    """What a backend implements; arguments are checked, nothing is empty, tensors are on one device it serves.

    Pieces and messages have the same members; a :class:`Cast` is a format like any other.
    """

    def quantize(self, pieces: Sequence[Piece], spec: Format, out: Messages) -> None:
        """The concatenated pieces of each member -> its message."""

    def dequantize_reduce(self, messages: Messages, spec: Format, pieces: Sequence[Piece], reduce: Reduce) -> None:
        """The sum of each member's messages -> its pieces."""

    def requantize(self, messages: Messages, source: Format, spec: Format, out: Messages, total: Total) -> None:
        """The sum of each member's messages -> one message."""


class Quantizer:
    """Block quantization by one backend, with the argument checks that every backend relies on.

    All operations take any number of members at once, in one launch: what goes to, or came from, each rank of a group.

    Attributes:
        name: the backend, as ``ZERO_TOPO_QUANT`` names it.
    """

    def __init__(self, name: str, backend: Backend) -> None:
        self.name = name
        self._backend = backend

    def quantize(self, x: Pieces, spec: Format, out: Tensor | None = None, without: int | None = None) -> Tensor:
        """Quantize a tensor, or pieces one after the other, into one message for each member.

        Args:
            x: FP32, FP16 or BF16. A tensor's elements are taken in row-major order, without a copy if it is contiguous
                or a matrix with adjacent columns; one of three dimensions is ``[members, rows, columns]``.
            spec: bits and block size, or a float's type.
            out: uint8 ``[nbytes]``, ``[members, nbytes]`` or ``[outer, inner, nbytes]``, the bytes of each message
                adjacent, ``nbytes = spec.nbytes(numel)``; allocated if None.
            without: a member whose message is not written.

        Returns:
            ``out``.

        Raises:
            ValueError: for another dtype of ``x`` or an ``out`` of the wrong size.
        """
        pieces = pieces_to_read(x)
        members, numel = _extent(pieces)
        if out is None:
            shape = [spec.nbytes(numel)] if members == 1 else [members, spec.nbytes(numel)]
            out = torch.empty(shape, dtype=torch.uint8, device=pieces[0].flat.device)
        messages = to_members(out, without)
        check_messages(messages, spec, numel, members)
        if numel and members:
            self._backend.quantize(pieces, spec, messages)
        return out

    def dequantize(
        self, messages: Tensor, spec: Format, out: Target, reduce: Reduce = PLAIN, without: int | None = None
    ) -> Target:
        """Dequantize one message of each member into a tensor of any strides, or pieces; returns ``out``.

        Args:
            messages: as ``out`` of :meth:`quantize`.
            spec: theirs.
            out: FP32, FP16 or BF16.
            reduce: factor and accumulation.
            without: a member whose message is not read.

        Raises:
            ValueError: if a message does not hold as many values of this spec as there is room for.
        """
        return self._reduce(to_members(messages, without), spec, out, reduce)

    def dequantize_reduce(
        self, messages: Tensor, spec: Format, out: Target, reduce: Reduce = PLAIN, without: int | None = None
    ) -> Target:
        """Sum the dequantized messages, in the order given, into a tensor or pieces; returns ``out``.

        Args:
            messages: ``[sources, nbytes]``, or ``[sources, members, nbytes]``.
            spec: theirs.
            out: FP32, FP16 or BF16; the sum itself is FP32, rounded once when it is written.
            reduce: factor and accumulation.
            without: a source whose messages are left out.

        Raises:
            ValueError: for no message, or one of the wrong size.
        """
        return self._reduce(from_sources(messages, without), spec, out, reduce)

    def _reduce(self, messages: Messages, spec: Format, out: Target, reduce: Reduce) -> Target:
        with _Target(out) as pieces:
            members, numel = _extent(pieces)
            check_messages(messages, spec, numel, members)
            if numel and members:
                self._backend.dequantize_reduce(messages, spec, pieces, reduce)
        return out

    def requantize(self, messages: Tensor, source: Format, spec: Format, out: Tensor, total: Total) -> Tensor:
        """Sum the dequantized messages and quantize the sum, without a detour through memory.

        Args:
            messages: ``[sources, nbytes]`` or ``[sources, members, nbytes]``, each of ``total.numel`` values.
            source: the spec they have.
            spec: the spec ``out`` shall have; its block size is that of ``source``.
            out: uint8 ``[spec.nbytes(total.numel)]``, or ``[members, ...]``.
            total: number of values, and a factor for the sum.

        Returns:
            ``out``.

        Raises:
            ValueError: for no message, one of the wrong size, or specs whose blocks differ.
        """
        if not _alike(source, spec):
            raise ValueError(f"cannot requantize {source} to {spec}: the block size must stay")
        came, made = from_sources(messages), to_members(out)
        check_messages(came, source, total.numel, made.members)
        check_messages(made, spec, total.numel, made.members)
        if total.numel and made.members:
            self._backend.requantize(came, source, spec, made, total)
        return out


def _alike(source: Format, spec: Format) -> bool:
    """Whether values of one format can go on in the other."""
    if isinstance(source, BlockSpec) and isinstance(spec, BlockSpec):
        return source.block_size == spec.block_size
    return source == spec


def _extent(pieces: Sequence[Piece]) -> tuple[int, int]:
    """Members, and values of the message of each.

    Raises:
        ValueError: if the pieces do not have the same members.
    """
    members = {piece.members for piece in pieces}
    if len(members) != 1:
        raise ValueError(f"pieces of {sorted(members)} members: all must have as many")
    return members.pop(), total_numel(pieces)


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
