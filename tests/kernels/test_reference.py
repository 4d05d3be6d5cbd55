# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The golden suite itself: it accepts the reference and rejects backends that are a little wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels import golden, golden_codes, golden_members
from zero_topo.quant import reference
from zero_topo.quant.operands import Messages


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


def test_the_reference_passes_for_codes() -> None:
    """The suite of codes asks for nothing that the reference does not do, and makes the blocks that it speaks of."""
    for layout in (*golden_codes.RAGGED, *golden_codes.SINGLE):
        for fate in golden_codes.FATES:
            golden_codes.check_codes(reference, layout, fate)
    golden_codes.check_extremes(reference)


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
