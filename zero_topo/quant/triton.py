# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Implements the operators on blocks in Triton: for GPUs without a compiler, and CPU tensors under
``TRITON_INTERPRET=1``. The reference serves all other operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zero_topo.quant.operands import DTYPES, Messages, View, to_members, total_numel, views_of
from zero_topo.quant.spec import Cast, Format, format_of
from zero_topo.quant.triton_blocks import (
    ALIGNED,
    TILE,
    Fold,
    Place,
    Table,
    Work,
    launch,
    programs_of,
    quantize_tile,
    reduce_tile,
    requantize_tile,
    size_of,
    table_of,
)


def quantize(
    flats: Sequence[Tensor],
    shapes: Sequence[int],
    code: Sequence[int],
    table: Tensor,
    without: int,
) -> None:
    """Quantize the concatenated views of each member into its message."""
    out = Messages(table, -1, without)
    views = views_of(flats, shapes, out.members)
    spec = format_of(code)
    if isinstance(spec, Cast):
        # Floats have no blocks: each view is one launch into its part of the messages.
        for view, values in _parts(views, spec, out):
            _quantize(view, spec, values)
    elif len(views) == 1:
        _quantize(views[0], spec, out)
    else:
        copy, cast, values = _room(views)
        _copy(views, cast, values)
        _quantize(copy, spec, out)


def dequantize_reduce(
    table: Tensor,
    without_source: int,
    without_member: int,
    code: Sequence[int],
    flats: Sequence[Tensor],
    shapes: Sequence[int],
    factor: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Write the sum of each member's messages to its views."""
    messages = Messages(table, without_source, without_member)
    views = views_of(flats, shapes, messages.members)
    spec = format_of(code)
    if isinstance(spec, Cast):
        for view, values in _parts(views, spec, messages):
            if view.flat.numel():
                _reduce(values, spec, view, factor, accumulate)
    elif len(views) == 1:
        _reduce(messages, spec, views[0], factor, accumulate)
    else:
        copy, cast, values = _room(views)
        if accumulate:
            _copy(views, cast, values)
        _reduce(messages, spec, copy, factor, accumulate)
        values = replace(values, without_member=without_member)
        for view, part in _parts(views, cast, values):
            if view.flat.numel():
                _reduce(part, cast, view)


def requantize(
    table: Tensor,
    without_source: int,
    source_code: Sequence[int],
    out: Tensor,
    without_member: int,
    code: Sequence[int],
    numel: int,
    factor: float = 1.0,
) -> None:
    """Quantize the sum of each member's messages into one message."""
    messages = Messages(table, without_source, without_member)
    work, programs = _worked(messages, numel, factor)
    source = format_of(source_code)
    spec = format_of(code)
    made = _described(Messages(out), spec, numel)
    read = _described(messages, source, numel)
    launch(requantize_tile, programs, made, read, numel, work, source, spec)


def _quantize(view: View, spec: Format, out: Messages) -> None:
    place, fold = _placed(view, spec)
    work, programs = _worked(out, place.numel)
    table = _described(out, spec, place.numel)
    launch(quantize_tile, programs, table, place, work, spec, fold, warps=fold.warps)


def _reduce(
    messages: Messages,
    spec: Format,
    view: View,
    factor: float = 1.0,
    accumulate: bool = False,
) -> None:
    place, fold = _placed(view, spec)
    work, programs = _worked(messages, place.numel, factor)
    table = _described(messages, spec, place.numel)
    arguments = place, table, work, spec, fold, accumulate
    launch(reduce_tile, programs, *arguments, warps=fold.warps)


def _parts(
    views: Sequence[View],
    spec: Cast,
    messages: Messages,
) -> Iterator[tuple[View, Messages]]:
    """Return each view with its part of messages that hold floats."""
    sizes = [spec.nbytes(view.numel) for view in views]
    parts = messages.table.split(sizes, dim=-1)
    return (
        (view, replace(messages, table=part))
        for view, part in zip(views, parts, strict=True)
        if view.numel
    )


def _copy(views: Sequence[View], cast: Cast, room: Messages) -> None:
    """Copy views into their buffers, one launch each; the buffer of a view without elements is zero
    already.
    """
    for view, values in _parts(views, cast, room):
        if view.flat.numel():
            _quantize(view, cast, values)


def _room(views: Sequence[View]) -> tuple[View, Cast, Messages]:
    """Allocate a buffer for the concatenated views, since a block may span two; return it as a view
    and as messages.
    """
    dtypes = {view.flat.dtype for view in views}
    name = next((name for name, dtype in DTYPES.items() if {dtype} == dtypes), "fp32")
    members = views[0].members
    numel = total_numel(views)
    flat = torch.empty(members * numel, dtype=DTYPES[name], device=views[0].flat.device)
    if not all(view.flat.numel() for view in views):
        flat.zero_()
    # The buffer is one flat row for each member.
    copy = View(flat, 1, numel, numel, members, numel)
    return copy, Cast(name), to_members(flat.view(torch.uint8).view(members, -1))


def _placed(view: View, spec: Format) -> tuple[Place, Fold]:
    flat = view.rows == 1 or view.stride == view.columns == view.width
    member_stride = view.member_stride if view.members > 1 else 0
    columns = view.columns
    present = view.width
    stride = view.stride
    if flat:
        columns = 0
        present *= view.rows
        stride = 0
    # Values that are adjacent in memory whatever the row: one address serves a group.
    group = 1 if columns % ALIGNED.value else ALIGNED.value
    even = not any(number % ALIGNED.value for number in (columns, stride, member_stride))
    limit = view.flat.numel()
    place = Place(view.flat, view.numel, columns, present, stride, member_stride, limit)
    narrow = not flat and columns < size_of(spec)
    return place, Fold(flat, narrow, group, 4 if even else 16)


def _worked(messages: Messages, numel: int, factor: float = 1.0) -> tuple[Work, int]:
    """Return the arguments of a launch, and its number of programs."""
    tiles = -(-numel // TILE.value)
    sources = messages.table.shape[0]
    skipped, programs = programs_of(messages, tiles)
    hole = sources if messages.without_source < 0 else messages.without_source
    numbers = tiles, skipped, sources - (hole < sources), hole
    # Such numbers are neither 1 nor multiples of 16, for which Triton would compile again.
    return Work._make([*(4 * number + 2 for number in numbers), factor]), programs


def _described(messages: Messages, spec: Format, numel: int) -> Table:
    """Return the messages as kernels take them."""
    if isinstance(spec, Cast):
        return table_of(messages.table, spec.bits // 8, spec)
    planes = spec.scales_offset(numel), spec.nbytes(numel)
    return table_of(messages.table, ALIGNED.value, spec, *planes)
