# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The GPU kernels on codes, emulated: the reference's bits, wherever all lies; no message makes them reach beyond."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from op_builder import source_dir
from tests.kernels import c_types, golden_codes
from tests.kernels import gpu_library as gpu
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
    message_bytes,
    ragged,
    single,
)
from tests.kernels.gpu_library import BOTH, OK, GpuLibrary, Settings
from tests.kernels.operators import serving_module
from tests.kernels.test_cpu_sanitizers import FencedMemory
from zero_topo.quant import reference
from zero_topo.quant.operands import Masters, Messages
from zero_topo.quant.spec import ChangeSpec

BAD_SPEC, BAD_SIZE, BAD_ALIGNMENT = 1, 3, 7


@pytest.mark.parametrize("chosen", BOTH)
@pytest.mark.parametrize("fate", FATES)
def test_codes_have_the_references_bits(library: ctypes.CDLL, chosen: Settings, fate: str) -> None:
    """Scales, messages and what is held, whichever blocks are sent whole."""
    for layout in (*RAGGED, *SINGLE):
        golden_codes.check_codes(GpuLibrary(library, chosen), layout, fate)


def test_all_bytes_that_changes_may_come_in(library: ctypes.CDLL) -> None:
    """Lists of every byte, masks of every size."""
    golden_codes.check_extremes(GpuLibrary(library))


def test_codes_through_the_binding() -> None:
    """What an engine on a GPU calls."""
    with serving_module(gpu.bound(source_dir())) as native:
        for layout in (RAGGED[2], single(69)):
            golden_codes.check_codes(native, layout, "mixed")


def test_places_beyond_32_bits(library: ctypes.CDLL) -> None:
    """Slots, rows of masters and messages over 2^32 bytes apart are found, read and written."""
    golden_codes.check_far(GpuLibrary(library), untouched)


ENDS = st.lists(st.sampled_from([0, 1, 36, 37, 2**31, 2**32 - 1]), min_size=24, max_size=24)


@given(seed=st.integers(0, 2**40), ends=ENDS)
def test_no_message_reaches_beyond(library: ctypes.CDLL, seed: int, ends: list[int]) -> None:
    """Whatever bytes came: nothing behind a message is read, and of what is held only the members' part is written."""
    case, generator = Case(ragged(64), "mixed", "cpu"), torch.Generator().manual_seed(seed)
    n, spec = case.part.blocks, ChangeSpec(64)
    nbytes, size = spec.nbytes(n, seed % (n + 1), 0), case.codes.held.numel()
    table = FencedMemory(at_end=True).tensor(6 * nbytes, torch.uint8).view(1, 2, 3, nbytes)
    table.random_(0, 256, generator=generator)
    table[..., :16].view(torch.int32).copy_(torch.tensor(ends).to(torch.int32).view(1, 2, 3, 4))
    table[..., spec.counts_offset(n) : spec.scales_offset(n)] &= [0, 7, 63, 255][seed % 4]
    held = case.copy()
    GpuLibrary(library).codes_apply(Messages(table, without_member=4), held, case.part)
    wholes = torch.zeros(1, 2, 3, spec.largest(n), dtype=torch.uint8)
    wholes[..., spec.counts_offset(n) : spec.scales_offset(n)] = 255
    may = replace(held, held=torch.full((size,), FILLING, dtype=torch.uint8))
    reference.codes_apply(Messages(wholes, without_member=4), may, case.part)
    wrong = (held.held != case.codes.held) & (may.held == FILLING)
    assert not wrong.any(), f"written at {wrong.nonzero().view(-1).tolist()}"


def test_a_message_without_room_is_not_written(library: ctypes.CDLL) -> None:
    """One that is too small for its changes leaves codes and message as they were: sizes are known on the device."""
    case, backend = Case(single(40), "mixed", "cpu"), GpuLibrary(library)
    held, masters = case.copy(), case.masters(0)
    change = OPS.assess_changes(masters, held, case.part)
    count, size = change.ends[-1].tolist()
    room = ChangeSpec(64).changes_offset(40, count) + size - 1
    message = torch.full((room,), FILLING, dtype=torch.uint8)
    backend.codes_emit(masters, held, case.part, change, message)
    assert_same(held.held, case.codes.held, "what is held")
    assert bool((message == FILLING).all())


