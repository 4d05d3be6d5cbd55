# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The operations as Triton kernels: for GPUs without a compiler, and for CPU tensors under ``TRITON_INTERPRET=1``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from zero_topo.quant.messages import Messages, to_members
from zero_topo.quant.pieces import DTYPES, Piece, total_numel
from zero_topo.quant.sparse_reference import row_largest  # noqa: F401  (torch's own selection serves GPUs)
from zero_topo.quant.spec import Cast, Format, Reduce, Total
from zero_topo.quant.triton_blocks import (
    ALIGNED,
    TILE,
    Fold,
    Place,
    Table,
    Work,
    quantize_tile,
    reduce_tile,
    requantize_tile,
    size_of,
)
from zero_topo.quant.triton_codes import codes_apply, codes_assess, codes_emit  # noqa: F401  (of the backend)
from zero_topo.quant.triton_sparse import (  # noqa: F401
    compact_above,
    count_above,
    launch,
    mask_pack,
    mask_unpack,
    sketch_insert,
    sketch_peel,
)


def quantize(pieces: Sequence[Piece], spec: Format, out: Messages) -> None:
    """The concatenated pieces of each member -> its message."""
    if isinstance(spec, Cast):
        for piece, values in _parts(pieces, spec, out):
            _quantize(piece, spec, values)
    elif len(pieces) == 1:
        _quantize(pieces[0], spec, out)
    else:
        copy, cast, values = _room(pieces)
        _copy(pieces, cast, values)
        _quantize(copy, spec, out)


def dequantize_reduce(messages: Messages, spec: Format, pieces: Sequence[Piece], reduce: Reduce) -> None:
    """The sum of each member's messages -> its pieces."""
    if isinstance(spec, Cast):
        for piece, values in _parts(pieces, spec, messages):
            if piece.flat.numel():
                _reduce(values, spec, piece, reduce)
    elif len(pieces) == 1:
        _reduce(messages, spec, pieces[0], reduce)
    else:
        copy, cast, values = _room(pieces)
        if reduce.accumulate:
            _copy(pieces, cast, values)
        _reduce(messages, spec, copy, reduce)
        dequantize_reduce(replace(values, without_member=messages.without_member), cast, pieces, Reduce())


def requantize(messages: Messages, source: Format, spec: Format, out: Messages, total: Total) -> None:
    """The sum of each member's messages -> one message."""
    work, programs = _worked(replace(messages, without_member=out.without_member), total.numel, total.factor)
    tables = _described(out, spec, total.numel), _described(messages, source, total.numel)
    launch(requantize_tile, programs, *tables, total.numel, work, source, spec)


def _quantize(piece: Piece, spec: Format, out: Messages) -> None:
    place, fold = _placed(piece, spec)
    work, programs = _worked(out, place.numel)
    launch(quantize_tile, programs, _described(out, spec, place.numel), place, work, spec, fold, warps=fold.warps)


def _reduce(messages: Messages, spec: Format, piece: Piece, reduce: Reduce) -> None:
    place, fold = _placed(piece, spec)
    work, programs = _worked(messages, place.numel, reduce.factor)
    arguments = place, _described(messages, spec, place.numel), work, spec, fold, reduce.accumulate
    launch(reduce_tile, programs, *arguments, warps=fold.warps)


def _parts(pieces: Sequence[Piece], spec: Cast, messages: Messages) -> Iterator[tuple[Piece, Messages]]:
    """Each piece, and what messages of floats hold of it."""
    parts = messages.table.split([spec.nbytes(piece.numel) for piece in pieces], dim=-1)
    return ((piece, replace(messages, table=part)) for piece, part in zip(pieces, parts, strict=True) if piece.numel)


def _copy(pieces: Sequence[Piece], cast: Cast, room: Messages) -> None:
    """Pieces into the room for them, one launch each; where none of a piece's values exist the room is zero already."""
    for piece, values in _parts(pieces, cast, room):
        if piece.flat.numel():
            _quantize(piece, cast, values)


def _room(pieces: Sequence[Piece]) -> tuple[Piece, Cast, Messages]:
    """Room for several pieces side by side, as a block may begin in one and end in another; and as messages."""
    dtypes = {piece.flat.dtype for piece in pieces}
    name = next((name for name, dtype in DTYPES.items() if {dtype} == dtypes), "fp32")
    members, numel = pieces[0].members, total_numel(pieces)
    make = torch.empty if all(piece.flat.numel() for piece in pieces) else torch.zeros
    flat = make(members * numel, dtype=DTYPES[name], device=pieces[0].flat.device)
    copy = Piece(flat, 1, numel, numel, members, numel)
    return copy, Cast(name), to_members(flat.view(torch.uint8).view(members, -1))


def _placed(piece: Piece, spec: Format) -> tuple[Place, Fold]:
    flat = piece.rows == 1 or piece.stride == piece.columns == piece.width
    member_stride = piece.member_stride if piece.members > 1 else 0
    columns, present, stride = (0, piece.rows * piece.width, 0) if flat else (piece.columns, piece.width, piece.stride)
    group = 1 if columns % ALIGNED.value else ALIGNED.value
    even = not any(number % ALIGNED.value for number in (columns, stride, member_stride))
    fold = Fold(flat, not flat and columns < size_of(spec), group, 4 if even else 16)
    return Place(piece.flat, piece.numel, columns, present, stride, member_stride, piece.flat.numel()), fold


def _worked(messages: Messages, numel: int, factor: float = 1.0) -> tuple[Work, int]:
    """What is to be done, and by how many programs."""
    tiles, sources, members = -(-numel // TILE.value), messages.table.shape[0], messages.members
    skipped = members if messages.without_member is None else messages.without_member
    hole = sources if messages.without_source is None else messages.without_source
    numbers = tiles, skipped, sources - (hole < sources), hole
    work = Work._make([*(4 * number + 2 for number in numbers), factor])
    return work, tiles * (members - (skipped < members))


def _described(messages: Messages, spec: Format, numel: int) -> Table:
    """The messages as kernels take them.

    Raises:
        ValueError: if they begin where kernels cannot read or write them.
    """
    table = messages.table
    steps = [table.stride(i) if table.shape[i] > 1 else 0 for i in range(3)]
    unit = spec.bits // 8 if isinstance(spec, Cast) else ALIGNED.value
    if any(number % unit for number in (table.data_ptr(), *steps)):
        raise ValueError(f"{spec} messages must begin at multiples of {unit} bytes: {table.data_ptr():#x}, {steps}")
    planes = (0, 0) if isinstance(spec, Cast) else (spec.scales_offset(numel), spec.nbytes(numel))
    return Table(table, steps[0], steps[1], steps[2], table.shape[2], *planes)
