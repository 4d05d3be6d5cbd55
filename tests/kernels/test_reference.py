# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The golden suite itself: it accepts the reference and rejects backends that are a little wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels import golden
from zero_topo.quant import reference
from zero_topo.quant.pieces import Piece
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
        for tensor in [p.flat for p in target] if isinstance(target, list) else [target]:
            if tensor.numel():
                tensor.view(torch.uint8).view(-1)[0] ^= 1
        return result

    return wrong


WRITES = {"quantize": 2, "dequantize": 2, "dequantize_reduce": 2, "requantize": 3, "mask_pack": 1, "mask_unpack": 1}
WRITES |= {"compact_above": 3, "sketch_insert": 2, "sketch_peel": 3}


@pytest.mark.parametrize("name", WRITES)
def test_one_wrong_bit_is_seen(name: str) -> None:
    """A backend whose function writes one wrong bit does not pass."""
    backend = SimpleNamespace(**{**vars(reference), name: flipped(getattr(reference, name), WRITES[name])})
    with pytest.raises(AssertionError):
        golden.check_a_little(backend)


def test_writing_beyond_the_end_is_seen() -> None:
    """Elements between the rows of a piece belong to somebody else."""

    def careless(message: torch.Tensor, spec: BlockSpec, pieces: list[Piece]) -> None:
        reference.dequantize(message, spec, pieces)
        for piece in pieces:
            if piece.rows > 1 and piece.flat.numel() > piece.columns:
                piece.flat[piece.columns] = 0.0

    with pytest.raises(AssertionError):
        golden.check_dequantize(SimpleNamespace(dequantize=careless), FORMAT)
