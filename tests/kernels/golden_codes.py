# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What every backend of codes passes: the reference's bits in all that is stored and in every byte
of a message.

A backend is an `Operators`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tests.kernels.golden import assert_equal, both, same, untouched
from tests.kernels.operators import REFERENCE, Operators, serving
from zero_topo.quant import ops, reference
from zero_topo.quant.operands import Change, Codes, Masters, Messages
from zero_topo.quant.spec import BLOCK_SIZES, LARGE, WHOLE, ChangeSpec

FILLING = 0xA5
TIE = 2.0**-10
"""The scale of most blocks: codes and a half are exact."""
SCALES = torch.tensor([*[TIE] * 12, 0.02, 0.0, torch.nan, 2.677e36])
"""Of the last one, the product with the largest value that would fit is Inf."""
LEAVING = [(2, 0), (0.7, 0), (0, 0), (1e-38, 0), (0, 2.0**-100 * 1.01), (0, 2.0**-101)]
LEAVING += [(1, top) for top in (torch.nan, torch.inf, -torch.inf, 3.3e38, 3e38)]
"""Factors of blocks that are sent whole, and their first value if it is another."""


@dataclass(frozen=True)
class Layout:
    """Where codes and masters lie, and of which blocks the messages speak.

    Attributes:
        block: values of a block.
        widths: columns of each parameter; three lie between two parameters.
        cut: block columns at either end that are not sent.
        rows: of one member.
        members: outer and inner.
        without: a member that is left out.
    """

    block: int
    widths: tuple[int, ...]
    cut: int = 0
    rows: int = 1
    members: tuple[int, int] = (1, 1)
    without: int = -1


def ragged(block: int) -> Layout:
    """Several parameters of any widths, of two by three members; not all block columns."""
    widths = 3 * block + 5, block, 2 * block + 1, 1, 4 * block - 1, block
    return Layout(block, widths, 1, 3, (2, 3), 4)


def single(blocks: int, block: int = 64) -> Layout:
    """So many blocks of one parameter and one row."""
    return Layout(block, (blocks * block,))


RAGGED = [ragged(block) for block in BLOCK_SIZES]
SINGLE = [single(n) for n in (1, 4, 5, 6, 11, 63, 64, 65, 69, 128, 321)]


class Case(NamedTuple):
    """Codes, the masters of each member, and where they lie."""

    codes: Codes
    masters: list[Masters]
    layout: Layout

    def change(self, member: int = 0) -> Change:
        """What changes in a member's codes."""
        return assessed(REFERENCE, self.masters[member], self.codes)


def case(layout: Layout, leave: float = 0.4, seed: int = 0) -> Case:
    """Codes of any bits, and masters by which any number of them changes by any amount.

    Only the columns of the part's parameters exist, rows apart, at an odd address, with NaN between
    blocks.
    """
    torch.manual_seed(seed)
    block, count = layout.block, math.prod(layout.members)
    columns, first = [], 7
    for width in layout.widths:
        columns.append((first, width))
        first += width + 3
    codes = Codes.build(columns, layout.rows * count, block, torch.device("cpu"))
    codes.stored.fill_(FILLING)
    end = codes.param_index_of.numel() - layout.cut
    codes = codes.part(layout.cut, end, layout.rows, count)
    *_, firsts, widths, here = reference._columns(codes)
    inside = here[:, None] * block + torch.arange(block)
    exists = inside < widths[:, None]
    begin, past = int(firsts.min()), int((firsts + widths).max())
    masters = []
    for member in range(count):
        old = torch.randint(-80, 81, (codes.blocks, block)) * exists.repeat(layout.rows, 1)
        old[:, 0] = torch.randint(88, 128, (codes.blocks,))
        scales = SCALES[torch.randint(0, len(SCALES), (codes.blocks,))]
        reference._store(codes, reference._places(codes, member), old, scales)
        x = moved(old, scales, leave).view(layout.rows, -1, block)
        flat = torch.full((3 + layout.rows * (past - begin + 5),), torch.nan)
        table = flat[3:].view(layout.rows, -1)[:, : past - begin]
        table[:, (firsts[:, None] + inside - begin)[exists]] = x[:, exists]
        masters.append(Masters(table, begin, member))
    return Case(codes, masters, layout)


