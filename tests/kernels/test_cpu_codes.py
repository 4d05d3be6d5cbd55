# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Codes by the CPU kernels, every instruction set: the reference's bits, however the work is split.

What is malformed is refused, and nothing is touched; test_cpu_sanitizers.py runs these tests under AddressSanitizer.
"""

from __future__ import annotations

import ctypes
import shutil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import cpu_library, golden_codes
from tests.kernels.c_types import c_change, c_codes, c_masters, c_messages, c_part
from tests.kernels.cpu_library import CpuKernels, Range
from zero_topo.quant.messages import Messages
from zero_topo.quant.trits import TritSpec

OK, BAD_SPEC, _, BAD_SIZE, BAD_RANGE, BAD_LEVEL = range(6)
FUNCTIONS = ("assess", "emit", "apply")


@pytest.mark.parametrize("fate", golden_codes.FATES)
@pytest.mark.parametrize("cuts", [1, 9])
def test_codes_have_the_references_bits(library: ctypes.CDLL, level: int, fate: str, cuts: int) -> None:
    """Blocks of every kind and size, numbers of them around those of a group and a chunk, in any number of calls."""
    backend = CpuKernels(library, level, cuts)
    for layout in (*golden_codes.RAGGED, *golden_codes.SINGLE):
        golden_codes.check_codes(backend, layout, fate)


def test_all_bytes_that_trits_may_come_in(library: ctypes.CDLL, level: int) -> None:
    """Each byte's five digits."""
    golden_codes.check_extremes(CpuKernels(library, level, cuts=3))


def test_clang_builds_the_same_kernels() -> None:
    """Another compiler vectorises the loops in its own way."""
    if shutil.which("clang++") is None:
        pytest.skip("clang++ is not installed")
    library = cpu_library.load(cpu_library.build("clang++"))
    for level in range(library.zt_cpu_best_level() + 1):
        golden_codes.check_codes(CpuKernels(library, level), golden_codes.RAGGED[2], "mixed")


class Calls:
    """A valid call of each function: arguments by name, and the memory that they point to."""

    def __init__(self) -> None:
        layout = golden_codes.ragged(64)
        case = golden_codes.Case(layout, "mixed", "cpu")
        masters, codes, part = case.masters(1), case.copy(), case.part
        change = golden_codes.OPS.assess(masters, codes, part)
        nbytes = TritSpec(64).nbytes(part.blocks, int(change.count))
        message = golden_codes.OPS.emit(masters, case.copy(), part, change, nbytes)
        self.table = message.expand(*layout.members, -1).contiguous()
        self.before = TritSpec(64).before_offset(part.blocks)
        scales, escaped = torch.zeros(part.blocks), torch.zeros(part.blocks, dtype=torch.bool)
        self.memory = [codes.held, self.table, scales, escaped, message]
        self.held, self.order, self.count = codes.held, change.order, change.count
        self.slots, self.slot_of, self._kept = codes.slots, codes.slot_of, (masters, change)
        held, own = {"codes": c_codes(codes), "part": c_part(part)}, {"masters": c_masters(masters)}
        out = {"scales": scales.data_ptr(), "escaped": escaped.data_ptr()}
        written = {"message": message.data_ptr(), "nbytes": nbytes}
        some, everyone = (Range(3, part.blocks * members - 3) for members in (1, part.members))
        self.arguments: dict[str, dict[str, Any]] = {
            "assess": {**own, **held, **out, "range": some, "level": -1},
            "emit": {**own, **held, "change": c_change(change), **written, "range": some, "level": -1},
            "apply": {"messages": c_messages(Messages(self.table[None])), **held, "range": everyone, "level": -1},
        }

    def status(self, library: ctypes.CDLL, name: str) -> int:
        """Make the call."""
        return int(getattr(library, f"zt_cpu_codes_{name}")(*self.arguments[name].values()))

    def refused(self, library: ctypes.CDLL, name: str) -> int:
        """Make a call that touches nothing."""
        before = [memory.clone() for memory in self.memory]
        status = self.status(library, name)
        assert all(torch.equal(now, then) for now, then in zip(self.memory, before, strict=True))
        return status


