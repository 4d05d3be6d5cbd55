# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Where quantized values come from and go to: strided pieces of tensors, in one message.

A nested shard of a parameter is every k-th row of a matrix. A kernel that takes pieces reads it where it lies and
writes it where it belongs, so no pass over memory interleaves it (``zt_piece`` in ``csrc/zt_kernels.h``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Piece:
    """``rows x columns`` elements in row-major order, rows ``stride`` elements apart.

    Attributes:
        flat: 1-D, floating, unit stride. Begins with the piece's first element; what lies beyond its end reads as
            zero and is never written: the padding of a parameter's last shards.
        rows: number of rows.
        columns: elements per row, adjacent.
        stride: elements from one row to the next, at least ``columns``.

    Raises:
        ValueError: for another dtype or shape of ``flat``, or rows that overlap.
    """

    flat: Tensor
    rows: int
    columns: int
    stride: int

    def __post_init__(self) -> None:
        flat = self.flat
        if flat.dtype not in FLOATS:
            raise ValueError(f"cannot quantize a tensor of dtype {flat.dtype}; give one of {FLOATS}")
        if flat.dim() != 1 or (flat.numel() > 1 and flat.stride(0) != 1):
            raise ValueError(f"a piece lies in a 1-D tensor of adjacent elements, not {tuple(flat.shape)}")
        if self.rows < 0 or self.columns < 0 or (self.rows > 1 and self.stride < self.columns):
            raise ValueError(f"{self.rows} rows of {self.columns} elements, {self.stride} apart, are not a piece")

    @property
    def numel(self) -> int:
        """Values the piece contributes to the message, those beyond the end of ``flat`` included."""
        return self.rows * self.columns

    def _whole_rows(self) -> int:
        """Leading rows that lie wholly within ``flat``."""
        if not self.columns:
            return self.rows
        missing = self.flat.numel() - self.columns
        return 0 if missing < 0 else min(self.rows, missing // max(self.stride, 1) + 1 if self.rows > 1 else 1)

    def _partial(self) -> list[tuple[int, Tensor]]:
        """The other rows that have elements at all: (row, what exists of it)."""
        rest = range(self._whole_rows(), self.rows)
        begins = ((row, row * self.stride) for row in rest)
        return [(row, self.flat[begin : begin + self.columns]) for row, begin in begins if begin < self.flat.numel()]

    def _matrix(self, rows: int) -> Tensor:
        return self.flat.as_strided((rows, self.columns), (self.stride, 1))

    def read(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, ``[numel]``, a copy."""
        out = torch.empty(self.numel, dtype=dtype, device=self.flat.device)
        self.read_into(out)
        return out

    def read_into(self, out: Tensor) -> None:
        """The values, into ``out``: ``[numel]``, contiguous, any floating dtype."""
        whole = self._whole_rows()
        table = out.view(self.rows, self.columns)
        table[:whole].copy_(self._matrix(whole))
        table[whole:].zero_()
        for row, present in self._partial():
            table[row, : present.numel()].copy_(present)

    def write(self, values: Tensor) -> None:
        """Take over values ``[numel]``, rounded to the dtype of ``flat``."""
        whole = self._whole_rows()
        table = values.view(self.rows, self.columns)
        self._matrix(whole).copy_(table[:whole])
        for row, present in self._partial():
            present.copy_(table[row, : present.numel()])


Pieces = Tensor | Piece | Sequence[Tensor | Piece]


def piece_of(tensor: Tensor) -> Piece | None:
    """A tensor as one piece, without a copy; None if its strides cannot be said in rows and columns.

    Raises:
        ValueError: for a dtype that cannot be quantized.
    """
    if tensor.dtype not in FLOATS:
        raise ValueError(f"cannot quantize a tensor of dtype {tensor.dtype}; give one of {FLOATS}")
    if tensor.is_contiguous():
        return Piece(tensor.view(-1), 1, tensor.numel(), tensor.numel())
    if tensor.dim() != 2 or (tensor.stride(1) != 1 and tensor.shape[1] > 1) or tensor.stride(0) < tensor.shape[1]:
        return None
    rows, columns = tensor.shape
    stride = tensor.stride(0)
    return Piece(tensor.as_strided(((rows - 1) * stride + columns,), (1,)), rows, columns, stride)


def pieces_to_read(x: Pieces) -> list[Piece]:
    """What to quantize, as pieces; a tensor of unusual strides is copied.

    Raises:
        ValueError: for a dtype that cannot be quantized.
    """
    parts = [x] if isinstance(x, Tensor | Piece) else x
    return [p if isinstance(p, Piece) else piece_of(p) or Piece(p.reshape(-1), 1, p.numel(), p.numel()) for p in parts]


def total_numel(pieces: Sequence[Piece]) -> int:
    """Values of a message that holds these pieces."""
    return sum(piece.numel for piece in pieces)


def read_all(pieces: Sequence[Piece]) -> Tensor:
    """The concatenated values, FP32 ``[numel]``, a copy."""
    return torch.cat([piece.read() for piece in pieces])


def write_all(values: Tensor, pieces: Sequence[Piece]) -> None:
    """Take over concatenated values ``[numel]``, each rounded to the dtype of its piece."""
    for piece, part in zip(pieces, values.split([piece.numel for piece in pieces]), strict=True):
        piece.write(part)