def moved(old: Tensor, scales: Tensor, leave: float) -> Tensor:
    """Masters ``[blocks, block]``: in each tile, any number of codes moves by less than a half, a
    half, one, or many; a share of the blocks leaves its scale.
    """
    blocks, block = old.shape
    tile = ChangeSpec(block).tile
    order = torch.rand(blocks, block // tile, tile).argsort(2).argsort(2)
    number = torch.rand(blocks, block // tile, 1) * torch.rand(blocks, 1, 1) * (tile + 1)
    by = torch.tensor([0.4, 0.5, 1.0, 1.4, 40.0])[torch.randint(0, 5, (blocks, 1))]
    by = by * torch.randn(old.shape).sign() * (order < number.int()).view(old.shape)
    by[:, 0] = 0.0
    x = (old + by) * scales[:, None]
    kinds = torch.randint(0, len(LEAVING), (blocks,))
    kinds[torch.rand(blocks) >= leave] = -1
    for kind, (factor, top) in enumerate(LEAVING):
        chosen = kinds == kind
        x[chosen] = x[chosen].nan_to_num(0.01) * factor
        if top:
            x[chosen, 0] = top
    return x


def empty_change(codes: Codes) -> Change:
    """Room for a change of the blocks of a message, filled with something."""
    spec, n = ChangeSpec(codes.block), codes.blocks
    steps = torch.full((n, spec.tiles, 2, spec.tile // 8), FILLING, dtype=torch.uint8)
    counts = torch.full_like(steps[:, :, 0, 0], FILLING)
    return Change(torch.full((n,), 77.0), counts, steps, torch.zeros(n, 2, dtype=torch.int64))


def assessed(backend: Operators, masters: Masters, codes: Codes) -> Change:
    """The change of a member's codes: of a backend the reference's scales, counts and sizes and, of
    blocks that are not sent whole, steps.
    """
    made = empty_change(codes)
    wanted, found, _ = both(backend, "codes_assess", masters, codes, *made)
    scales, counts, _, sizes = wanted[2:]
    for steps in (wanted[4], found[4]):
        steps[counts[:, 0] == WHOLE] = 0
        steps[:, :, 1][counts >= LARGE] = 0
    assert_equal(found, wanted, "codes_assess")
    return Change(scales, counts, wanted[4], sizes.cumsum(0))


def emitted(
    backend: Operators, masters: Masters, codes: Codes, change: Change
) -> tuple[Codes, Tensor]:
    """The codes after a change, and the message with it."""
    nbytes = message_bytes(codes, change)
    message = torch.zeros(nbytes + 384, dtype=torch.uint8)
    message[nbytes:] = FILLING
    _, stored, _, message = same(backend, "codes_emit", masters, codes, change, message)
    return stored, message[:nbytes]


def message_bytes(codes: Codes, change: Change) -> int:
    """Bytes of the message with a change."""
    return ChangeSpec(codes.block).nbytes(len(change.ends), *change.ends[-1].tolist())


def check_codes(backend: Operators, layout: Layout, leave: float, seed: int) -> None:
    """All three operations; masters may be edited after they were assessed, and any bytes may come
    as the changes of a message.
    """
    codes, every, _ = case(layout, leave, seed)
    room = ChangeSpec(layout.block).largest(codes.blocks)
    table = torch.full((1, *layout.members, room + 128), FILLING, dtype=torch.uint8)[..., :room]
    for member, masters in enumerate(every):
        change = assessed(backend, masters, codes)
        masters.table[:, ::3] += (0.0, 0.01, -0.01)[(seed + member) % 3]
        _, message = emitted(backend, masters, codes, change)
        if seed % 4 == 0:
            at = ChangeSpec(layout.block).offsets(codes.blocks, int(change.ends[-1, 0]))
            # Within a list, no position comes twice
            bytes_at = torch.arange(at.changes, len(message)) + seed
            message[at.changes :] = (bytes_at * 2654435761 >> 8).to(torch.uint8)
        table.view(-1, room)[member, : len(message)] = message
    same(backend, "codes_apply", Messages(table, without_member=layout.without), codes)


def check_edited(backend: Operators, add: float) -> None:
    """Masters are no numbers any more after they were assessed: the message has what becomes of the
    owner's codes all the same.
    """
    codes, (masters,), _ = made = case(single(69, 256))
    change = made.change()
    masters.table[:, ::3] += add
    message = torch.zeros(message_bytes(codes, change), dtype=torch.uint8)
    _, found, _ = both(backend, "codes_emit", masters, codes, change, message)
    messages = Messages(found[-1].view(1, 1, 1, -1))
    _, (_, replica), _ = both(backend, "codes_apply", messages, codes)
    assert_equal(replica, found[1], "the replica of masters that were edited")


def check_far(backend: Operators) -> None:
    """Parameters, rows of masters and messages over 2^32 bytes apart become what near ones do, on a
    CPU.
    """
    near, every, _ = case(ragged(64))
    apart, room = 2**32 + 128, 2**16
    param_indices = near.param_indices.clone()
    param_indices[:, :2] += apart
    stored = untouched(apart + near.stored.numel(), torch.uint8)
    far = near._replace(stored=stored, param_indices=param_indices)
    strides = 0, 2 * apart, apart // 2, 1
    table = untouched(3 * apart + 2 * room, torch.uint8).as_strided((1, 2, 3, room), strides)
    for member, masters in enumerate(every):
        change = assessed(REFERENCE, masters, near)
        wanted, message = emitted(REFERENCE, masters, near, change)
        rows = untouched(2 * apart // 4 + room, torch.float32)
        rows = rows.as_strided(masters.table.shape, (apart // 4 - 1, 1), 5)
        own = masters._replace(table=rows.copy_(masters.table))
        stored[apart:] = near.stored
        made = empty_change(near)
        backend.codes_assess(own, far, *made)
        assert_equal(made.ends.cumsum(0), change.ends, "sizes")
        place = table[0, member // 3, member % 3]
        backend.codes_emit(own, far, change, place)
        assert_equal(place[: len(message)], message, "the message")
        assert_equal(stored[apart:], wanted.stored, "what is stored after a message was made")
    stored[apart:] = near.stored
    REFERENCE.codes_apply(Messages(table), near)
    backend.codes_apply(Messages(table), far)
    assert_equal(stored[apart:], near.stored, "what is stored after messages came")


def check_large(backend: Operators, numel: int) -> None:
    """More codes than 32 bits count: wherever blocks lie, they become what the same few do alone.

    Args:
        backend: to check.
        numel: of the codes, about; a GPU uses up to a dozen bytes for each.
    """
    few, times = 40, numel // (40 * 64)
    near, (masters,), _ = made = case(single(few))
    wanted, _ = emitted(REFERENCE, masters, near, made.change())
    n, device = few * times, torch.device(backend.device)
    far = Codes.build([(masters.first, 64 * n)], 1, 64, device).part(0, n, 1, 1)

    def planes(codes: Codes, times: int) -> list[Tensor]:
        """Codes and scales, ``times`` those of a few blocks."""
        scales = codes.stored[int(codes.param_indices[0, 1]) :]
        few_bytes = (codes.stored, 64 * few), (scales, 4 * few)
        return [plane[: times * nbytes].view(times, nbytes) for plane, nbytes in few_bytes]

    for there, here in zip(planes(far, times), planes(near, 1), strict=True):
        there.copy_(here)
    replica = far._replace(stored=far.stored.clone())
    own = masters._replace(table=masters.table.to(device).repeat(1, times))
    with serving(backend):
        change = ops.assess_changes(own, far)
        message = ops.encode_changes(own, far, change, message_bytes(far, change))
        ops.apply_changes(message[None, None], replica, -1)
    for there, here in zip(planes(far, times), planes(wanted, 1), strict=True):
        assert bool((there == here.to(device)).all())
    assert torch.equal(far.stored, replica.stored)