@pytest.mark.parametrize("cut", [(0, 70), (0, 640), (33, 640)], ids=str)
def test_masters_that_are_not_there_are_zero(library: ctypes.CDLL, cut: tuple[int, int]) -> None:
    """Slots are known on the device: columns that a table lacks, on either side, are not read."""
    case, backend, (first, past) = Case(single(10), "mixed", "cpu"), GpuLibrary(library), cut
    whole = case.masters(0)
    there = FencedMemory(at_end=True).tensor(past - first, torch.float32)[None]
    there.copy_(whole.table[:, first:past])
    whole.table[:, : 64 if first else 0] = 0.0  # a block that does not begin in the table
    whole.table[:, past:] = 0.0
    change = OPS.assess_changes(whole, case.codes, case.part)
    check_assessed(backend, Masters(there, whole.first + first, 0), case.codes, case, change)


BAD: list[tuple[str, dict[str, int], int]] = [
    ("codes", {"block": 96}, BAD_SPEC),
    ("codes", {"block": 1}, BAD_SPEC),
    ("codes", {"held": 0}, BAD_SIZE),
    ("codes", {"slots": 0}, BAD_SIZE),
    ("codes", {"slot_of": 0}, BAD_SIZE),
    ("codes", {"columns": 39}, BAD_SIZE),
    ("codes", {"nbytes": 40 * 64 - 1}, BAD_SIZE),
    ("part", {"begin": -1}, BAD_SIZE),
    ("part", {"begin": 41}, BAD_SIZE),
    ("part", {"rows": -1}, BAD_SIZE),
    ("part", {"rows": 2**40}, BAD_SIZE),
    ("part", {"members": 0}, BAD_SIZE),
    ("masters", {"data": 0}, BAD_SIZE),
    ("masters", {"member": 1}, BAD_SIZE),
    ("masters", {"row_stride": -1}, BAD_SIZE),
    ("masters", {"columns": -1}, BAD_SIZE),
    ("change", {"ends": 0}, BAD_SIZE),
    ("change", {"steps": 0}, BAD_SIZE),
    ("messages", {"nbytes": 255}, BAD_SIZE),
    ("messages", {"members": 2, "inner": 2}, BAD_SIZE),
    ("messages", {"sources": 2}, BAD_SIZE),
    ("messages", {"without_member": 1}, BAD_SIZE),
]


class Call:
    """Valid arguments of all three functions, of 40 blocks, and what may be wrong with them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._backend, self._case = GpuLibrary(library), Case(single(40), "none", "cpu")
        masters, part = self._case.masters(0), self._case.part
        self._change = OPS.assess_changes(masters, self._case.codes, part)
        size = message_bytes(self._case.codes, self._change)
        self._message = OPS.encode_changes(masters, self._case.codes, part, self._change, size)
        self._masters, self._sizes = masters, torch.empty_like(self._change.ends)
        c = c_types.c_masters(masters), c_types.c_codes(self._case.codes), c_types.c_part(part)
        self.with_: dict[str, Any] = dict(zip(("masters", "codes", "part"), c, strict=True))
        self.with_ |= {"change": c_types.c_change(self._change), "shift": 0}
        self.with_["messages"] = c_types.c_messages(Messages(self._message.view(1, 1, 1, -1)))

    def statuses(self) -> dict[str, int]:
        """What assess, emit and apply return."""
        a, at = self.with_, self._message.data_ptr() + self.with_["shift"]
        own = a["masters"], a["codes"], a["part"]
        change = self._change
        into = [x.data_ptr() for x in (change.scales, change.counts, change.steps, self._sizes)]
        return {
            "assess": self._backend.status_of("codes_assess", *own, *into),
            "emit": self._backend.status_of("codes_emit", *own, a["change"], at, a["messages"].nbytes),
            "apply": self._backend.status_of("codes_apply", a["messages"], *own[1:]),
        }


TAKES = {"masters": ("assess", "emit"), "change": ("emit",), "messages": ("apply",)}


@pytest.mark.parametrize(("which", "fields", "expected"), BAD, ids=str)
def test_refusals(library: ctypes.CDLL, which: str, fields: dict[str, int], expected: int) -> None:
    """What does not fit together is said, without a launch, by each function that can see it."""
    call = Call(library)
    assert set(call.statuses().values()) == {OK}
    for name, value in fields.items():
        setattr(call.with_[which], name, value)
    found = call.statuses()
    assert {found[name] for name in TAKES.get(which, found)} == {expected}


def test_refusals_of_addresses(library: ctypes.CDLL) -> None:
    """Codes and messages lie at multiples of 16 bytes."""
    call = Call(library)
    call.with_["codes"].held += 8
    call.with_["codes"].nbytes -= 8
    assert set(call.statuses().values()) == {BAD_ALIGNMENT}
    call = Call(library)
    call.with_["messages"].data += 8
    call.with_["shift"] = 8
    assert call.statuses() == {"assess": OK, "emit": BAD_ALIGNMENT, "apply": BAD_ALIGNMENT}
