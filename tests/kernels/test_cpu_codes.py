# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Codes by the CPU kernels, every instruction set: the reference's bits, however the work is split.

What is malformed is refused, and nothing is touched; test_cpu_sanitizers.py runs these tests under
AddressSanitizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import golden_codes
from tests.kernels.operators import LEVELS, Operators, limited
from zero_topo.quant.operands import Messages
from zero_topo.quant.operators import OPS

FUNCTIONS = ("codes_assess", "codes_emit", "codes_apply")
Damage = tuple[int, Callable[[Any], Any]]
"""The place of an argument, and what makes it wrong."""


@pytest.mark.parametrize("fate", golden_codes.FATES)
def test_codes_have_the_references_bits(split: Operators, fate: str) -> None:
    """Blocks of every kind and size, numbers of them around those of a chunk."""
    for layout in (*golden_codes.RAGGED, *golden_codes.SINGLE):
        golden_codes.check_codes(split, layout, fate)


def test_all_bytes_that_changes_may_come_in(split: Operators) -> None:
    """Lists of every byte, masks of every size."""
    golden_codes.check_extremes(split)


class Calls:
    """A valid call of each operator, and the memory that it touches."""

    def __init__(self) -> None:
        layout = golden_codes.ragged(64)
        case = golden_codes.Case(layout, "mixed", "cpu")
        masters, codes = case.masters(1), case.copy()
        change = golden_codes.OPS.assess_changes(masters, codes)
        nbytes = golden_codes.message_bytes(codes, change)
        message = golden_codes.OPS.encode_changes(masters, case.copy(), change, nbytes)
        self.table = message.expand(*layout.members, -1).contiguous()
        made = golden_codes.empty_change(case)
        assessed = made.scales, made.counts, made.steps, made.ends
        self.memory = [codes.stored, self.table, *assessed, message]
        self.stored, self.counts, self.ends = codes.stored, change.counts, change.ends
        self.param_indices, self.param_index_of = codes.param_indices, codes.param_index_of
        own = [masters.table, [masters.first, masters.member]]
        stored = tuple(codes)
        self.arguments: dict[str, list[Any]] = {
            "codes_assess": [*own, *stored, *assessed],
            "codes_emit": [
                *own,
                *stored,
                change.scales,
                change.counts,
                change.steps,
                change.ends,
                message,
            ],
            "codes_apply": [self.table[None], -1, *stored],
        }

    def make(self, name: str) -> None:
        """Make the call."""
        getattr(OPS, name).default(*self.arguments[name])

    def check_refused(self, name: str, what: Any = "") -> None:
        """Make a call that touches nothing."""
        before = [memory.clone() for memory in self.memory]
        with pytest.raises(RuntimeError):
            self.make(name)
        assert all(torch.equal(now, then) for now, then in zip(self.memory, before, strict=True)), (
            what
        )

    def check_each_refused(self, name: str, damages: Iterable[Damage]) -> None:
        """Damage one argument after the other; undamaged the call is accepted."""
        arguments = self.arguments[name]
        for place, damage in damages:
            whole, arguments[place] = arguments[place], damage(arguments[place])
            self.check_refused(name, (place, arguments[place]))
            arguments[place] = whole
        self.make(name)


FAR = [-1, 2**56 + 1, 2**63 - 1, -(2**63)]
PART = [[0, 1, 32, 96, 100, 4096, -64], [14, *FAR], [0, 15, *FAR], [4, *FAR], [0, *FAR]]
"""Wrong values of each number of a part."""


def put(index: int, value: int) -> Callable[[list[int]], list[int]]:
    """Another number in a list of them."""
    return lambda numbers: [*numbers[:index], value, *numbers[index + 1 :]]


def wrong(name: str) -> Iterator[Damage]:
    """What is wrong whatever stands in the tables of parameters."""
    yield from ((2, lambda stored: stored[:1000]), (4, lambda param_index_of: param_index_of[:12]))
    yield from ((place, lambda x: x[:0].clone()) for place in (2, 3, 4))
    yield from ((5, put(index, value)) for index, values in enumerate(PART) for value in values)
    if name == "codes_apply":
        yield from ((1, lambda _, value=value: value) for value in (-2, 6))
        yield from ((0, lambda table: table[..., :255]), (0, lambda table: table[:, :1]))
        yield 0, lambda table: table.repeat(2, 1, 1, 1)
        return
    yield from ((1, put(1, value)) for value in (-1, 6))
    yield from (
        (place, lambda x: x[:0].clone()) for place in (0, *((8, 9) if name == "codes_emit" else ()))
    )


