# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Block quantization: arguments are checked here, then torch calls the backend that serves their device.

All functions take any number of members at once, in one launch: what goes to, or came from, each rank of a group.
Values are FP32, FP16 or BF16, a tensor or pieces (``pieces.py``). Tables of messages are uint8, the bytes of
each message adjacent.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from zero_topo.quant.messages import from_sources
from zero_topo.quant.operators import OPS
from zero_topo.quant.pieces import Pieces, described
from zero_topo.quant.spec import ALIGNMENT, BlockSpec, Format, Reduce, Total

PLAIN = Reduce()
Target = TypeVar("Target", bound=Pieces)


def quantize(x: Pieces, spec: Format, out: Tensor | None = None, without: int | None = None) -> Tensor:
    """Quantize values into one message for each member; returns ``out``.

    Args:
        x: a tensor's elements are taken in row-major order; one of three dimensions is ``[members, rows, columns]``.
        spec: bits and block size, or a float's type.
        out: ``[nbytes]``, ``[members, nbytes]`` or ``[outer, inner, nbytes]`` with ``nbytes = spec.nbytes(numel)``;
            allocated if None.
        without: a member whose message is not written.

    Raises:
        ValueError: if ``out`` has the wrong size, or the pieces have different members.
    """
    flats, shapes, members, numel = described(x)
    nbytes = spec.nbytes(numel)
    if out is None:
        out = torch.empty([nbytes] if members == 1 else [members, nbytes], dtype=torch.uint8, device=flats[0].device)
    table = out[(None,) * (4 - out.dim())]
    _check(table, spec, numel, nbytes, members)
    if numel and members:
        OPS.quantize.default(flats, shapes, spec.code, table, -1 if without is None else without)
    return out


def dequantize(
    messages: Tensor, spec: Format, out: Target, reduce: Reduce = PLAIN, without: int | None = None
) -> Target:
    """Dequantize one message of each member into ``out``, and return it.

    Args:
        messages: shaped as ``out`` of :func:`quantize`.
        spec: their format.
        out: takes the values.
        reduce: factor and accumulation.
        without: a member whose message is not read.

    Raises:
        ValueError: if a message does not hold as many values of this format as there is room for.
    """
    return _reduced(messages[(None,) * (4 - messages.dim())], spec, out, reduce, None, without)


def dequantize_reduce(
    messages: Tensor, spec: Format, out: Target, reduce: Reduce = PLAIN, without: int | None = None
) -> Target:
    """Sum the dequantized messages into ``out``, in the order given, and return it.

    Args:
        messages: ``[sources, nbytes]``, or ``[sources, members, nbytes]``.
        spec: their format.
        out: takes the sum; the sum itself is FP32, rounded once when it is written.
        reduce: factor and accumulation.
        without: a source whose messages are left out.

    Raises:
        ValueError: for no message, or one of the wrong size.
    """
    return _reduced(from_sources(messages).table, spec, out, reduce, without, None)


def requantize(messages: Tensor, source: Format, spec: Format, out: Tensor, total: Total) -> Tensor:
    """Sum the dequantized messages and quantize the sum, without a detour through memory; returns ``out``.

    Args:
        messages: ``[sources, nbytes]`` or ``[sources, members, nbytes]``, each of ``total.numel`` values.
        source: their format.
        spec: the format of ``out``; its block size is that of ``source``.
        out: ``[spec.nbytes(total.numel)]``, or ``[members, ...]``.
        total: number of values, and a factor for the sum.

    Raises:
        ValueError: for no message, one of the wrong size, or formats whose blocks differ.
    """
    blocks = isinstance(source, BlockSpec) and isinstance(spec, BlockSpec) and source.block_size == spec.block_size
    if not blocks and source != spec:
        raise ValueError(f"cannot requantize {source} to {spec}: the block size must stay")
    sums, table, numel = from_sources(messages).table, out[(None,) * (4 - out.dim())], total.numel
    members = table.shape[1] * table.shape[2]
    _check(sums, source, numel, source.nbytes(numel), members)
    _check(table, spec, numel, spec.nbytes(numel), members)
    if numel and members:
        OPS.requantize.default(sums, -1, source.code, table, -1, spec.code, numel, total.factor)
    return out


def _reduced(
    table: Tensor, spec: Format, out: Target, reduce: Reduce, source: int | None, member: int | None
) -> Target:
    flats, shapes, members, numel = described(out)
    without_source, without_member = -1 if source is None else source, -1 if member is None else member
    _check(table, spec, numel, spec.nbytes(numel), members, without_source)
    if numel and members:
        arguments = flats, shapes, reduce.factor, reduce.accumulate
        OPS.dequantize_reduce.default(table, without_source, without_member, spec.code, *arguments)
    return out


def _check(table: Tensor, spec: Format, numel: int, nbytes: int, members: int, without_source: int = -1) -> None:
    """Refuse a table that does not hold ``numel`` values of a format for each of the members."""
    sources, outer, inner, size = table.shape
    if sources <= (without_source >= 0):
        raise ValueError("nothing to reduce: give at least one message")
    if outer * inner != members:
        raise ValueError(f"{outer * inner} messages are not one for each of {members} members")
    if size != nbytes or table.dtype != torch.uint8 or (size > 1 and table.stride(3) != 1):
        raise ValueError(
            f"a {spec} message of {numel} values is {nbytes} contiguous bytes of uint8 (a multiple of {ALIGNMENT} if "
            f"quantized), not {size} of {table.dtype}"
        )
