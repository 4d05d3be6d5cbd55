# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the operations on INT8 codes take; Note [Codes] in ``code_ops.py`` says what the codes are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_topo.quant.spec import BlockSpec


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
