# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Weights that are held as INT8 codes and block scales, and the messages that carry their changes.

Note [Codes]
    The codes of a block are ``clamp(round_half_even(x * (1 / scale)), -127, 127)`` of its FP32 masters ``x``, in the
    owner's copy and in every other, after every publish. ``top`` being the largest ``|x|`` of a block, its scale stays
    while ``90 * scale <= top <= 127.49 * scale`` and ``top`` is finite; else it becomes ``(top * 1.0625) / 127``, and
    the block escapes. A ``top`` below 2**-100 has scale 0 and codes 0; one that is NaN, or whose scale would not be
    finite, has scale NaN and codes 0, so that gathered weights show it. Every step is one FP32 operation, correctly
    rounded. A block that does not escape goes one step towards these codes at most, by the digits that are sent: all
    copies stay equal even if a master is edited between :meth:`CodeOps.assess` and :meth:`CodeOps.emit`. So blocks
    change their scales rarely, and a code changes only when its weight has moved by about a whole code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zero_topo.quant.messages import Messages
from zero_topo.quant.sparse_ops import SparseOps
from zero_topo.quant.spec import BlockSpec
from zero_topo.quant.trits import CHUNK, TritSpec


@dataclass(frozen=True)
class Codes:
    """Codes and scales of some parameters ("slots"), as a gather sends them.

    A slot of ``rows`` rows of ``blocks`` blocks lies in ``held`` as one INT8 message of the wire format
    (:class:`~zero_topo.quant.spec.BlockSpec`): the codes of all rows, then their scales. Blocks never cross rows.

    Attributes:
        held: uint8, 1-D.
        slots: int64 ``[slots, 6]``, on the device: bytes at which a slot's codes and scales begin, blocks of a row, the
            first of its block columns, its first column in the table of masters, its columns.
        slot_of: int32 ``[block columns]``, on the device: the slot of each block column.
        block: values of a block.
    """

    held: Tensor
    slots: Tensor
    slot_of: Tensor
    block: int

    @classmethod
    def build(cls, columns: Sequence[tuple[int, int]], rows: int, block: int, device: torch.device) -> Codes:
        """Codes of zeros.

        Args:
            columns: of each slot: its first column in the table of masters, and how many it has.
            rows: of the shard.
            block: values of a block.
            device: where they are.
        """
        wire, at, before = BlockSpec(8, block), 0, 0
        slots, slot_of = [], []
        for index, (first, width) in enumerate(columns):
            blocks = wire.blocks(width)
            numel = rows * blocks * block
            slots.append((at, at + wire.scales_offset(numel), blocks, before, first, width))
            slot_of += [index] * blocks
            at, before = at + wire.nbytes(numel), before + blocks
        held = torch.zeros(at, dtype=torch.uint8, device=device)
        table = torch.tensor(slots, dtype=torch.int64, device=device).view(-1, 6)
        return cls(held, table, torch.tensor(slot_of, dtype=torch.int32, device=device), block)


@dataclass(frozen=True)
class Part:
    """Blocks of which one message speaks: those of some block columns, row by row.

    Attributes:
        begin, end: block columns.
        rows: rows of one member.
        members: members of the hop; row ``r`` of member ``m`` is row ``m + r * members`` of the shard.
    """

    begin: int
    end: int
    rows: int
    members: int

    @property
    def blocks(self) -> int:
        """Blocks of a message."""
        return self.rows * (self.end - self.begin)


@dataclass(frozen=True)
class Masters:
    """FP32 masters of one member's rows.

    Attributes:
        table: ``[rows, columns]``, columns adjacent.
        first: the column of :attr:`Codes.slots` that its first column is.
        member: whose rows.
    """

    table: Tensor
    first: int
    member: int


class CodeBackend(Protocol):
    """What a backend implements; see Note [Codes]. Arguments are checked, and on one device that it serves."""

    def codes_assess(self, masters: Masters, codes: Codes, part: Part, scales: Tensor, escaped: Tensor) -> None:
        """Each block's scale from now on (FP32 ``[blocks]``), and whether it escapes (bool ``[blocks]``)."""

    def codes_emit(self, masters: Masters, codes: Codes, part: Part, change: Change, message: Tensor) -> None:
        """Bring codes and scales up to date, and write scales, codes and trits of the message."""

    def codes_apply(self, messages: Messages, codes: Codes, part: Part) -> None:
        """Bring the rows of all members but the one left out up to date."""


@dataclass(frozen=True)
class Change:
    """What a publish is about to do to the codes of a part.

    Attributes:
        scales: FP32 ``[blocks]``: each block's from now on.
        escaped: bool ``[blocks]``.
        order: int64 ``[blocks]``: the blocks that do not escape, then those that do, each ascending.
        count: int64 ``[1]``: how many escape.
    """

    scales: Tensor
    escaped: Tensor
    order: Tensor
    count: Tensor


class CodeOps:
    """The operations by one backend; each is of all members of a hop at once."""

    def __init__(self, backend: CodeBackend, sparse: SparseOps) -> None:
        self._backend, self._sparse = backend, sparse

    def assess(self, masters: Masters, codes: Codes, part: Part) -> Change:
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
        self._backend.codes_assess(masters, codes, part, scales, escaped)
        order = escaped.sort(stable=True).indices
        return Change(scales, escaped, order, escaped.sum(dtype=torch.int64).view(1))

    def emit(self, masters: Masters, codes: Codes, part: Part, change: Change, nbytes: int) -> Tensor:
        """Change the codes of the masters' rows, and say it in a message.

        Args:
            masters: as for :meth:`assess`.
            codes: changed.
            part: as there.
            change: of :meth:`assess`.
            nbytes: bytes of the message, at least those of :class:`~zero_topo.quant.trits.TritSpec`.

        Returns:
            uint8 ``[nbytes]``.
        """
        spec, blocks = TritSpec(codes.block), part.blocks
        message = torch.empty(nbytes, dtype=torch.uint8, device=codes.held.device)
        message[:4].copy_(change.count.to(torch.int32).view(torch.uint8))
        chunks = torch.zeros(-(-blocks // CHUNK), CHUNK, dtype=torch.bool, device=message.device)
        chunks.view(-1)[:blocks].copy_(change.escaped)
        message[128 : 128 + chunks.numel() // 8].copy_(self._sparse.pack(chunks.view(-1)))
        inside = chunks.sum(1, dtype=torch.int32)
        before = inside.cumsum(0, dtype=torch.int32).sub_(inside).view(torch.uint8)
        at = spec.before_offset(blocks)
        message[at : at + before.numel()].copy_(before)
        self._backend.codes_emit(masters, codes, part, change, message)
        return message

    def apply(self, messages: Tensor, codes: Codes, part: Part, without: int) -> None:
        """Change the codes of all members' rows as their messages say.

        Args:
            messages: uint8 ``[outer, inner, nbytes]``, one of each member.
            codes: changed.
            part: the blocks of each message.
            without: a member whose rows are up to date.
        """
        table = Messages(messages[None], without_member=without)
        if table.members != part.members:
            raise ValueError(f"{table.members} messages are not one for each of {part.members} members")
        self._backend.codes_apply(table, codes, part)


def _check(masters: Masters, part: Part) -> None:
    table = masters.table
    if table.dtype != torch.float32 or table.dim() != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(f"masters are FP32 rows of adjacent columns, not {table.dtype} {tuple(table.shape)}")
    if table.shape[0] != part.rows or not 0 <= masters.member < part.members:
        raise ValueError(f"{table.shape[0]} rows of member {masters.member} are not {part.rows} of {part.members}")
