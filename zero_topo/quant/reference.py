# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The arithmetic contract in plain torch: the oracle every other backend equals bit for bit.

Note [Arithmetic contract]
    ``absmax`` of a block: if it is Inf or NaN, scale = NaN and q = 0, so overflow detection still fires
    after dequantization; if it is below 2**-100, scale = 0 and q = 0; else ``scale = absmax / L``,
    ``inv = L / absmax``, ``q = clamp(round_half_even(x * inv), -L, L)``. Divisions are correctly rounded: two tensors
    are divided, never a Python scalar by a tensor. Dequantized value: ``q * scale`` in FP32, one rounding to the output
    type. Reduction: FP32 accumulator, sources in rank order, one rounding per product and per sum, no FMA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_topo.quant.code_reference import codes_apply, codes_assess, codes_emit  # noqa: F401  (of the backend)
from zero_topo.quant.messages import Messages
from zero_topo.quant.pieces import DTYPES, Piece, read_all, total_numel, write_all
from zero_topo.quant.sparse_reference import (  # noqa: F401
    compact_above,
    count_above,
    mask_pack,
    mask_unpack,
    row_largest,
    sketch_insert,
    sketch_peel,
)
from zero_topo.quant.spec import BlockSpec, Cast, Format, Reduce, Total

SMALLEST = 2.0**-100


def quantize(pieces: Sequence[Piece], spec: Format, out: Messages) -> None:
    """Quantize the concatenated pieces of each member into its wire message."""
    for member in out.kept():
        _encode(read_all([piece.member(member) for piece in pieces])[0], spec, *out.of(member))


def dequantize_reduce(messages: Messages, spec: Format, pieces: Sequence[Piece], reduce: Reduce) -> None:
    """Sum of each member's dequantized messages, in order of the sources, into its pieces; see :class:`Reduce`."""
    for member in messages.kept():
        own = [piece.member(member) for piece in pieces]
        total = _sum(messages.of(member), spec, Total(total_numel(own), reduce.factor))
        write_all((read_all(own).add_(total) if reduce.accumulate else total[None]), own)


def requantize(messages: Messages, source: Format, spec: Format, out: Messages, total: Total) -> None:
    """Sum of each member's dequantized messages, quantized again into one message."""
    for member in out.kept():
        _encode(_sum(messages.of(member), source, total), spec, *out.of(member))


def _sum(messages: Sequence[Tensor], spec: Format, wanted: Total) -> Tensor:
    total = _values(messages[0], wanted.numel, spec)
    for message in messages[1:]:
        total.add_(_values(message, wanted.numel, spec))
    return total if wanted.factor == 1 else total.mul_(torch.tensor(wanted.factor, dtype=torch.float32).item())


def _encode(x: Tensor, spec: Format, out: Tensor) -> None:
    if isinstance(spec, Cast):
        out.copy_(x.to(DTYPES[spec.dtype]).view(torch.uint8))
        return
    numel = x.numel()
    q, scale = _quantized(_blocks(x, spec), spec)
    values_end = spec.blocks(numel) * spec.block_bytes
    out[:values_end].copy_(_pack(q, spec.bits))
    _clear_padding(out, values_end, spec.scales_offset(numel))
    _floats(out, spec.scales_offset(numel), spec.blocks(numel)).copy_(scale)
    _clear_padding(out, spec.scales_offset(numel) + 4 * spec.blocks(numel), out.numel())


def _blocks(x: Tensor, spec: BlockSpec) -> Tensor:
    blocks = x.new_zeros(spec.blocks(x.numel()) * spec.block_size)
    blocks[: x.numel()].copy_(x)
    return blocks.view(-1, spec.block_size)


def _quantized(blocks: Tensor, spec: BlockSpec) -> tuple[Tensor, Tensor]:
    absmax = blocks.abs().amax(dim=1)
    levels = torch.full_like(absmax, spec.levels)
    bad, tiny = ~torch.isfinite(absmax), absmax < SMALLEST
    scale = (absmax / levels).masked_fill_(tiny, 0.0).masked_fill_(bad, torch.nan)
    inverse = (levels / absmax).masked_fill_(tiny, 0.0)
    q = blocks.mul_(inverse[:, None]).round_().clamp_(-spec.levels, spec.levels)
    return q.masked_fill_(bad[:, None], 0.0).to(torch.int8), scale


def _pack(q: Tensor, bits: int) -> Tensor:
    flat = q.view(-1)
    if bits == 8:
        return flat.view(torch.uint8)
    pairs = flat.view(torch.uint8).view(-1, 2)
    return (pairs[:, 0] & 0xF) | (pairs[:, 1] << 4)


def _unpack(values: Tensor, bits: int) -> Tensor:
    signed = values.view(torch.int8)
    if bits == 8:
        return signed.to(torch.float32)
    out = torch.empty(values.numel(), 2, dtype=torch.float32, device=values.device)
    out[:, 0] = (signed << 4) >> 4
    out[:, 1] = signed >> 4
    return out.view(-1)


def _values(message: Tensor, numel: int, spec: Format) -> Tensor:
    if isinstance(spec, Cast):
        return message.clone().view(DTYPES[spec.dtype]).to(torch.float32)
    blocks = spec.blocks(numel)
    q = _unpack(message[: blocks * spec.block_bytes], spec.bits).view(blocks, spec.block_size)
    scale = _floats(message, spec.scales_offset(numel), blocks)
    return q.mul_(scale[:, None]).view(-1)[:numel]


def _floats(message: Tensor, offset: int, count: int) -> Tensor:
    return message[offset : offset + 4 * count].view(torch.float32)


def _clear_padding(out: Tensor, begin: int, end: int) -> None:
    if end > begin:
        out[begin:end].zero_()
