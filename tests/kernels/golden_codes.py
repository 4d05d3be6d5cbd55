# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What every backend of codes passes: the reference's bits in all that is stored and in every byte
of a message.

A backend is an `Operators`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.kernels.operators import REFERENCE, Operators, serving
from zero_topo.quant import ops, reference
from zero_topo.quant.operands import Change, Codes, Masters, Messages
from zero_topo.quant.spec import BLOCK_SIZES, LARGE, WHOLE, ChangeSpec


class Served:
    """The functions of ``zero_topo.quant.ops``, by one backend."""

    def __init__(self, backend: Operators) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(masters: Any, codes: Codes, *arguments: Any) -> Any:
            with serving(self._backend):
                return getattr(ops, name)(masters, codes, *arguments)

        return call


OPS = Served(REFERENCE)
FILLING = 0xA5
TIE = 2.0**-10  # the scale that blocks have at first
LEAST = 2.0**-100 * 1.01  # a block so small still has a scale


@dataclass(frozen=True)
class Layout:
    """Where codes and masters lie, and of which blocks the messages speak.

    Attributes:
        block: values of a block.
        columns: of each parameter, its first column in the table of masters and how many it has,
            ascending.
        begin, end: block columns of the messages.
        rows: of one member.
        members: outer and inner.
        without: a member that is left out.
    """

    block: int
    columns: tuple[tuple[int, int], ...]
    begin: int
    end: int
    rows: int = 1
    members: tuple[int, int] = (1, 1)
    without: int = -1

    def codes(self, device: str) -> Codes:
        """The blocks of a message, all zero."""
        members = math.prod(self.members)
        whole = Codes.build(self.columns, self.rows * members, self.block, torch.device(device))
        return whole.part(self.begin, self.end, self.rows, members)


def ragged(block: int) -> Layout:
    """Several parameters of any widths with gaps between them, of two by three members; not all
    block columns.
    """
    widths = [3 * block + 5, block, 2 * block + 1, 1, 4 * block - 1, block]
    firsts = [7 + sum(widths[:i]) + 3 * i for i in range(len(widths))]
    return Layout(block, tuple(zip(firsts, widths, strict=True)), 1, 13, 3, (2, 3), 4)


def single(blocks: int, block: int = 64) -> Layout:
    """So many blocks of one parameter and one row."""
    return Layout(block, ((1, blocks * block),), 0, blocks)


RAGGED = [ragged(block) for block in BLOCK_SIZES]
SINGLE = [single(n) for n in (1, 4, 5, 6, 11, 63, 64, 65, 69, 128, 321)]
FATES = ("none", "all", "mixed", "first", "last")


def check_codes(backend: Operators, layout: Layout, fate: str) -> None:
    """All three operations, on blocks of every kind, of which none, all, some, or one at an end are
    sent whole.
    """
    case, members, messages, stored = by_the_reference(layout, fate, backend.device)
    for number, wanted in enumerate(members):
        masters, own = case.masters(number), case.copy()
        check_assessed(backend, masters, own, case, wanted.change)
        assert_same(own.stored, case.codes.stored, "what is stored and must not change yet")
        emitted = torch.full_like(wanted.emitted, FILLING)
        backend.codes_emit(masters, own, wanted.change, emitted)
        assert_same(emitted, wanted.emitted, "the message")
        assert_same(own.stored, wanted.stored, "what is stored after a message was made")
    own = case.copy()
    backend.codes_apply(messages, own)
    assert_same(own.stored, stored, "what is stored after messages came")


class Made(NamedTuple):
    """What the reference makes of a member's masters: a change, what is emitted of it, the codes,
    the whole message.
    """

    change: Change
    emitted: Tensor
    stored: Tensor
    message: Tensor