def wrong_by_the_tables(name: str) -> Iterator[Damage]:
    """What is wrong only because of where the parameters lie."""
    yield from ((3, lambda param_indices: param_indices[:3]), (5, put(4, 7)))
    if name == "codes_apply":
        yield 0, lambda table: table[..., :300]
        return
    yield from ((1, put(0, value)) for value in (72, 1000, *FAR))
    yield 0, lambda masters: masters[:, :10]
    if name == "codes_emit":
        yield 10, lambda message: message[:300]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_wrong_argument_is_refused(whole: Operators, name: str) -> None:
    """Any number out of its bounds, and tables that are too small; undamaged the call is
    accepted.
    """
    Calls().check_each_refused(name, (*wrong(name), *wrong_by_the_tables(name)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tables_that_lead_out_of_bounds_are_refused(whole: Operators, name: str) -> None:
    """No parameter may end beyond what is stored or, where masters are read, their columns; nor may
    changes.
    """
    damages: list[tuple[str, Any, list[int]]] = [("param_index_of", 4, [-1, 6, 2**31 - 1])]
    damages += [("param_indices", (1, column), [-1, 2**57, 2**63 - 1]) for column in range(6)]
    damages += [
        ("param_indices", (0, 0), [10_000]),
        ("param_indices", (0, 1), [100_000]),
        ("param_indices", (1, 3), [0, 12]),
    ]
    damages += [("param_indices", (1, 4), [0, 5000])] if name != "codes_apply" else []
    ends = [-1, 37, 2**62]
    emitted: list[tuple[str, Any, list[int]]] = [
        ("ends", (-1, 0), ends),
        ("ends", (-1, 1), [-1, 2**40, 2**62]),
    ]
    emitted += [
        ("ends", (7, 0), ends),
        ("ends", (7, 1), [-1, 2**40, 2**62]),
        ("counts", (8, 0), [65, 254]),
    ]
    damages += emitted if name == "codes_emit" else []
    calls = Calls()
    for table, place, values in damages:
        memory = getattr(calls, table)
        whole = memory[place].clone()
        for value in values:
            memory[place] = value
            calls.check_refused(name, (table, place, value))
        memory[place] = whole


DAMAGES: dict[str, tuple[int, int]] = {
    "more blocks are sent whole than fit": (-2, 30),
    "more blocks are sent whole than there are": (-2, -1),
    "fewer are sent whole than counted": (-2, 3),
    "there are more changes than counted": (-1, 2000),
    "there are fewer changes than counted": (-1, 3),
    "there are more changes before the last chunk": (1, 2000),
    "more blocks were sent whole before": (0, 33),
    "a tile has more changes than values": (32, 0x41),
    "only one count changed": (32, 0x3F3F3F3F),
}
"""Words of a message, from the end of its ends if negative, and what they become."""


@pytest.mark.parametrize("kind", DAMAGES)
def test_messages_that_contradict_themselves_are_refused(whole: Operators, kind: str) -> None:
    """Before anything changes, also of the messages before it."""
    calls, (word, value) = Calls(), DAMAGES[kind]
    calls.table[1, 0].view(torch.int32)[word if word >= 0 else 4 + word] = value
    calls.check_refused("codes_apply")


def test_ends_that_disagree_with_counts_are_refused(whole: Operators) -> None:
    """Each chunk's ends are what its counts say, though others would lead nowhere out of bounds."""
    case = golden_codes.Case(golden_codes.single(321), "mixed", "cpu")
    own, codes = case.masters(0), case.copy()
    change = golden_codes.OPS.assess_changes(own, codes)
    message = golden_codes.OPS.encode_changes(
        own, case.copy(), change, golden_codes.message_bytes(codes, change)
    )
    before = codes.stored.clone()
    for number in (4, 5):
        message.view(torch.int32)[number] += 1
        with pytest.raises(RuntimeError, match="a size is negative, or a message"):
            whole.codes_apply(Messages(message.view(1, 1, 1, -1)), codes)
        assert torch.equal(codes.stored, before)
        message.view(torch.int32)[number] -= 1


@given(
    seed=st.integers(0, 2**31),
    places=st.lists(st.integers(0, 10_000), max_size=8),
    level=st.sampled_from([*LEVELS]),
)
def test_messages_of_any_bytes(
    module: ModuleType, seed: int, places: list[int], level: str
) -> None:
    """Whatever bytes come, nothing out of bounds is read or written, and other block columns stay
    as they are.
    """
    calls = Calls()
    flat = calls.table.view(-1)
    for place in places:
        flat[place * 37 % flat.numel()] = (seed + place) % 256
    before = calls.stored[:64].clone()
    with (
        limited(module, min(LEVELS[level], module.best_level())),
        contextlib.suppress(RuntimeError),
    ):
        calls.make("codes_apply")
    assert torch.equal(calls.stored[:64], before), "a block column that the part leaves out"
