# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Where quantized values come from and go to: strided pieces of tensors, in one message.

A nested shard of a parameter is every k-th row of a matrix. A kernel that takes pieces reads it where it lies and
writes it where it belongs, so no pass over memory interleaves it (``zt_piece`` in ``csrc/zt_kernels.h``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""A config's names of the types in which values are kept and travel."""

FLOATS = tuple(DTYPES.values())


@dataclass(eq=False)
class Piece:
    """A part of one message, or of the messages of all members of a group alike.

    The message of member ``m`` gets ``rows x columns`` values in row-major order; that at ``(r, c)`` is the element
    ``flat[m * member_stride + r * stride + c]``.

    Attributes:
        flat: 1-D, floating, unit stride. Begins with the first element; what lies beyond its end reads as zero and is
            never written: the padding of a parameter's last shards.
        rows: number of rows.
        columns: values per row.
        stride: elements from one row to the next, at least ``present``.
        members: messages that have such a part.
        member_stride: elements from one member's part to the next one's.
        present: columns that exist; the others read as zero and are never written, and fill a row up to whole blocks.
            None is all.
        width: columns that exist.
        numel: values that each message gets, those that do not exist included.
        shape: the numbers that operators take: rows, columns, columns that exist, row stride, member stride.

    Raises:
        ValueError: for another dtype or shape of ``flat``, or rows that overlap.
    """

    flat: Tensor
    rows: int
    columns: int
    stride: int
    members: int = 1
    member_stride: int = 0
    present: int | None = None
    width: int = field(init=False)
    numel: int = field(init=False)
    shape: tuple[int, int, int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        flat, width = self.flat, self.columns if self.present is None else self.present
        self.width, self.numel = width, self.rows * self.columns
        self.shape = self.rows, self.columns, width, self.stride, self.member_stride
        if flat.dtype not in FLOATS:
            raise ValueError(f"cannot quantize a tensor of dtype {flat.dtype}; give one of {FLOATS}")
        if flat.dim() != 1 or (flat.numel() > 1 and flat.stride(0) != 1):
            raise ValueError(f"a piece lies in a 1-D tensor of adjacent elements, not {tuple(flat.shape)}")
        if not 0 <= width <= self.columns or min(self.rows, self.members, self.member_stride) < 0:
            raise ValueError(f"{self.members} x {self.rows} rows of {width} of {self.columns} elements: no piece")
        if self.rows > 1 and self.stride < width:
            raise ValueError(f"{self.rows} rows of {width} elements, {self.stride} apart, are not a piece")

    def member(self, index: int) -> Piece:
        """What the message of one member gets."""
        begin = min(index * self.member_stride, self.flat.numel())
        return replace(self, flat=self.flat[begin:], members=1, member_stride=0)

    def _table(self, flat: Tensor) -> Tensor:
        """``[members, rows, width]``: the elements, in a tensor that holds all of them."""
        strides = (self.member_stride, self.stride, 1)
        return flat.as_strided((self.members, self.rows, self.width), strides)

    def _missing(self) -> int:
        """Elements between the end of ``flat`` and that of the last row."""
        if not (self.members and self.rows and self.width):
            return 0
        extent = (self.members - 1) * self.member_stride + (self.rows - 1) * self.stride + self.width
        return max(0, extent - self.flat.numel())

    def read(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, ``[members, numel]``, a copy."""
        out = torch.zeros(self.members, self.rows, self.columns, dtype=dtype, device=self.flat.device)
        missing = self._missing()
        flat = pad(self.flat, (0, missing)) if missing else self.flat
        out[..., : self.width].copy_(self._table(flat))
        return out.view(self.members, self.numel)

    def write(self, values: Tensor) -> None:
        """Take over values ``[members, numel]``, rounded to the dtype of ``flat``."""
        values = values.reshape(self.members, self.rows, self.columns)[..., : self.width]
        missing = self._missing()
        if not missing:
            self._table(self.flat).copy_(values)
            return
        whole = pad(self.flat, (0, missing))
        self._table(whole).copy_(values)
        self.flat.copy_(whole[: self.flat.numel()])


def piece_of(tensor: Tensor, block: int = 1) -> Piece:
    """A tensor as one piece, without a copy.

    Args:
        tensor: contiguous or a matrix of adjacent columns, of one message; or ``[members, rows, columns]``.
        block: rows of three dimensions are filled up to whole blocks of so many elements.

    Raises:
        ValueError: for a dtype that cannot be quantized, or strides that rows and columns cannot express.
    """
    if tensor.dim() < 3 and tensor.is_contiguous():
        return Piece(tensor.view(-1), 1, tensor.numel(), tensor.numel())
    if tensor.dim() not in (2, 3) or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1):
        raise ValueError(f"a tensor of strides {tensor.stride()} is not rows of adjacent columns; make it contiguous")
    table = tensor if tensor.dim() == 3 else tensor[None]
    (members, rows, columns), (member_stride, stride, _) = table.shape, table.stride()
    extent = (members - 1) * member_stride + (rows - 1) * stride + columns if table.numel() else 0
    flat, filled = table.as_strided((extent,), (1,)), -(-columns // block) * block
    return Piece(flat, rows, filled, stride, members, member_stride, columns)


Pieces = Tensor | Sequence[Piece]


def described(x: Pieces) -> tuple[list[Tensor], list[int], int, int]:
    """A tensor, or pieces one after the other, as operators take them.

    Returns:
        Their tensors, their shapes, how many members they have, and the values of one member's message.

    Raises:
        ValueError: if the pieces do not have the same members, or the tensor is no piece.
    """
    pieces = [piece_of(x)] if isinstance(x, Tensor) else x
    flats: list[Tensor] = []
    shapes: list[int] = []
    members, numel = pieces[0].members, 0
    for piece in pieces:
        if piece.members != members:
            raise ValueError(f"pieces of {members} and {piece.members} members: all must have as many")
        flats.append(piece.flat)
        shapes += piece.shape
        numel += piece.numel
    return flats, shapes, members, numel


def total_numel(pieces: Sequence[Piece]) -> int:
    """Values of a message that holds these pieces."""
    return sum(piece.numel for piece in pieces)


def at_blocks(pieces: Sequence[Piece], block: int) -> list[Piece]:
    """The pieces, with values that do not exist between them, so that each begins a block and none is of two pieces."""
    parts: list[Piece] = []
    begin = 0
    for piece in pieces:
        if missing := -begin % block:
            parts.append(Piece(piece.flat[:0], 1, missing, missing, piece.members))
        parts.append(piece)
        begin += missing + piece.numel
    return parts


def read_all(pieces: Sequence[Piece], dtype: torch.dtype = torch.float32) -> Tensor:
    """The concatenated values, ``[members, numel]``, a copy."""
    return torch.cat([piece.read(dtype) for piece in pieces], dim=1)


def write_all(values: Tensor, pieces: Sequence[Piece]) -> None:
    """Take over concatenated values ``[members, numel]``, each rounded to the dtype of its piece."""
    for piece, part in zip(pieces, values.split([piece.numel for piece in pieces], dim=1), strict=True):
        piece.write(part)