@cache
def by_the_reference(
    layout: Layout, fate: str, device: str
) -> tuple[Case, list[Made], Messages, Tensor]:
    """A case, what becomes of each member, all their messages, and codes to which those were
    applied.
    """
    case = Case(layout, fate, device)
    members = [made(case, member) for member in range(math.prod(case.layout.members))]
    size = max(len(member.message) for member in members) + 256
    table = torch.full((*layout.members, size), FILLING, dtype=torch.uint8, device=device)[
        ..., : size - 128
    ]
    for number, member in enumerate(members):
        if number != layout.without:
            table[divmod(number, layout.members[1])][: len(member.message)] = member.message
    messages, codes = Messages(table[None], without_member=layout.without), case.copy()
    REFERENCE.codes_apply(messages, codes)
    return case, members, messages, codes.stored


def made(case: Case, member: int) -> Made:
    """One member's part of it."""
    masters, codes = case.masters(member), case.copy()
    change = OPS.assess_changes(masters, codes)
    whole = change.counts[:, 0].cpu() == WHOLE
    assert torch.equal(whole, case.whole[member].view(-1)), "what the case is meant to show"
    size = message_bytes(codes, change) + 384
    emitted = torch.full((size,), FILLING, dtype=torch.uint8, device=codes.stored.device)
    message = OPS.encode_changes(masters, case.copy(), change, size)
    REFERENCE.codes_emit(masters, codes, change, emitted)
    return Made(change, emitted, codes.stored, message)


