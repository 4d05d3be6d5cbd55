# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ternary sync: what its definition says, in the bytes that the formula says; what it shares with
the other sparse modes is tested with them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ranks.sync_cases import run, sync_world
from zero_topo.config.sparse_config import TERNARY_BLOCK as BLOCK
from zero_topo.config.sparse_config import TernarySync


def ternary(row: Tensor, selections: int) -> Tensor:
    """Of ``[C]``: in each block the largest that are not zero, as signs of their mean in BF16; in
    plain steps.
    """
    sent = torch.zeros_like(row)
    for begin in range(0, len(row), BLOCK):
        block = row[begin : begin + BLOCK]
        chosen = [
            i for i in block.abs().argsort(descending=True).tolist()[:selections] if block[i] != 0
        ]
        if chosen:
            scale = block[chosen].abs().mean().bfloat16().float()
            sent[begin : begin + BLOCK][chosen] = block[chosen].sign() * scale
    return sent


@pytest.mark.parametrize(
    ("density", "share"), [(0.05, 1.0), (0.001, 1.0), (0.7, 1.0), (0.05, 0.02), (0.0001, 1.0)]
)
def test_the_largest_of_each_block_travel_as_signs_of_their_mean(
    density: float, share: float
) -> None:
    """Of three ranks' rows but an owner's own, and then of the sums with that; where few elements
    are not zero none of the others moves, nor where a row fills no block.
    """
    peers, numel = 3, 3 * 9000
    w = sync_world("ternary", "data parallel", peers, (numel,), density=density)
    selections = TernarySync(density=density).selections
    grads = []
    for rank in range(peers):
        generator = torch.Generator().manual_seed(rank)
        kept = torch.rand(numel, generator=generator) < share
        grads.append(torch.randn(numel, generator=generator) * kept)
    rows = torch.stack(grads).view(peers, peers, -1) / peers  # by rank and owner
    ((found,), *_) = run(w, 1, lambda rank, _: [grads[rank].clone()])
    for owner, reported in enumerate(found.rows):
        row = rows[owner, owner].clone()
        for rank in range(peers):
            if rank != owner:
                row += ternary(rows[rank, owner], selections)
        # what two peers send alone may be equal: which of those goes is open
        torch.testing.assert_close(
            reported.abs().sort().values, ternary(row, selections).abs().sort().values
        )
        assert not (reported * row < 0).any() and not reported[row == 0].any()


@pytest.mark.parametrize(
    ("density", "bits"), [(0.05, 0.367), (0.047, 0.35), (0.01, 0.098), (1.0, 3.0)]
)
def test_a_third_of_a_bit_is_enough_for_a_twentieth_of_the_elements(
    density: float, bits: float
) -> None:
    """What the page promises of an element's bits, the scale aside."""
    assert TernarySync(density=density).block_bits / BLOCK == pytest.approx(bits, abs=0.005)
