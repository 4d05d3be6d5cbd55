# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Codes in plain torch: the oracle that every other backend equals bit for bit; Note [Codes] in ``code_ops.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_topo.quant.codes import Change, Codes, Masters, Part
from zero_topo.quant.messages import Messages
from zero_topo.quant.trits import CHUNK, GROUP, HEADROOM, KEPT_FROM, KEPT_TO, TritSpec

SMALLEST = 2.0**-100
LEVELS = 127


def codes_assess(masters: Masters, codes: Codes, part: Part, scales: Tensor, escaped: Tensor) -> None:
    """Each block's scale from now on, and whether it escapes."""
    x = _values(masters, codes, part)
    old_codes, old = _held(codes, part, masters.member)
    scales.copy_(scales_from_now(x.abs().amax(1), old))
    moved = (_codes(x, scales) - old_codes).abs_().amax(1) > 1
    escaped.copy_(moved | (scales.view(torch.int32) != old.view(torch.int32)))


def scales_from_now(top: Tensor, old: Tensor) -> Tensor:
    """Scales of blocks whose largest ``|x|`` and scales so far are given, FP32 each."""
    fresh = (top * HEADROOM).div_(torch.full_like(top, LEVELS))
    fresh = fresh.masked_fill_(top < SMALLEST, 0.0).masked_fill_(~torch.isfinite(fresh), torch.nan)
    fits = (top >= old * KEPT_FROM) & (top <= old * KEPT_TO) & torch.isfinite(top)  # the product may be Inf
    kept = (old > 0) & fits
    return torch.where(kept, old, fresh)


def codes_emit(masters: Masters, codes: Codes, part: Part, change: Change, message: Tensor) -> None:
    """Bring codes and scales up to date, and write scales, codes and trits of the message."""
    spec, n, block = TritSpec(codes.block), part.blocks, codes.block
    new, old = _codes(_values(masters, codes, part), change.scales), _held(codes, part, masters.member)[0]
    changes = (new - old).clamp_(-1, 1).nan_to_num_(0.0)
    count = int(change.count)
    kept, whole = change.order[: n - count], change.order[n - count :]
    new[kept] = old[kept] + changes[kept]
    at = spec.scales_offset(n)
    message[at : at + 4 * count].copy_(change.scales[whole].view(torch.uint8))
    at = spec.codes_offset(n, count)
    message[at : at + block * count].copy_(new[whole].to(torch.int8).view(torch.uint8).view(-1))
    digits = changes.new_zeros(-(-(n - count) // GROUP) * GROUP, block)
    digits[: n - count] = changes[kept] + 1
    packed = (digits.view(-1, GROUP, block) * _powers(message.device)[:, None]).sum(1)
    at = spec.trits_offset(n, count)
    message[at : at + packed.numel()].copy_(packed.to(torch.uint8).view(-1))
    _store(codes, part, masters.member, new, change.scales)


def codes_apply(messages: Messages, codes: Codes, part: Part) -> None:
    """Bring the rows of all members but the one left out up to date."""
    for member in messages.kept():
        old, scales = _held(codes, part, member)
        _store(codes, part, member, *_decoded(messages.of(member)[0], codes.block, old, scales))


def _decoded(message: Tensor, block: int, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    spec, n = TritSpec(block), len(codes)
    count = int(message[:4].view(torch.int32))
    bits = message[128 : 128 + -(-n // CHUNK) * CHUNK // 8]
    shifts = torch.arange(8, device=message.device)
    escaped = (bits[:, None] >> shifts & 1).view(-1)[:n].bool()
    at = spec.trits_offset(n, count)
    groups = -(-(n - count) // GROUP)
    packed = message[at : at + groups * block].view(groups, 1, block).to(torch.int32)
    digits = packed.div(_powers(message.device)[:, None], rounding_mode="floor") % 3
    codes[~escaped] += digits.view(-1, block)[: n - count] - 1
    at = spec.codes_offset(n, count)
    codes[escaped] = message[at : at + count * block].view(torch.int8).to(torch.float32).view(count, block)
    at = spec.scales_offset(n)
    scales[escaped] = message[at : at + 4 * count].view(torch.float32)
    return codes, scales


def _powers(device: torch.device) -> Tensor:
    return 3 ** torch.arange(GROUP, dtype=torch.int32, device=device)


def _codes(x: Tensor, scales: Tensor) -> Tensor:
    """FP32 ``[blocks, block]`` and their scales -> codes, as FP32."""
    usable = (scales > 0)[:, None]  # neither 0 nor NaN
    inverse = torch.ones_like(scales).div_(scales)[:, None]
    return torch.where(usable, x * inverse, 0.0).round_().clamp_(-LEVELS, LEVELS)


def _columns(codes: Codes, part: Part) -> tuple[Tensor, ...]:
    """Of each block column: the six numbers of its slot, and which of the slot's columns it is."""
    slot = codes.slots[codes.slot_of[part.begin : part.end].long()]
    here = torch.arange(part.begin, part.end, device=slot.device) - slot[:, 3]
    return (*slot.unbind(1), here)


def _places(codes: Codes, part: Part, member: int) -> tuple[Tensor, Tensor]:
    """Bytes at which each block's codes and scale are."""
    codes_at, scales_at, blocks, *_, here = _columns(codes, part)
    rows = torch.arange(member, part.rows * part.members, part.members, device=here.device)[:, None]
    index = (rows * blocks + here).view(-1)
    repeat = (part.rows,)
    return codes_at.repeat(repeat) + index * codes.block, scales_at.repeat(repeat) + index * 4


def _held(codes: Codes, part: Part, member: int) -> tuple[Tensor, Tensor]:
    """Codes as FP32 ``[blocks, block]``, and scales: copies."""
    codes_at, scales_at = _places(codes, part, member)
    found = codes.held[codes_at[:, None] + torch.arange(codes.block, device=codes_at.device)]
    return found.view(torch.int8).to(torch.float32), codes.held.view(torch.float32)[scales_at // 4]


def _store(codes: Codes, part: Part, member: int, new: Tensor, scales: Tensor) -> None:
    codes_at, scales_at = _places(codes, part, member)
    index = codes_at[:, None] + torch.arange(codes.block, device=codes_at.device)
    codes.held[index] = new.to(torch.int8).view(torch.uint8)
    codes.held.view(torch.float32)[scales_at // 4] = scales


def _values(masters: Masters, codes: Codes, part: Part) -> Tensor:
    """FP32 ``[blocks, block]``, zero beyond a slot's columns."""
    _, _, _, _, first, width, here = _columns(codes, part)
    inside = here[:, None] * codes.block + torch.arange(codes.block, device=here.device)
    exists = inside < width[:, None]
    index = torch.where(exists, first[:, None] + inside - masters.first, 0)
    return torch.where(exists, masters.table[:, index], 0.0).view(part.blocks, codes.block)
