# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Defines the operands of the operators: strided views of tensors, tables of messages, INT8
weights.

Views
    A nested shard of a parameter is every k-th row of a matrix. A kernel that takes views reads and
    writes the shard in place, so no extra pass over memory interleaves it (``zt_piece`` in
    ``csrc/zt_kernels.h``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from zero_topo.quant.spec import BlockSpec

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Config name -> dtype in which values are stored and sent."""

FLOATS = tuple(DTYPES.values())


def way_to_floats(dtype: torch.dtype) -> str:
    """Return what a user does with a trained parameter whose type is not one of ``FLOATS``."""
    if dtype.is_complex:
        return (
            "make torch.view_as_real(weight) the parameter, and call torch.view_as_complex in the "
            "forward"
        )
    return "call model.float() before the model is sharded"


def counted(count: int, like: Tensor) -> Tensor:
    """Return the numbers below ``count``, int64, on the device of a tensor."""
    return torch.arange(count, dtype=torch.int64, device=like.device)


@dataclass(eq=False)
class View:
    """Describes a part of one message, or the equal parts of the messages of all members of a
    group.

    The message of member ``m`` gets ``rows x columns`` values in row-major order. The value at
    ``(r, c)`` is ``flat[m * member_stride + r * stride + c]``.

    Attributes:
        flat: 1-D, floating, unit stride, from the first element on. Elements beyond its end, the
            padding of a parameter's last shards, read as zero and are never written.
        rows: number of rows.
        columns: values per row.
        stride: elements from one row to the next, at least ``present``.
        members: number of messages that have such a part.
        member_stride: elements from one member's part to that of the next.
        present: columns that exist; None is all. The others pad a row to whole blocks: they read as
            zero and are never written.
        width: columns that exist.
        numel: values that each message gets, padding included.
        shape: the numbers that operators take: rows, columns, columns that exist, row stride,
            member stride.

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
        flat = self.flat
        width = self.columns if self.present is None else self.present
        self.width = width
        self.numel = self.rows * self.columns
        self.shape = self.rows, self.columns, width, self.stride, self.member_stride
        # Checked here once, so that no kernel needs to.
        if flat.dtype not in FLOATS:
            raise ValueError(
                f"cannot quantize a tensor of dtype {flat.dtype}; give one of {FLOATS}"
            )
        if flat.dim() != 1 or (flat.numel() > 1 and flat.stride(0) != 1):
            raise ValueError(
                f"a view lies in a 1-D tensor of adjacent elements, not {tuple(flat.shape)}"
            )
        least = min(self.rows, self.members, self.member_stride)
        if not 0 <= width <= self.columns or least < 0:
            raise ValueError(
                f"{self.members} x {self.rows} rows of {width} of {self.columns} elements: no view"
            )
        if self.rows > 1 and self.stride < width:
            raise ValueError(
                f"{self.rows} rows of {width} elements, {self.stride} apart, are not a view"
            )

    def member(self, index: int) -> View:
        """Return the view of one member's message."""
        begin = min(index * self.member_stride, self.flat.numel())
        return replace(self, flat=self.flat[begin:], members=1, member_stride=0)

    def _table(self, flat: Tensor) -> Tensor:
        """Return the elements of ``flat``, a tensor without missing elements, as
        ``[members, rows, width]``.
        """
        # A view of the memory in place: rows that are apart, of all members.
        strides = (self.member_stride, self.stride, 1)
        return flat.as_strided((self.members, self.rows, self.width), strides)

    def _missing(self) -> int:
        """Return the number of elements between the end of ``flat`` and the end of the last row."""
        if not (self.members and self.rows and self.width):
            return 0
        last_member = (self.members - 1) * self.member_stride
        last_row = last_member + (self.rows - 1) * self.stride
        return max(0, last_row + self.width - self.flat.numel())

    def read(self) -> Tensor:
        """Return a copy of the values, FP32 ``[members, numel]``."""
        shape = self.members, self.rows, self.columns
        out = self.flat.new_zeros(shape, dtype=torch.float32)
        missing = self._missing()
        # The reference reads beyond the end from a padded copy; kernels compare indices.
        flat = pad(self.flat, (0, missing)) if missing else self.flat
        out[..., : self.width].copy_(self._table(flat))
        return out.view(self.members, self.numel)

    def write(self, values: Tensor) -> None:
        """Write values ``[members, numel]``, rounded to the dtype of ``flat``."""
        values = values.reshape(self.members, self.rows, self.columns)
        values = values[..., : self.width]
        missing = self._missing()
        if not missing:
            self._table(self.flat).copy_(values)
            return
        # Written as a padded copy, of which only what exists is copied back.
        whole = pad(self.flat, (0, missing))
        self._table(whole).copy_(values)
        self.flat.copy_(whole[: self.flat.numel()])


def view_of(tensor: Tensor, block: int = 1) -> View:
    """Return a tensor as one view, without a copy.

    Args:
        tensor: contiguous or a matrix of adjacent columns, for one message; or
            ``[members, rows, columns]``.
        block: the rows of a 3-D tensor are padded to whole blocks of this many elements.

    Raises:
        ValueError: for a dtype that cannot be quantized, or strides that rows and columns cannot
            express.
    """
    if tensor.dim() < 3 and tensor.is_contiguous():
        return View(tensor.view(-1), 1, tensor.numel(), tensor.numel())
    adjacent = tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    if tensor.dim() not in (2, 3) or not adjacent:
        raise ValueError(
            f"a tensor of strides {tensor.stride()} is not rows of adjacent columns; make it "
            "contiguous"
        )
    table = tensor if tensor.dim() == 3 else tensor[None]
    members, rows, columns = table.shape
    member_stride, stride, _ = table.stride()
    # Up to the last element: a table may be columns of a wider one.
    extent = 0
    if table.numel():
        extent = (members - 1) * member_stride + (rows - 1) * stride + columns
    flat = table.as_strided((extent,), (1,))
    filled = -(-columns // block) * block
    return View(flat, rows, filled, stride, members, member_stride, columns)


Views = Tensor | Sequence[View]


def described(x: Views) -> tuple[list[Tensor], list[int], int, int]:
    """Convert a tensor, or a sequence of views, to the arguments that operators take.

    Returns:
        The tensors, their shapes, the number of members, and the number of values in one member's
        message.

    Raises:
        ValueError: if the views do not have the same members, or the tensor cannot be expressed as
            a view.
    """
    views = [view_of(x)] if isinstance(x, Tensor) else x
    flats: list[Tensor] = []
    shapes: list[int] = []
    members = views[0].members
    numel = 0
    for view in views:
        if view.members != members:
            raise ValueError(
                f"views of {members} and {view.members} members: all must have as many"
            )
        flats.append(view.flat)
        shapes += view.shape
        numel += view.numel
    return flats, shapes, members, numel


def views_of(flats: Sequence[Tensor], shapes: Sequence[int], members: int) -> list[View]:
    """Return the views that :func:`described` has converted."""
    views = []
    for i, flat in enumerate(flats):
        rows, columns, present, stride, member_stride = shapes[5 * i : 5 * i + 5]
        views.append(View(flat, rows, columns, stride, members, member_stride, present))
    return views


def total_numel(views: Sequence[View]) -> int:
    """Return the number of values in a message that holds these views."""
    return sum(view.numel for view in views)


def at_blocks(views: Sequence[View], block: int) -> list[View]:
    """Return the views with padding between them, so that each begins a block and no block spans
    two views.
    """
    if block == 1 or len(views) == 1:
        return list(views)
    parts: list[View] = []
    begin = 0
    # A view of no elements reads as zeros.
    nothing = views[0].flat[:0]
    for view in views:
        if missing := -begin % block:
            parts.append(View(nothing, 1, missing, missing, view.members))
        parts.append(view)
        begin += missing + view.numel
    return parts


def read_all(views: Sequence[View]) -> Tensor:
    """Return a copy of the concatenated values, FP32 ``[members, numel]``."""
    return torch.cat([view.read() for view in views], dim=1)


def write_all(values: Tensor, views: Sequence[View]) -> None:
    """Write concatenated values ``[members, numel]``, each rounded to the dtype of its view."""
    parts = values.split([view.numel for view in views], dim=1)
    for view, part in zip(views, parts, strict=True):
        view.write(part)


Range = tuple[int, int]


def merged(ranges: Iterable[Range], block: int = 1) -> tuple[Range, ...]:
    """Merge neighbouring ranges of columns wherever a block ends between them."""
    fewer: list[Range] = []
    for begin, end in ranges:
        # Neighbours in memory, and no block across their border: one view instead of two.
        if fewer:
            first, past = fewer[-1]
            if past == begin and (past - first) % block == 0:
                begin = first
                fewer.pop()
        fewer.append((begin, end))
    return tuple(fewer)


def packed_ranges(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Return the ranges of columns in a table that stores these ranges consecutively."""
    widths = (end - begin for begin, end in ranges)
    return tuple(pairwise(accumulate(widths, initial=0)))


def range_views(rows: Tensor, ranges: Iterable[Range], block: int = 1) -> list[View]:
    """Return views of ranges of columns, range by range, each row and range padded to whole blocks.

    No block then holds values of two parameters, and the content of a block does not depend on
    which ranges are sent together.

    Args:
        rows: ``[members, r, F]``, or ``[r, F]`` for one member; columns adjacent.
        ranges: ranges of columns.
        block: elements of a block; 1 adds no padding.
    """
    rows = rows if rows.dim() == 3 else rows[None]
    return [view_of(rows[..., begin:end], block) for begin, end in ranges]


@dataclass(frozen=True)
class Messages:
    """Holds a table of packed buffers (messages), one per (source, member).

    Attributes:
        table: uint8 ``[sources, outer, inner, bytes]``, the bytes of each message adjacent, the
            rest of any strides. Member ``m`` is ``(m // inner, m % inner)``.
        without_source: a source whose messages are not summed, -1 for none.
        without_member: a member whose message is neither written nor read, -1 for none.
    """

    table: Tensor
    without_source: int = -1
    without_member: int = -1

    @property
    def members(self) -> int:
        """Return the number of members."""
        return self.table.shape[1] * self.table.shape[2]

    def kept(self) -> list[int]:
        """Return all members except the one left out."""
        return [m for m in range(self.members) if m != self.without_member]

    def of(self, member: int) -> list[Tensor]:
        """Return the messages to a member from each source except the one left out."""
        outer, inner = divmod(member, self.table.shape[2])
        return [t[outer, inner] for s, t in enumerate(self.table) if s != self.without_source]


def to_members(messages: Tensor) -> Messages:
    """Wrap one message for each member: ``[bytes]``, ``[members, bytes]`` or
    ``[outer, inner, bytes]``.
    """
    assert messages.dim() <= 3
    missing = (None,) * (4 - messages.dim())
    return Messages(messages[missing])


def from_sources(messages: Tensor, without: int = -1) -> Messages:
    """Wrap messages to be summed: ``[sources, bytes]``, or ``[sources, members, bytes]`` for
    several members.
    """
    assert messages.dim() in (2, 3)
    while messages.dim() < 4:
        messages = messages.unsqueeze(1)
    return Messages(messages, without_source=without)


class Codes(NamedTuple):
    """Stores the INT8 weights (codes) and scales of some parameters, as an all-gather sends them.

    A parameter of ``rows`` rows of ``blocks`` blocks is stored in ``stored`` as one INT8 message of
    the wire format (:class:`~zero_topo.quant.spec.BlockSpec`): the codes of all rows, then their
    scales. Blocks never cross rows.

    Attributes:
        stored: uint8, 1-D.
        param_indices: int64 ``[parameters, 6]``, on the device: byte offsets of a parameter's codes
            and scales, blocks per row, its first block column, its first column in the table of
            masters, its number of columns.
        param_index_of: int32 ``[block columns]``, on the device: the parameter of each block
            column.
        numbers: the block size; of a part (:meth:`part`) also the range of block columns, the rows
            of one member, and the ranks of the process group. Row ``r`` of member ``m`` is row
            ``m + r * members`` of the shard.
    """

    stored: Tensor
    param_indices: Tensor
    param_index_of: Tensor
    numbers: Sequence[int]

    @property
    def block(self) -> int:
        """Return the values of a block."""
        return self.numbers[0]

    @property
    def blocks(self) -> int:
        """Return the number of blocks in a message of this part."""
        _, begin, end, rows, _ = self.numbers
        return rows * (end - begin)

    def part(self, begin: int, end: int, rows: int, members: int) -> Codes:
        """Return the blocks of one message: a range of block columns, row by row."""
        return self._replace(numbers=(self.block, begin, end, rows, members))

    @classmethod
    def build(
        cls,
        columns: Sequence[tuple[int, int]],
        rows: int,
        block: int,
        device: torch.device,
    ) -> Codes:
        """Allocate codes that are all zero.

        Args:
            columns: for each parameter, its first column in the table of masters and its number of
                columns.
            rows: rows of the shard.
            block: values of a block.
            device: device of the codes.
        """
        wire = BlockSpec("int8", block)
        at = 0
        before = 0
        param_indices = []
        param_index_of = []
        for index, (first, width) in enumerate(columns):
            blocks = wire.blocks(width)
            numel = rows * blocks * block
            scales = at + wire.scales_offset(numel)
            param_indices.append((at, scales, blocks, before, first, width))
            # Kernels find the parameter of a block column by this table.
            param_index_of += [index] * blocks
            at += wire.nbytes(numel)
            before += blocks
        stored = torch.zeros(at, dtype=torch.uint8, device=device)
        table = torch.tensor(param_indices, dtype=torch.int64, device=device).view(-1, 6)
        numbers = torch.tensor(param_index_of, dtype=torch.int32, device=device)
        return cls(stored, table, numbers, (block,))


class Masters(NamedTuple):
    """Holds the FP32 masters of one member's rows.

    Attributes:
        table: ``[rows, columns]``, columns adjacent.
        first: the column, counted as in :attr:`Codes.param_indices`, of the first column of
            ``table``.
        member: the member that owns the rows.
    """

    table: Tensor
    first: int
    member: int


class Change(NamedTuple):
    """Describes what a publish is about to change in the codes of a part; Note [Changes] in
    ``spec.py``.

    Attributes:
        scales: FP32 ``[blocks]``: the new scale of each block.
        counts: uint8 ``[blocks, tiles]``: the codes that change in each tile, plus 128 if one
            changes by more than 1; 255 if the block is sent whole.
        steps: uint8 ``[blocks, tiles, 2, T / 8]``: two masks of the values of each tile: which
            codes change, and which decrease. Undefined for blocks sent whole; the second also where
            one changes by more than 1.
        ends: int64 ``[blocks, 2]``: the blocks sent whole and the bytes of changes, summed up to
            and including each block.
    """

    scales: Tensor
    counts: Tensor
    steps: Tensor
    ends: Tensor