FAR = [-1, 2**56 + 1, 2**63 - 1, -(2**63)]
WRONG: list[tuple[str, str, int, list[Any]]] = [
    ("codes", "block", BAD_SPEC, [0, 1, 32, 100, 4096, -64]),
    ("codes", "nbytes", BAD_SIZE, [0, 1000, *FAR]),
    ("codes", "columns", BAD_SIZE, [0, 12, -1]),
    ("codes", "count", BAD_SIZE, [0, 3, -1]),
    *(("codes", name, BAD_SIZE, [None]) for name in ("held", "slots", "slot_of")),
    ("part", "begin", BAD_SIZE, [14, *FAR]),
    ("part", "end", BAD_SIZE, [0, 15, *FAR]),
    ("part", "rows", BAD_SIZE, [4, *FAR]),
    ("part", "members", BAD_SIZE, [0, 7, *FAR]),
    ("masters", "data", BAD_SIZE, [None]),
    ("masters", "row_stride", BAD_SIZE, [1, *FAR]),
    ("masters", "columns", BAD_SIZE, [10, *FAR]),
    ("masters", "first", BAD_SIZE, [72, 1000, *FAR]),
    ("masters", "member", BAD_SIZE, [-1, 6]),
    *(("change", name, BAD_SIZE, [None]) for name in ("scales", "order", "count")),
    ("messages", "sources", BAD_SIZE, [0, 2]),
    ("messages", "members", BAD_SIZE, [-1, 0, 5]),
    ("messages", "inner", BAD_SIZE, [0]),
    ("messages", "without_source", BAD_SIZE, [0, 1]),
    ("messages", "without_member", BAD_SIZE, [-2, 6]),
    ("messages", "nbytes", BAD_SIZE, [0, 300, -1]),
    ("messages", "data", BAD_SIZE, [None]),
    ("messages", "outer_step", BAD_SIZE, FAR[1:]),
    ("range", "begin", BAD_RANGE, [-1, 2**40]),
    ("range", "end", BAD_RANGE, [2, 2**40, -1]),
    *((name, "", BAD_SIZE, [None]) for name in ("scales", "escaped", "message")),
    ("nbytes", "", BAD_SIZE, [0, -1, 300]),
    ("level", "", BAD_LEVEL, [-2, 3]),
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_wrong_argument_is_refused(library: ctypes.CDLL, name: str) -> None:
    """Any argument or field out of its bounds gives its status; undamaged the call is accepted."""
    assert Calls().status(library, name) == OK
    for argument, field, status, values in WRONG:
        for value in values if argument in Calls().arguments[name] else []:
            calls = Calls()
            if field:
                setattr(calls.arguments[name][argument], field, value)
            else:
                calls.arguments[name][argument] = value
            assert calls.refused(library, name) == status, (argument, field, value)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tables_that_lead_out_of_bounds_are_refused(library: ctypes.CDLL, name: str) -> None:
    """No slot may end beyond what is held or, where masters are read, their columns; nor may an order, or a count."""
    damages: list[tuple[str, Any, list[int]]] = [("slot_of", 4, [-1, 6, 2**31 - 1])]
    damages += [("slots", (1, column), [-1, 2**57, 2**63 - 1]) for column in range(6)]
    damages += [("slots", (0, 0), [10_000]), ("slots", (0, 1), [100_000]), ("slots", (1, 3), [0, 12])]
    damages += [("slots", (1, 4), [0, 5000])] if name != "apply" else []
    damages += [("order", 7, [-1, 36, 2**62]), ("count", 0, [-1, 37, 2**62])] if name == "emit" else []
    for table, place, values in damages:
        for value in values:
            calls = Calls()
            getattr(calls, table)[place] = value
            assert calls.refused(library, name) == BAD_SIZE, (table, place, value)


DAMAGES: dict[str, tuple[int, int]] = {
    "more blocks escape than fit": (0, 30),
    "more blocks escape than there are": (0, -1),
    "fewer escape than are marked": (0, 3),
    "others are marked": (32, -1),
    "the count is too high": (-1, 1),
    "the count is negative": (-1, -1),
}
"""Words of a message, -1 for the first count, and what they become."""


@pytest.mark.parametrize("kind", DAMAGES)
def test_messages_that_contradict_themselves_are_refused(library: ctypes.CDLL, kind: str) -> None:
    """Before anything changes, also of the messages before it."""
    calls, (word, value) = Calls(), DAMAGES[kind]
    calls.table[1, 0].view(torch.int32)[word if word >= 0 else calls.before // 4] = value
    assert calls.refused(library, "apply") == BAD_SIZE


def test_counts_that_disagree_with_the_mask_are_refused(library: ctypes.CDLL) -> None:
    """Each chunk's count is what the chunks before it say, though another would lead nowhere out of bounds."""
    case = golden_codes.Case(golden_codes.single(321), "mixed", "cpu")
    own, codes = case.masters(0), case.copy()
    change = golden_codes.OPS.assess(own, codes, case.part)
    message = golden_codes.OPS.emit(own, case.copy(), case.part, change, TritSpec(64).nbytes(321, int(change.count)))
    before = codes.held.clone()
    message.view(torch.int32)[TritSpec(64).before_offset(321) // 4 + 2] += 1
    with pytest.raises(ValueError, match="a size is negative, or a message"):
        CpuKernels(library).codes_apply(Messages(message.view(1, 1, 1, -1)), codes, case.part)
    assert torch.equal(codes.held, before)


@given(seed=st.integers(0, 2**31), places=st.lists(st.integers(0, 10_000), max_size=8), level=st.integers(0, 2))
def test_messages_of_any_bytes(library: ctypes.CDLL, seed: int, places: list[int], level: int) -> None:
    """Whatever bytes come, nothing out of bounds is read or written, and other block columns stay as they are."""
    calls = Calls()
    flat = calls.table.view(-1)
    for place in places:
        flat[place * 37 % flat.numel()] = (seed + place) % 256
    calls.arguments["apply"]["level"] = min(level, library.zt_cpu_best_level())
    before = calls.held[:64].clone()
    assert calls.status(library, "apply") in (OK, BAD_SIZE)
    assert torch.equal(calls.held[:64], before), "a block column that the part leaves out"
