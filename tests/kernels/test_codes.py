# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Codes and their messages, by the reference: what they promise to whoever holds weights as
codes.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.golden_codes import message_bytes
from zero_topo.quant import ops
from zero_topo.quant.operands import Change, Codes, Masters
from zero_topo.quant.spec import BLOCK_SIZES, ChangeSpec

CPU = torch.device("cpu")


class Pair:
    """INT8 weights of a matrix, one row, by their owner and by another rank."""

    def __init__(self, blocks: int, block: int) -> None:
        width = blocks * block
        built = [Codes.build([(0, width)], 1, block, CPU) for _ in range(2)]
        self.owner, self.copy = (codes.part(0, blocks, 1, 1) for codes in built)
        self.nbytes = 0

    def publish(self, masters: Tensor) -> Change:
        """The owner follows its masters ``[1, width]``, the other its message."""
        own = Masters(masters, 0, 0)
        change = ops.assess_changes(own, self.owner)
        self.nbytes = message_bytes(self.owner, change)
        message = ops.encode_changes(own, self.owner, change, self.nbytes)
        ops.apply_changes(message[None, None], self.copy, without=-1)
        assert torch.equal(self.copy.stored, self.owner.stored)
        return change


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.4e38])
def test_what_is_not_finite_is_seen_and_heals(bad: float) -> None:
    """A bad master makes its block NaN everywhere, once; a good one brings it back; zeros have no
    scale.
    """
    pair = Pair(4, 64)
    masters = torch.randn(1, 256, generator=torch.Generator().manual_seed(2))
    pair.publish(masters)
    masters[0, 70] = bad
    masters[0, 128:192] = 0.0
    scales = pair.copy.stored[256:].view(torch.float32)
    for whole in (2, 0):  # what did not change is not sent again
        assert int(pair.publish(masters).ends[-1, 0]) == whole
        assert scales[1].isnan() and scales[2] == 0
    masters[0, 64:192] = 0.01
    pair.publish(masters)
    assert scales[:4].isfinite().all()


def test_bytes_of_a_message() -> None:
    """Under 8.2 bits where all is sent whole, 0.07 where nothing changes; rows that do not fit are
    refused.
    """
    spec, blocks = ChangeSpec(256), 100_000
    assert spec.largest(blocks) * 8 / (256 * blocks) < 8.2
    assert spec.nbytes(blocks, 0, 0) * 8 / (256 * blocks) < 0.071
    for block in BLOCK_SIZES:
        sizes = [
            ChangeSpec(block).nbytes(301, whole, (301 - whole) * block) for whole in range(302)
        ]
        assert sizes == sorted(sizes), "a block sent whole takes more than any other"
    for masters in (torch.zeros(2, 256), torch.zeros(1, 256).double()):
        with pytest.raises(ValueError, match=r"2 of 1|FP32|1 of 1"):
            ops.assess_changes(Masters(masters, 0, 0), Pair(4, 64).owner)


@pytest.mark.parametrize(("rate", "most"), [(1e-4, 0.75), (3e-5, 0.27), (1e-5, 0.15), (1e-6, 0.08)])
@pytest.mark.parametrize("signs", [False, True])
def test_bits_of_steps_of_adam(rate: float, most: float, signs: bool) -> None:
    """Updates of 0.4 times the learning rate of weights of deviation 0.02, normal or of one size;
    and copies agree.
    """
    generator, n = torch.Generator().manual_seed(7), 2000
    x = torch.randn(1, 256 * n, generator=generator) * 0.02
    pair = Pair(n, 256)
    for _ in range(3):
        pair.publish(x)
        update = torch.randn(x.shape, generator=generator)
        x += 0.4 * rate * (update.sign() if signs else update)
    assert 8 * pair.nbytes / x.numel() <= most


@given(seed=st.integers(0, 2**40), share=st.floats(0, 1), block=st.sampled_from(BLOCK_SIZES))
def test_changes_of_any_density_arrive(seed: int, share: float, block: int) -> None:
    """Whichever codes change by one or more, and however many: all is sent in the fewest bytes, and
    copies agree.
    """
    generator, n = torch.Generator().manual_seed(seed), 37
    pair = Pair(n, block)
    before = torch.randint(-100, 101, (1, n * block), generator=generator)
    before[0, ::block] = 120
    chosen = torch.rand(before.shape, generator=generator) < share
    chosen[0, ::block] = False
    far = (torch.rand(n, generator=generator) < 0.1).repeat_interleave(block)
    by = torch.randint(0, 2, before.shape, generator=generator) * 2 - 1
    for x in (before, before + by * chosen * (1 + far)):
        change = pair.publish(x / 1024)
    tile = min(block, 128)
    number, far = chosen.view(n, -1, tile).sum(2), far.view(n, -1, tile)[:, :, 0]
    whole = (number > tile * 7 // 8).any(1)
    signed = torch.minimum(number, (number + 7) // 8 + tile // 8)
    bytes_of = (
        torch.where(far, number.clamp(max=tile // 8) + number, signed).sum(1).masked_fill(whole, 0)
    )
    assert change.ends[-1].tolist() == [whole.sum(), bytes_of.sum()] and (bytes_of <= block).all()
