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

from tests.kernels import golden, golden_members
from tests.kernels.golden import Spec
from zero_topo.quant import reference
from zero_topo.quant.messages import Messages
from zero_topo.quant.pieces import Piece
from zero_topo.quant.spec import BlockSpec, Reduce

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
WRITES |= {"compact_above": 3, "sketch_insert": 2, "sketch_peel": 3}


@pytest.mark.parametrize("name", WRITES)
def test_one_wrong_bit_is_seen(name: str) -> None:
    """A backend whose function writes one wrong bit does not pass."""
    backend = SimpleNamespace(**{**vars(reference), name: flipped(getattr(reference, name), WRITES[name])})
    with pytest.raises(AssertionError):
        golden.check_a_little(backend)


def test_writing_beyond_the_end_is_seen() -> None:
    """Elements between the rows of a piece belong to somebody else."""

    def careless(messages: Messages, spec: Spec, pieces: list[Piece], reduce: Reduce) -> None:
        reference.dequantize_reduce(messages, spec, pieces, reduce)
        for piece in pieces:
            if piece.rows > 1 and piece.flat.numel() > piece.columns:
                piece.flat[piece.columns] = 0.0

    with pytest.raises(AssertionError):
        golden.check_dequantize(SimpleNamespace(dequantize_reduce=careless), FORMAT)


def whole_rows(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces as one sees them who ignores that rows may be filled up."""
    return [replace(p, present=None, stride=max(p.stride, p.columns)) for p in pieces]


def in_order(messages: Messages) -> Messages:
    """Messages as one sees them who confuses outer and inner members."""
    return replace(messages, table=messages.table.transpose(1, 2))


# What somebody makes of messages and pieces who overlooks one thing.
CARELESS: dict[str, tuple[Callable[[Messages], Messages], Callable[[Sequence[Piece]], Sequence[Piece]]]] = {
    "nothing": (lambda messages: messages, lambda pieces: pieces),
    "rows that are filled up": (lambda messages: messages, whole_rows),
    "the order of members": (in_order, lambda pieces: pieces),
    "a member left out": (lambda messages: replace(messages, without_member=None), lambda pieces: pieces),
    "a source left out": (lambda messages: replace(messages, without_source=None), lambda pieces: pieces),
}


@pytest.mark.parametrize("fmt", [FORMAT, golden.CAST_FORMATS[2]], ids=str)
@pytest.mark.parametrize("overlooked", CARELESS)
def test_confusing_members_is_seen(overlooked: str, fmt: golden.Format) -> None:
    """Each member has its own messages and elements; the suite accepts only who sees everything."""
    messages_as, pieces_as = CARELESS[overlooked]
    backend = SimpleNamespace(
        quantize=lambda pieces, spec, out: reference.quantize(pieces_as(pieces), spec, messages_as(out)),
        dequantize_reduce=lambda messages, spec, pieces, reduce: reference.dequantize_reduce(
            messages_as(messages), spec, pieces_as(pieces), reduce
        ),
        requantize=reference.requantize,
    )
    with contextlib.nullcontext() if overlooked == "nothing" else pytest.raises(AssertionError):
        golden_members.check_members(backend, fmt)


@pytest.mark.parametrize("check", [golden_members.check_many_pieces, golden_members.check_many_members])
def test_the_reference_takes_any_number(check: Callable[..., None]) -> None:
    """Of pieces and of members."""
    check(reference, 65)
