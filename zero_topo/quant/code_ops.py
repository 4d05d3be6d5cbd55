# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Weights that are held as INT8 codes and block scales, and the messages that carry their changes.

Note [Codes]
    The codes of a block are ``clamp(round_half_even(x * (1 / scale)), -127, 127)`` of its FP32 masters ``x``, in the
    owner's copy and in every other, after every publish. ``top`` being the largest ``|x|`` of a block, its scale stays
    while ``90 * scale <= top <= 127.49 * scale`` and ``top`` is finite; else it becomes ``(top * 1.0625) / 127``, and
    the block escapes. A ``top`` below 2**-100 has scale 0 and codes 0; one that is NaN, or whose scale would not be
    finite, has scale NaN and codes 0, so that gathered weights show it. Every step is one FP32 operation, correctly
    rounded. A block that does not escape goes one step towards these codes at most, by the digits that are sent: all
    copies stay equal even if a master is edited between :func:`assess` and :func:`emit`. So blocks
    change their scales rarely, and a code changes only when its weight has moved by about a whole code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_topo.quant.codes import Change, Codes, Masters, Part
from zero_topo.quant.operators import OPS
from zero_topo.quant.sparse_ops import pack
from zero_topo.quant.trits import CHUNK, TritSpec


def assess(masters: Masters, codes: Codes, part: Part) -> Change:
    """What publishing these masters would change; nothing is changed yet.

    Args:
        masters: of a member's rows.
        codes: all that is held.
        part: the blocks.
    """
    _check(masters, part)
    device = codes.held.device
    scales = torch.empty(part.blocks, dtype=torch.float32, device=device)
    escaped = torch.empty(part.blocks, dtype=torch.bool, device=device)
    OPS.codes_assess.default(*_own(masters), *_held(codes, part), scales, escaped)
    order = escaped.sort(stable=True).indices
    return Change(scales, escaped, order, escaped.sum(dtype=torch.int64).view(1))


def emit(masters: Masters, codes: Codes, part: Part, change: Change, nbytes: int) -> Tensor:
    """Change the codes of the masters' rows, and say it in a message.

    Args:
        masters: as for :func:`assess`.
        codes: changed.
        part: as there.
        change: of :func:`assess`.
        nbytes: bytes of the message, at least those of :class:`~zero_topo.quant.trits.TritSpec`.

    Returns:
        uint8 ``[nbytes]``.
    """
    spec, blocks = TritSpec(codes.block), part.blocks
    message = torch.empty(nbytes, dtype=torch.uint8, device=codes.held.device)
    message[:4].copy_(change.count.to(torch.int32).view(torch.uint8))
    chunks = torch.zeros(-(-blocks // CHUNK), CHUNK, dtype=torch.bool, device=message.device)
    chunks.view(-1)[:blocks].copy_(change.escaped)
    message[128 : 128 + chunks.numel() // 8].copy_(pack(chunks.view(-1)))
    inside = chunks.sum(1, dtype=torch.int32)
    before = inside.cumsum(0, dtype=torch.int32).sub_(inside).view(torch.uint8)
    at = spec.before_offset(blocks)
    message[at : at + before.numel()].copy_(before)
    OPS.codes_emit.default(*_own(masters), *_held(codes, part), change.scales, change.order, change.count, message)
    return message


def apply(messages: Tensor, codes: Codes, part: Part, without: int) -> None:
    """Change the codes of all members' rows as their messages say.

    Args:
        messages: uint8 ``[outer, inner, nbytes]``, one of each member.
        codes: changed.
        part: the blocks of each message.
        without: a member whose rows are up to date, -1 for none.
    """
    if messages.shape[0] * messages.shape[1] != part.members:
        raise ValueError(f"messages {tuple(messages.shape)} are not one for each of {part.members} members")
    OPS.codes_apply.default(messages[None], without, *_held(codes, part))


def _check(masters: Masters, part: Part) -> None:
    table = masters.table
    if table.dtype != torch.float32 or table.dim() != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(f"masters are FP32 rows of adjacent columns, not {table.dtype} {tuple(table.shape)}")
    if table.shape[0] != part.rows or not 0 <= masters.member < part.members:
        raise ValueError(f"{table.shape[0]} rows of member {masters.member} are not {part.rows} of {part.members}")


def _own(masters: Masters) -> tuple[Tensor, list[int]]:
    return masters.table, [masters.first, masters.member]


def _held(codes: Codes, part: Part) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    numbers = [codes.block, part.begin, part.end, part.rows, part.members]
    return codes.held, codes.slots, codes.slot_of, numbers
