# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The GPU kernels on codes, emulated: the reference's bits, wherever all lies; no message makes
them reach beyond.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import golden_codes
from tests.kernels.golden import untouched
from tests.kernels.golden_codes import (
    FATES,
    FILLING,
    OPS,
    RAGGED,
    SINGLE,
    Case,
    assert_same,
    check_assessed,
    ragged,
    single,
)
from tests.kernels.gpu_library import BOTH, Emulated, Settings
from tests.kernels.operators import REFERENCE
from tests.kernels.test_cpu_codes import FUNCTIONS, Calls, wrong
from tests.kernels.test_cpu_sanitizers import FencedMemory
from zero_topo.quant.operands import Masters, Messages
from zero_topo.quant.spec import ChangeSpec


@pytest.mark.parametrize("chosen", BOTH)
@pytest.mark.parametrize("fate", FATES)
def test_codes_have_the_references_bits(emulated: Emulated, chosen: Settings, fate: str) -> None:
    """Scales, messages and what is stored, whichever blocks are sent whole."""
    for layout in (*RAGGED, *SINGLE):
        golden_codes.check_codes(emulated(chosen), layout, fate)


def test_all_bytes_that_changes_may_come_in(emulated: Emulated) -> None:
    """Lists of every byte, masks of every size."""
    golden_codes.check_extremes(emulated())


def test_places_beyond_32_bits(emulated: Emulated) -> None:
    """Parameters, rows of masters and messages over 2^32 bytes apart are found, read and
    written.
    """
    golden_codes.check_far(emulated(), untouched)


ENDS = st.lists(st.sampled_from([0, 1, 36, 37, 2**31, 2**32 - 1]), min_size=24, max_size=24)


@given(seed=st.integers(0, 2**40), ends=ENDS)
def test_no_message_reaches_beyond(emulated: Emulated, seed: int, ends: list[int]) -> None:
    """Whatever bytes came: nothing behind a message is read, and of what is stored only the
    members' part is written.
    """
    case, generator = Case(ragged(64), "mixed", "cpu"), torch.Generator().manual_seed(seed)
    n, spec = case.codes.blocks, ChangeSpec(64)
    nbytes, size = spec.nbytes(n, seed % (n + 1), 0), case.codes.stored.numel()
    table = FencedMemory(at_end=True).tensor(6 * nbytes, torch.uint8).view(1, 2, 3, nbytes)
    table.random_(0, 256, generator=generator)
    table[..., :16].view(torch.int32).copy_(torch.tensor(ends).to(torch.int32).view(1, 2, 3, 4))
    table[..., spec.offsets(n).counts : spec.offsets(n).scales] &= [0, 7, 63, 255][seed % 4]
    stored = case.copy()
    emulated().codes_apply(Messages(table, without_member=4), stored)
    wholes = torch.zeros(1, 2, 3, spec.largest(n), dtype=torch.uint8)
    wholes[..., spec.offsets(n).counts : spec.offsets(n).scales] = 255
    may = stored._replace(stored=torch.full((size,), FILLING, dtype=torch.uint8))
    REFERENCE.codes_apply(Messages(wholes, without_member=4), may)
    wrong = (stored.stored != case.codes.stored) & (may.stored == FILLING)
    assert not wrong.any(), f"written at {wrong.nonzero().view(-1).tolist()}"


def test_a_message_without_room_is_not_written(emulated: Emulated) -> None:
    """One that is too small for its changes leaves codes and message as they were: sizes are known
    on the device.
    """
    case, backend = Case(single(40), "mixed", "cpu"), emulated()
    stored, masters = case.copy(), case.masters(0)
    change = OPS.assess_changes(masters, stored)
    count, size = change.ends[-1].tolist()
    room = ChangeSpec(64).offsets(40, count).changes + size - 1
    message = torch.full((room,), FILLING, dtype=torch.uint8)
    backend.codes_emit(masters, stored, change, message)
    assert_same(stored.stored, case.codes.stored, "what is stored")
    assert bool((message == FILLING).all())


@pytest.mark.parametrize("cut", [(0, 70), (0, 640), (33, 640)], ids=str)
def test_masters_that_are_not_there_are_zero(emulated: Emulated, cut: tuple[int, int]) -> None:
    """Parameters are known on the device: columns that a table lacks, on either side, are not
    read.
    """
    case, backend, (first, past) = Case(single(10), "mixed", "cpu"), emulated(), cut
    whole = case.masters(0)
    there = FencedMemory(at_end=True).tensor(past - first, torch.float32)[None]
    there.copy_(whole.table[:, first:past])
    whole.table[:, : 64 if first else 0] = 0.0  # a block that does not begin in the table
    whole.table[:, past:] = 0.0
    change = OPS.assess_changes(whole, case.codes)
    check_assessed(backend, Masters(there, whole.first + first, 0), case.codes, case, change)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_wrong_argument_is_refused(emulated: Emulated, name: str) -> None:
    """Without a launch, of what the host sees; the tables that lie on the device keep the kernels
    within bounds.
    """
    emulated()
    Calls().check_each_refused(name, wrong(name))


@pytest.mark.parametrize(
    ("name", "place"), [*((name, 2) for name in FUNCTIONS), ("codes_emit", 10), ("codes_apply", 0)]
)
def test_misaligned_memory_is_refused(emulated: Emulated, name: str, place: int) -> None:
    """Codes and messages lie at multiples of 16 bytes."""
    emulated()
    calls = Calls()
    x = calls.arguments[name][place]
    calls.arguments[name][place] = torch.cat([x.new_zeros(8), x.view(-1)])[8:].view(x.shape)
    calls.check_refused(name)