def check_extremes(backend: Operators, block: int = 256) -> None:
    """Every byte of a list, every size of a mask; Inf where what a scale fits overflows."""
    device = backend.device
    case = Case(single(10, block), "none", device)
    case.codes.stored[int(case.codes.param_indices[0, 1]) :][:40].view(torch.float32).fill_(
        2.675e36
    )
    masters = case.masters(0)
    masters.table.fill_(-torch.inf)
    change = empty_change(case)
    backend.codes_assess(
        masters, case.codes, change.scales, change.counts, change.steps, change.ends
    )
    assert change.scales.isnan().all() and (change.counts == WHOLE).all(), (
        "Inf passes for a value that fits"
    )
    spec = ChangeSpec(block)
    case = Case(single(256 // spec.tiles, block), "none", device)
    n = case.codes.blocks
    for counts, packed in (
        (torch.ones(256, dtype=torch.int64), torch.arange(256)),
        (
            torch.arange(256) // 128 * 128 + (torch.arange(256) % 128).clamp(max=spec.most),
            torch.arange(2**15) * 2654435761 >> 8,
        ),
    ):
        number, mask = counts % 128, spec.tile // 8
        signed, new = (
            torch.minimum(number, (number + 7) // 8 + mask),
            torch.minimum(number, number * 0 + mask) + number,
        )
        sizes = torch.where(counts < 128, signed, new).view(n, spec.tiles).sum(1)
        ends = torch.stack([sizes * 0, sizes], 1).cumsum(0).to(torch.int32)
        message = torch.zeros(spec.nbytes(n, 0, int(ends[-1, 1])), dtype=torch.uint8)
        chunks = torch.cat([ends[31:-1:32], ends[-1:]]).view(torch.uint8).view(-1)
        for at, plane in (
            (0, chunks),
            (spec.offsets(n).counts, counts),
            (spec.offsets(n).changes, packed[: ends[-1, 1]]),
        ):
            message[at : at + plane.numel()] = plane.to(torch.uint8)
        check_apply(backend, case, Messages(message.to(device).view(1, 1, 1, -1)))
    case = Case(single(2, block), "none", device)
    places = reference._places(case.codes, 0)
    masters, (stored, scales) = case.masters(0), reference._stored(case.codes, places)
    rows = stored * scales[:, None]
    rows[0, : spec.most] += 1.2 * scales[0]
    rows[1, : spec.most + 1] += 1.2 * scales[1]
    masters.table.copy_(rows.view(1, -1))
    change = OPS.assess_changes(masters, case.codes)
    assert change.counts[:, 0].tolist() == [spec.most, WHOLE], (
        "one change more than a tile may have"
    )
    check_assessed(backend, masters, case.codes, case, change)
    for add in (0.01, -0.01, torch.inf, torch.nan):
        check_edited(backend, block, add)


def check_edited(backend: Operators, block: int, add: float) -> None:
    """Masters change after they were assessed: the message has what becomes of the owner's codes
    all the same.
    """
    case, ops = Case(single(69, block), "mixed", backend.device), Served(backend)
    owner, replica, expected = case.copy(), case.copy(), case.copy()
    masters, size = case.masters(0), ChangeSpec(block).largest(69)
    change = OPS.assess_changes(masters, owner)
    masters.table[:, ::3] += add
    message = ops.encode_changes(masters, owner, change, size)
    backend.codes_apply(Messages(message.view(1, 1, 1, -1)), replica)
    assert_same(replica.stored, owner.stored, "the replica of masters that were edited")
    if math.isfinite(add):
        OPS.encode_changes(masters, expected, change, size)
        assert_same(owner.stored, expected.stored, "codes of masters that were edited")


def empty_change(case: Case) -> Change:
    """Room for a change of the blocks of a case, filled with something."""
    spec, n, device = ChangeSpec(case.codes.block), case.codes.blocks, case.codes.stored.device
    steps = torch.full(
        (n, spec.tiles, 2, spec.tile // 8), FILLING, dtype=torch.uint8, device=device
    )
    ends = torch.zeros(n, 2, dtype=torch.int64, device=device)
    return Change(
        torch.full((n,), 77.0, device=device),
        torch.full_like(steps[:, :, 0, 0], FILLING),
        steps,
        ends,
    )


def check_assessed(
    backend: Operators, masters: Masters, codes: Codes, case: Case, change: Change
) -> None:
    """Scales, counts and, of blocks that are not sent whole, steps are those of a change."""
    made = empty_change(case)
    backend.codes_assess(masters, codes, made.scales, made.counts, made.steps, made.ends)
    assert_same(made.scales, change.scales, "scales")
    assert_same(made.counts, change.counts, "counts")
    kept, signed = change.counts[:, 0] != WHOLE, change.counts < LARGE
    assert_same(made.steps[kept][:, :, 0], change.steps[kept][:, :, 0], "steps")
    assert_same(made.steps[:, :, 1][signed], change.steps[:, :, 1][signed], "which steps decrease")
    assert_same(made.ends.cumsum(0), change.ends, "sizes")


def message_bytes(codes: Codes, change: Change) -> int:
    """Bytes of the message with a change."""
    return ChangeSpec(codes.block).nbytes(len(change.ends), *change.ends[-1].tolist())


def check_far(backend: Operators, far: Callable[[int, torch.dtype], Tensor]) -> None:
    """Parameters, rows of masters and messages over 2^32 bytes apart become what near ones do.

    Args:
        backend: to check, on a CPU.
        far: makes zeros, so many of a dtype, that take memory only where they are touched.
    """
    case, apart, room = Case(ragged(64), "mixed", "cpu"), 2**32 + 128, 2**16
    param_indices = case.codes.param_indices.clone()
    param_indices[:, :2] += apart
    codes = Codes(
        far(apart + case.codes.stored.numel(), torch.uint8),
        param_indices,
        case.codes.param_index_of,
        case.codes.numbers,
    )
    table = far(3 * apart + 2 * room, torch.uint8).as_strided(
        (1, 2, 3, room), (0, 2 * apart, apart // 2, 1)
    )
    for member in range(math.prod(case.layout.members)):
        near, masters = case.copy(), case.masters(member)
        codes.stored[apart:] = near.stored
        rows = far(2 * apart // 4 + room, torch.float32).as_strided(
            masters.table.shape, (apart // 4 - 1, 1), 5
        )
        own, change = (
            masters._replace(table=rows.copy_(masters.table)),
            OPS.assess_changes(masters, near),
        )
        check_assessed(backend, own, codes, case, change)
        made, wanted = table[0, member // 3, member % 3], torch.zeros(room, dtype=torch.uint8)
        head = ChangeSpec(64).offsets(codes.blocks).scales
        made[:head] = wanted[:head] = OPS.encode_changes(masters, case.copy(), change, room)[:head]
        REFERENCE.codes_emit(masters, near, change, wanted)
        backend.codes_emit(own, codes, change, made)
        assert_same(made, wanted, "the message")
        assert_same(codes.stored[apart:], near.stored, "what is stored after a message was made")
    codes.stored[apart:], near = case.codes.stored, case.copy()
    REFERENCE.codes_apply(Messages(table), near)
    backend.codes_apply(Messages(table), codes)
    assert_same(codes.stored[apart:], near.stored, "what is stored after messages came")


def check_large(backend: Operators, numel: int) -> None:
    """More codes than 32 bits count: wherever blocks lie, they become what the same few do alone.

    Args:
        backend: to check.
        numel: of the codes, about; a GPU uses up to a dozen bytes for each.
    """
    few, times, device = 40, numel // (40 * 64), backend.device
    case, n, ops = Case(single(few), "mixed", device), few * times, Served(backend)
    near, masters = case.copy(), case.masters(0)
    change = OPS.assess_changes(masters, near)
    OPS.encode_changes(masters, near, change, message_bytes(near, change))
    codes = Codes.build([(0, 64 * n)], 1, 64, torch.device(device)).part(0, n, 1, 1)
    planes = tuple(
        zip(
            (0, int(codes.param_indices[0, 1])),
            (0, int(near.param_indices[0, 1])),
            (64 * few, 4 * few),
            strict=True,
        )
    )
    for there, here, size in planes:
        codes.stored[there : there + times * size].view(times, size).copy_(
            case.codes.stored[here : here + size]
        )
    others = codes._replace(stored=codes.stored.clone())
    own = Masters(masters.table.repeat(1, times), 0, 0)
    change = ops.assess_changes(own, codes)
    message = ops.encode_changes(own, codes, change, message_bytes(codes, change))
    backend.codes_apply(Messages(message.view(1, 1, 1, -1)), others)
    for there, here, size in planes:
        wanted = near.stored[here : here + size]
        assert bool((codes.stored[there : there + times * size].view(times, size) == wanted).all())
    assert torch.equal(codes.stored, others.stored)


def check_apply(backend: Operators, case: Case, messages: Messages) -> None:
    """All members' messages become codes."""
    codes, own = case.copy(), case.copy()
    REFERENCE.codes_apply(messages, codes)
    backend.codes_apply(messages, own)
    assert_same(own.stored, codes.stored, "what is stored after messages came")


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal bit for bit, NaN too."""
    wrong = (actual.cpu().view(torch.uint8) != expected.cpu().view(torch.uint8)).nonzero()
    assert not len(wrong), f"{what}: {len(wrong)} bytes differ, first that at {wrong[0].tolist()}"


class Case:
    """Codes of masters as they were, and the masters as they are now.

    Args:
        layout: where all lies.
        fate: which blocks are sent whole, one of `FATES`.
        device: where the tensors are.
    """

    def __init__(self, layout: Layout, fate: str, device: str) -> None:
        self.layout, self._device = layout, device
        members = math.prod(layout.members)
        shape = (members, layout.rows, layout.end - layout.begin)
        self.whole = sent_whole(shape, fate)
        before, self._now = moved(self.whole, layout)
        self.codes = layout.codes(device)
        for at, scales_at, blocks, *_ in self.codes.param_indices.tolist():
            self.codes.stored[at:scales_at] = FILLING
            rows = layout.rows * members
            self.codes.stored[scales_at : scales_at + rows * blocks * 4].view(torch.float32).fill_(
                TIE
            )
        for member in range(members):
            own = self._masters(before, member)
            change = OPS.assess_changes(own, self.codes)
            OPS.encode_changes(own, self.codes, change, message_bytes(self.codes, change))

    def copy(self) -> Codes:
        """The codes, to be changed."""
        return self.codes._replace(stored=self.codes.stored.clone())

    def masters(self, member: int) -> Masters:
        """A member's masters now."""
        return self._masters(self._now, member)

    def _masters(self, values: Tensor, member: int) -> Masters:
        """Only the columns of the part's parameters, rows apart, at an odd address; NaN where no
        block lies.
        """
        layout, param_indices = self.layout, self.codes.param_indices.tolist()
        param_index_of = self.codes.param_index_of.tolist()
        first, last = (
            param_indices[param_index_of[layout.begin]],
            param_indices[param_index_of[layout.end - 1]],
        )
        width = last[4] + last[5] - first[4]
        flat = torch.full((3 + layout.rows * (width + 5) - 5,), torch.nan)
        table = flat.as_strided((layout.rows, width), (width + 5, 1), 3)
        for column in range(layout.begin, layout.end):
            *_, before, begin, columns = param_indices[param_index_of[column]]
            inside = (column - before) * layout.block
            size = min(layout.block, columns - inside)
            at = begin - first[4] + inside
            table[:, at : at + size] = values[member, :, column - layout.begin, :size]
        there = flat.to(self._device).as_strided(table.shape, table.stride(), 3)
        return Masters(there, first[4], member)


def sent_whole(shape: tuple[int, ...], fate: str) -> Tensor:
    """Which blocks are sent whole: bool ``[members, rows, block columns]``."""
    whole = torch.full(shape, fate == "all")
    flat = whole.view(shape[0], -1)
    if fate == "mixed":
        flat.copy_(
            torch.rand(flat.shape, generator=torch.Generator().manual_seed(flat.numel())) < 0.4
        )
    if fate in ("first", "last"):
        flat[:, 0 if fate == "first" else -1] = True
    return whole


def moved(whole: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Values of blocks before and now; those sent whole are so for all reasons in turn, and so are
    the others.
    """
    generator = torch.Generator().manual_seed(layout.block + whole.numel())
    x = torch.randn(*whole.shape, layout.block, generator=generator) * 0.005
    ties = torch.randint(-120, 120, x.shape, generator=generator).float()
    noise = torch.rand(x.shape, generator=generator) * 2 - 1
    now = x.clone()
    for number, (before, after, tie, shake) in enumerate(
        zip(*(t.view(-1, layout.block) for t in (x, now, ties, noise)), strict=True)
    ):
        before[0] = after[0] = 0.03  # the largest, and in every block
        scale = 0.03 * 1.0625 / 127
        if whole.view(-1)[number]:
            _leave(after, number % 9)
        else:
            _stay(before, after, number, tie * TIE, shake * scale)
    return x, now


def _leave(now: Tensor, kind: int) -> None:
    specials = {2: -torch.inf, 3: torch.nan, 4: 3.3e38, 5: 3e38}
    if kind in specials:
        now[0] = specials[kind]
    elif kind == 6:
        now[:] = 0.0
    elif kind == 7:
        now[:] = torch.sign(now) * 1e-42
    elif kind == 8:
        now.mul_(LEAST / 0.03)
    else:
        now.mul_((2.0, 0.7)[kind])


def _stay(before: Tensor, now: Tensor, number: int, ties: Tensor, noise: Tensor) -> None:
    kind, scale = number % 12, 0.03 * 1.0625 / 127
    # A list or a mask, of any number of codes that change by one or, from 9 on, by any number
    if kind > 5:
        before.copy_((before / scale).round() * scale)
        order = noise.abs()
        order[::8] = -1  # an eighth stays, lest the block be sent whole
        many = 37 * number % (7 * len(now) // 8 + 1)
        changes = order.argsort(descending=True)[: 7 * number % 31 if kind % 3 == 0 else many]
        steps = noise[changes].sign() if kind < 9 else (noise[changes] / scale * 50).round()
        now.copy_(before)[changes] += steps * scale
        before[0] = now[0] = 0.03
    elif kind == 0:
        now[1:] += noise[1:] * 0.95
    elif kind == 1:  # halfway between two codes
        before.copy_(ties)
        now.copy_(ties + TIE / 2)
        before[0] = now[0] = 127.25 * TIE
    elif kind == 2:
        before[:] = now[:] = 0.0
    elif kind == 3:
        before[0] = now[0] = torch.nan
    elif kind == 4:
        before.copy_(now.neg_())
    else:
        now.mul_(1.003)
