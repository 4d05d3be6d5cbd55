# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The golden suite itself: it accepts the reference and rejects backends that are a little wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels import golden, golden_codes, golden_members
from tests.kernels.golden import Spec
from zero_topo.quant import reference
from zero_topo.quant.operands import Masters, Messages, View
from zero_topo.quant.spec import BlockSpec

FORMAT = golden.Format(BlockSpec(4, 64), torch.float32)


def test_the_reference_passes() -> None:
    """The suite asks for nothing that the reference does not do."""
    golden.check_a_little(reference)


def flipped(function: Callable[..., Any], argument: int) -> Callable[..., Any]:
    """The function, with one bit of what it writes changed."""

    def wrong(*args: Any) -> Any:
        result = function(*args)
        target = args[argument]
        target = target.table[0, 0, 0] if isinstance(target, Messages) else target
        for tensor in [p.flat for p in target] if isinstance(target, list) else [target]:
            if tensor.numel():
                tensor.view(torch.uint8).view(-1)[0] ^= 1
        return result

    return wrong


WRITES = {"quantize": 2, "dequantize_reduce": 2, "requantize": 3, "mask_pack": 1, "mask_unpack": 1}
WRITES |= {"compact_above": 3, "row_largest": 1, "sketch_insert": 2, "sketch_peel": 3}


@pytest.mark.parametrize("name", WRITES)
def test_one_wrong_bit_is_seen(name: str) -> None:
    """A backend whose function writes one wrong bit does not pass."""
    backend = SimpleNamespace(**{**vars(reference), name: flipped(getattr(reference, name), WRITES[name])})
    with pytest.raises(AssertionError):
        golden.check_a_little(backend)


def test_writing_beyond_the_end_is_seen() -> None:
    """Elements between the rows of a piece belong to somebody else."""

    def careless(messages: Messages, spec: Spec, pieces: list[View], *how: Any) -> None:
        reference.dequantize_reduce(messages, spec, pieces, *how)
        for piece in pieces:
            if piece.rows > 1 and piece.flat.numel() > piece.columns:
                piece.flat[piece.columns] = 0.0

    with pytest.raises(AssertionError):
        golden.check_dequantize(SimpleNamespace(dequantize_reduce=careless), FORMAT)


def whole_rows(pieces: Sequence[View]) -> list[View]:
    """Pieces as one sees them who ignores that rows may be filled up."""
    return [replace(p, present=None, stride=max(p.stride, p.columns)) for p in pieces]


def in_order(messages: Messages) -> Messages:
    """Messages as one sees them who confuses outer and inner members."""
    return replace(messages, table=messages.table.transpose(1, 2))


# What somebody makes of messages and pieces who overlooks one thing.
CARELESS: dict[str, tuple[Callable[[Messages], Messages], Callable[[Sequence[View]], Sequence[View]]]] = {
    "nothing": (lambda messages: messages, lambda pieces: pieces),
    "rows that are filled up": (lambda messages: messages, whole_rows),
    "the order of members": (in_order, lambda pieces: pieces),
    "a member left out": (lambda messages: replace(messages, without_member=-1), lambda pieces: pieces),
    "a source left out": (lambda messages: replace(messages, without_source=-1), lambda pieces: pieces),
}


@pytest.mark.parametrize("fmt", [FORMAT, golden.CAST_FORMATS[2]], ids=str)
@pytest.mark.parametrize("overlooked", CARELESS)
def test_confusing_members_is_seen(overlooked: str, fmt: golden.Format) -> None:
    """Each member has its own messages and elements; the suite accepts only who sees everything."""
    messages_as, pieces_as = CARELESS[overlooked]
    backend = SimpleNamespace(
        quantize=lambda pieces, spec, out: reference.quantize(pieces_as(pieces), spec, messages_as(out)),
        dequantize_reduce=lambda messages, spec, pieces, *how: reference.dequantize_reduce(
            messages_as(messages), spec, pieces_as(pieces), *how
        ),
        requantize=reference.requantize,
    )
    with contextlib.nullcontext() if overlooked == "nothing" else pytest.raises(AssertionError):
        golden_members.check_members(backend, fmt)


