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
from zero_topo.quant.operands import Codes, Masters
from zero_topo.quant.spec import BLOCK_SIZES, ChangeSpec

BLOCK, ROWS, MEMBERS = 64, 6, 3
COLUMNS = [(7, 200), (300, 64), (364, 65)]
WIDTH = 500
CPU = torch.device("cpu")


class Ranks:
    """Every member's copy of the codes, and all rows' masters ``[ROWS, WIDTH]``."""

    def __init__(self, seed: int) -> None:
        self.masters = (
            torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)) * 0.02
        )
        whole = [Codes.build(COLUMNS, ROWS, BLOCK, CPU) for _ in range(MEMBERS)]
        columns = len(whole[0].param_index_of)
        self.codes = [codes.part(0, columns, ROWS // MEMBERS, MEMBERS) for codes in whole]
        self.size = 0  # of the last messages

    def publish(self) -> list[int]:
        """Each member publishes its rows; how many of its blocks are sent whole."""
        own = [Masters(self.masters[m::MEMBERS], 0, m) for m in range(MEMBERS)]
        changes = [ops.assess_changes(o, c) for o, c in zip(own, self.codes, strict=True)]
        self.size = max(
            message_bytes(codes, change) for codes, change in zip(self.codes, changes, strict=True)
        )
        sent = torch.stack(
            [
                ops.encode_changes(*of, self.size)
                for of in zip(own, self.codes, changes, strict=True)
            ]
        )
        for member, codes in enumerate(self.codes):
            ops.apply_changes(sent[None], codes, without=member)
        return [int(change.ends[-1, 0]) for change in changes]

    def check(self) -> None:
        """All copies have the same bits, and every code is its master's."""
        for codes in self.codes[1:]:
            assert torch.equal(codes.stored, self.codes[0].stored)
        for param_index, (first, width) in enumerate(COLUMNS):
            found, scales = stored(self.codes[0], param_index)
            x = torch.zeros(ROWS, found.shape[1] * BLOCK)
            x[:, :width] = self.masters[:, first : first + width]
            wanted = (x.view(found.shape) * (1 / scales)[..., None]).round().clamp(-127, 127)
            usable = (scales > 0)[..., None]
            assert torch.equal(found.float(), torch.where(usable, wanted, 0.0))


def stored(codes: Codes, param_index: int) -> tuple[Tensor, Tensor]:
    """Codes ``[rows, blocks, block]`` and scales ``[rows, blocks]`` of a parameter."""
    at, scales_at, blocks, *_ = codes.param_indices[param_index].tolist()
    values = (
        codes.stored[at : at + ROWS * blocks * BLOCK].view(torch.int8).view(ROWS, blocks, BLOCK)
    )
    return values, codes.stored[scales_at : scales_at + ROWS * blocks * 4].view(torch.float32).view(
        ROWS, blocks
    )


def test_codes_follow_their_masters_in_every_copy() -> None:
    """After each publish, whatever the masters did, all hold the masters' codes."""
    ranks, generator = Ranks(0), torch.Generator().manual_seed(1)
    blocks = ranks.codes[0].blocks
    assert ranks.publish() == [blocks] * MEMBERS, "fresh codes have no scales"
    ranks.check()
    for size in (1e-5, 1e-4, 1e-3, 0.1):
        ranks.masters += torch.randn(ranks.masters.shape, generator=generator) * size
        whole = ranks.publish()
        ranks.check()
        assert all(count < blocks // 2 for count in whole) or size > 1e-4
    assert all(count == blocks for count in whole), "codes change by more than one"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.4e38])
def test_what_is_not_finite_is_seen_and_heals(bad: float) -> None:
    """A bad master makes its block NaN everywhere, once; a good one brings it back; zeros have no
    scale.
    """
    ranks = Ranks(2)
    ranks.publish()
    ranks.masters[1, 310] = bad
    ranks.masters[2, 300:364] = 0.0
    assert ranks.publish() == [0, 1, 1]
    ranks.check()
    scales = stored(ranks.codes[2], 1)[1]
    assert scales[1, 0].isnan() and scales[2, 0] == 0
    assert ranks.publish() == [0, 0, 0], "what did not change is not sent again"
    ranks.masters[1:3, 300:364] = 0.01
    ranks.publish()
    ranks.check()
    assert stored(ranks.codes[0], 1)[1].isfinite().all()


def test_scales_stay_while_blocks_fit() -> None:
    """A block's scale changes when it outgrows its headroom, and when it shrinks by a quarter, not
    before.
    """
    ranks = Ranks(3)
    ranks.publish()
    for factor, anew in (
        (1.06, False),
        (1 / 1.06, False),
        (1.07, True),
        (0.76, False),
        (0.9, True),
    ):
        ranks.masters *= factor
        before = stored(ranks.codes[0], 0)[1].clone()
        ranks.publish()
        ranks.check()
        assert torch.equal(before, stored(ranks.codes[0], 0)[1]) != anew, factor


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
    ranks = Ranks(5)
    with pytest.raises(ValueError, match="are not 2 of 3"):
        ops.assess_changes(Masters(ranks.masters, 0, 0), ranks.codes[0])
    with pytest.raises(ValueError, match="FP32"):
        ops.assess_changes(Masters(ranks.masters[:2].double(), 0, 0), ranks.codes[0])


@pytest.mark.parametrize(("rate", "most"), [(1e-4, 0.75), (3e-5, 0.27), (1e-5, 0.15), (1e-6, 0.08)])
@pytest.mark.parametrize("signs", [False, True])
def test_bits_of_steps_of_adam(rate: float, most: float, signs: bool) -> None:
    """Updates of 0.4 times the learning rate of weights of deviation 0.02, normal or of one size;
    and copies agree.
    """
    generator, n = torch.Generator().manual_seed(7), 2000
    x = torch.randn(1, 256 * n, generator=generator) * 0.02
    owner, copy = (Codes.build([(0, 256 * n)], 1, 256, CPU).part(0, n, 1, 1) for _ in range(2))
    for _ in range(3):
        own = Masters(x, 0, 0)
        change = ops.assess_changes(own, owner)
        nbytes = message_bytes(owner, change)
        message = ops.encode_changes(own, owner, change, nbytes)
        ops.apply_changes(message[None, None], copy, without=-1)
        assert torch.equal(copy.stored, owner.stored)
        update = torch.randn(x.shape, generator=generator)
        x += 0.4 * rate * (update.sign() if signs else update)
    assert 8 * nbytes / x.numel() <= most


@given(seed=st.integers(0, 2**40), share=st.floats(0, 1), block=st.sampled_from(BLOCK_SIZES))
def test_changes_of_any_density_arrive(seed: int, share: float, block: int) -> None:
    """Whichever codes change by one or more, and however many: all is sent in the fewest bytes, and
    copies agree.
    """
    generator, n = torch.Generator().manual_seed(seed), 37
    owner, copy = (Codes.build([(0, n * block)], 1, block, CPU).part(0, n, 1, 1) for _ in range(2))
    before = torch.randint(-100, 101, (1, n * block), generator=generator)
    before[0, ::block] = 120
    chosen = torch.rand(before.shape, generator=generator) < share
    chosen[0, ::block] = False
    far = (torch.rand(n, generator=generator) < 0.1).repeat_interleave(block)
    by = torch.randint(0, 2, before.shape, generator=generator) * 2 - 1
    for x in (before, before + by * chosen * (1 + far)):
        own = Masters(x / 1024, 0, 0)
        change = ops.assess_changes(own, owner)
        message = ops.encode_changes(own, owner, change, message_bytes(owner, change))
        ops.apply_changes(message[None, None], copy, without=-1)
        assert torch.equal(copy.stored, owner.stored)
    tile = min(block, 128)
    number, far = chosen.view(n, -1, tile).sum(2), far.view(n, -1, tile)[:, :, 0]
    whole = (number > tile * 7 // 8).any(1)
    signed = torch.minimum(number, (number + 7) // 8 + tile // 8)
    bytes_of = (
        torch.where(far, number.clamp(max=tile // 8) + number, signed).sum(1).masked_fill(whole, 0)
    )
    assert change.ends[-1].tolist() == [whole.sum(), bytes_of.sum()] and (bytes_of <= block).all()
