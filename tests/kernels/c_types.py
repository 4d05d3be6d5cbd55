# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The structures of `csrc/zt_kernels.h` for ctypes, and tensors as they say them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

from zero_topo.quant.operands import FLOATS, Change, Codes, Masters, Messages, Part, View
from zero_topo.quant.spec import Format


class CSpec(Structure):
    """``zt_wire_spec``."""

    _fields_ = [(name, c_int32) for name in ("bits", "block_size", "dtype")]


class CPiece(Structure):
    """``zt_piece``."""

    _fields_ = [
        ("data", c_void_p),
        *((name, c_int64) for name in ("rows", "columns", "present", "row_stride", "member_stride", "limit")),
        ("dtype", c_int32),
    ]


class CMessages(Structure):
    """``zt_messages``."""

    _fields_ = [
        ("data", c_void_p),
        ("nbytes", c_int64),
        *((name, c_int32) for name in ("sources", "members", "inner", "without_source", "without_member")),
        *((name, c_int64) for name in ("source_step", "outer_step", "inner_step")),
    ]


class CReduce(Structure):
    """``zt_reduce``."""

    _fields_ = [("factor", c_float), ("accumulate", c_int32)]


class CCodes(Structure):
    """``zt_codes``."""

    _fields_ = [
        ("held", c_void_p),
        ("nbytes", c_int64),
        ("slots", c_void_p),
        ("slot_of", c_void_p),
        ("columns", c_int64),
        ("count", c_int32),
        ("block", c_int32),
    ]


class CPart(Structure):
    """``zt_part``."""

    _fields_ = [(name, c_int64) for name in ("begin", "end", "rows", "members")]


class CMasters(Structure):
    """``zt_masters``."""

    _fields_ = [("data", c_void_p), *((name, c_int64) for name in ("row_stride", "columns", "first", "member"))]


class CChange(Structure):
    """``zt_change``."""

    _fields_ = [(name, c_void_p) for name in ("scales", "counts", "steps", "ends")]


class CAged(Structure):
    """``zt_aged``."""

    _fields_ = [
        *((name, c_void_p) for name in ("p", "g", "mean", "square", "age")),
        ("n", c_int64),
        ("table", c_void_p),
        *((name, c_float) for name in ("decay", "correction", "eps", "rate")),
    ]


def c_spec(spec: Format) -> CSpec:
    """The specification in C."""
    return CSpec(*spec.code)


def c_piece(p: View) -> CPiece:
    """A piece in C."""
    return CPiece(p.flat.data_ptr(), *p.shape, p.flat.numel(), FLOATS.index(p.flat.dtype))


def c_pieces(pieces: Sequence[View]) -> ctypes.Array[CPiece]:
    """The pieces in C."""
    return (CPiece * max(1, len(pieces)))(*map(c_piece, pieces))


def c_messages(messages: Messages) -> CMessages:
    """Messages in C."""
    (sources, outer, inner, nbytes), strides = messages.table.shape, messages.table.stride()
    without = messages.without_source, messages.without_member
    return CMessages(messages.table.data_ptr(), nbytes, sources, outer * inner, inner, *without, *strides[:3])


def c_codes(codes: Codes) -> CCodes:
    """Codes in C."""
    tables = codes.held.numel(), codes.slots.data_ptr(), codes.slot_of.data_ptr()
    return CCodes(codes.held.data_ptr(), *tables, len(codes.slot_of), len(codes.slots), codes.block)


def c_part(part: Part) -> CPart:
    """A part in C."""
    return CPart(part.begin, part.end, part.rows, part.members)


def c_masters(masters: Masters) -> CMasters:
    """Masters in C."""
    table = masters.table
    return CMasters(table.data_ptr(), table.stride(0), table.shape[1], masters.first, masters.member)


def c_change(change: Change) -> CChange:
    """A change in C."""
    return CChange(*(t.data_ptr() for t in (change.scales, change.counts, change.steps, change.ends)))