def test_the_reference_passes_for_codes() -> None:
    """The suite of codes asks for nothing that the reference does not do, and makes the blocks that it speaks of."""
    for layout in (*golden_codes.RAGGED, *golden_codes.SINGLE):
        for fate in golden_codes.FATES:
            golden_codes.check_codes(reference, layout, fate)
    golden_codes.check_extremes(reference)


def near(masters: Masters) -> Masters:
    """Masters as one sees them who takes rows for adjacent."""
    flat, (rows, columns) = masters.table, masters.table.shape
    return replace(masters, table=flat.as_strided((rows, columns), (columns, 1)))


# What somebody makes of masters, parts and messages who overlooks one thing.
CARELESS_CODES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "nothing": {},
    "that rows are apart": {"masters": near},
    "where the columns begin": {"masters": lambda masters: replace(masters, first=masters.first + 1)},
    "whose rows they are": {"masters": lambda masters: replace(masters, member=0)},
    "where the part begins": {"part": lambda part: replace(part, begin=part.begin - 1, end=part.end - 1)},
    "a member left out": {"messages": lambda messages: replace(messages, without_member=-1)},
    "the order of members": {"messages": in_order},
}


@pytest.mark.parametrize("overlooked", CARELESS_CODES)
def test_confusing_codes_is_seen(overlooked: str) -> None:
    """The suite of codes accepts only who sees everything."""
    same = {"masters": lambda x: x, "part": lambda x: x, "messages": lambda x: x}
    seen = {**same, **CARELESS_CODES[overlooked]}
    backend = SimpleNamespace(
        codes_assess=lambda own, codes, part, *out: reference.codes_assess(
            seen["masters"](own), codes, seen["part"](part), *out
        ),
        codes_emit=reference.codes_emit,
        codes_apply=lambda messages, codes, part: reference.codes_apply(
            seen["messages"](messages), codes, seen["part"](part)
        ),
    )
    with contextlib.nullcontext() if overlooked == "nothing" else pytest.raises((AssertionError, RuntimeError)):
        golden_codes.check_codes(backend, golden_codes.RAGGED[0], "mixed")


@pytest.mark.parametrize("wrong", ["scales", "counts", "message", "held by its owner", "held by others"])
def test_one_wrong_bit_of_codes_is_seen(wrong: str) -> None:
    """A backend of codes that writes one wrong bit anywhere does not pass."""

    def flip(tensor: torch.Tensor, which: str) -> None:
        tensor.view(torch.uint8).view(-1)[-130] ^= int(wrong == which)

    def assess(masters: Any, codes: Any, part: Any, *made: torch.Tensor) -> None:
        reference.codes_assess(masters, codes, part, *made)
        for tensor, which in zip(made, ("scales", "counts"), strict=False):
            flip(tensor, which)

    def emit(masters: Any, codes: Any, part: Any, change: Any, message: torch.Tensor) -> None:
        reference.codes_emit(masters, codes, part, change, message)
        flip(message, "message")
        flip(codes.held, "held by its owner")

    def apply(messages: Messages, codes: Any, part: Any) -> None:
        reference.codes_apply(messages, codes, part)
        flip(codes.held, "held by others")

    backend = SimpleNamespace(codes_assess=assess, codes_emit=emit, codes_apply=apply)
    with pytest.raises(AssertionError):
        golden_codes.check_codes(backend, golden_codes.single(321), "mixed")


@pytest.mark.parametrize("check", [golden_members.check_many_pieces, golden_members.check_many_members])
def test_the_reference_takes_any_number(check: Callable[..., None]) -> None:
    """Of pieces and of members."""
    check(reference, 65)
