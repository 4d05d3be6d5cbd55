# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What is malformed is refused and nothing is touched; whatever bytes a message of INT8 weights
holds, nothing beyond it is read.

test_sanitizers.py runs these tests under AddressSanitizer, which sees every access that is out of
bounds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels import golden_codes
from tests.kernels.backends import CPU
from tests.kernels.operators import Operators
from zero_topo.quant import ops
from zero_topo.quant.operands import Messages, from_sources, to_members
from zero_topo.quant.operators import OPS
from zero_topo.quant.spec import BlockSpec

OURS = ("scalar", "wave32")
ours = pytest.mark.parametrize("backend", OURS, indirect=True)
cpu = pytest.mark.parametrize("backend", CPU, indirect=True)
FILLING = 0xA5
NUMEL, SOURCES, MEMBERS = 300, 2, 2
SPEC = BlockSpec("int8")
FUNCTIONS = ("quantize", "dequantize_reduce", "requantize")


def buffer(nbytes: int) -> Tensor:
    """Bytes of exactly that many, with a recognisable filling."""
    return torch.full((nbytes,), FILLING, dtype=torch.uint8)


def valid(name: str) -> dict[str, Any]:
    """Arguments of one of the operators on messages, by name, in order."""
    nbytes, third = SPEC.nbytes(NUMEL), NUMEL // 3
    flats, shapes = [buffer(4 * MEMBERS * NUMEL).view(torch.float32)], [3, *[third] * 3, NUMEL]
    came = buffer(SOURCES * MEMBERS * nbytes).view(SOURCES, 1, MEMBERS, nbytes)
    out = buffer(MEMBERS * nbytes).view(1, 1, MEMBERS, nbytes)
    pieces, code = {"flats": flats, "shapes": shapes}, list(SPEC.code)
    left_out = {"without_source": -1, "without_member": -1}
    sums = {"messages": came, "without_source": -1, "source": code, "out": out}
    return {
        "quantize": {**pieces, "format": code, "messages": out, "without_member": -1},
        "dequantize_reduce": {
            **{"messages": came, **left_out, "format": code},
            **{**pieces, "factor": 1.0, "accumulate": False},
        },
        "requantize": {
            **{**sums, "without_member": -1, "format": list(code)},
            **{"numel": NUMEL, "factor": 1.0},
        },
    }[name]


def make(name: str, arguments: Mapping[str, Any]) -> None:
    """Make a call."""
    getattr(OPS, name).default(*arguments.values())


Damage = st.SearchStrategy[Callable[[Any], Any]]


def put(index: int, values: st.SearchStrategy[int]) -> Damage:
    """Another number in a list of them."""
    return values.map(
        lambda value: lambda numbers: [*numbers[:index], value, *numbers[index + 1 :]]
    )


def others(*known: int) -> st.SearchStrategy[int]:
    """Numbers of 32 bits that are none of the known ones."""
    return st.integers(-(2**31), 2**31 - 1).filter(lambda n: n not in known)


def instead(values: st.SearchStrategy[int]) -> Damage:
    """Another number."""
    return values.map(lambda value: lambda _: value)


def misfits(values: Callable[[int], int]) -> st.SearchStrategy[int]:
    """Numbers n such that values(n) values do not fill a message as long as the one that is
    given.
    """
    nbytes = SPEC.nbytes(NUMEL)
    return st.integers(-(2**63), 2**63 - 1).filter(
        lambda n: n < 0 or SPEC.nbytes(values(n)) != nbytes
    )


NEGATIVE, WIDTH = st.integers(-(2**63), -1), NUMEL // 3
FORMATS = put(0, others(8)) | put(1, others(64)) | put(2, others(0))
TABLES: Damage = st.sampled_from(
    [
        lambda table: table[..., :-1],
        lambda table: table[:0],
        lambda table: table[0],
        lambda table: table.view(torch.int8),
    ]
)
DAMAGES: dict[str, Damage] = {
    "flats": st.sampled_from(
        [lambda flats: [], lambda flats: [flats[0].double()], lambda flats: 2 * flats]
    ),
    "shapes": put(0, misfits(lambda rows: rows * WIDTH))
    | put(1, misfits(lambda columns: 3 * columns))
    | put(2, NEGATIVE | st.integers(WIDTH + 1, 2**63 - 1))
    | put(3, st.integers(-(2**63), WIDTH - 1))
    | put(4, NEGATIVE)
    | st.just(lambda shapes: shapes[:4]),
    "format": FORMATS,
    "source": FORMATS,
    "messages": TABLES,
    "out": TABLES,
    "without_source": instead(others(-1, *range(SOURCES))),
    "without_member": instead(others(-1, *range(MEMBERS))),
    "numel": instead(misfits(lambda numel: numel)),
}
FAR = put(3, st.integers(2**56 // 3 + 1, 2**63 - 1))
FAR |= put(4, st.integers(2**56 // MEMBERS + 1, 2**63 - 1))
"""Strides beyond what the CPU's kernels compute with."""


@ours
@pytest.mark.parametrize("name", FUNCTIONS)
@given(data=st.data())
def test_one_wrong_argument_is_refused(backend: Operators, name: str, data: st.DataObject) -> None:
    """Any argument out of its bounds is an error, and no byte changes; undamaged the call is
    accepted.
    """
    damages = dict(DAMAGES)
    if backend.name == "scalar":
        damages["shapes"] |= FAR
    arguments = valid(name)
    wrong = data.draw(st.sampled_from([argument for argument in arguments if argument in damages]))
    memory = [*arguments.get("flats", ())]
    memory += [x for x in arguments.values() if isinstance(x, Tensor)]
    arguments[wrong] = data.draw(damages[wrong])(arguments[wrong])
    before = [tensor.clone() for tensor in memory]
    with pytest.raises(RuntimeError):
        make(name, arguments)
    for now, then in zip(memory, before, strict=True):
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))
    make(name, valid(name))


LIMIT = 2**56
HUGE = ((2**62, 4, 4, 4), (2**40, 2**20, 2**20, 2**20), (2, 8, 8, 2**62), (1, LIMIT + 1, 0, 0))
"""Rows x columns overflow, more values than fit any machine, strides overflow, one value too
many.
"""


@ours
def test_what_does_not_fit_together_is_refused(backend: Operators) -> None:
    """A float's type and its bits belong together; casts, block sizes, members and sources do not
    mix; nothing else has blocks of one value; a sketch has three rows at least.

    Products and sums of sizes are checked before anything is computed from them.
    """
    made, came, again = (valid(name) for name in FUNCTIONS)
    half, whole = (
        {"messages": (x := buffer(n).view(1, 1, 1, -1)), "out": x.clone()} for n in (2 * NUMEL, 768)
    )
    blocks = {"source": (8, 512, 0), "format": (8, 256, 0), "numel": 512}
    refused = [
        ("requantize", again | half | {"source": (16, 1, 1), "format": (16, 1, 2)}),
        ("requantize", again | whole | blocks),
        ("requantize", again | {"messages": again["messages"][:, :, :1]}),
        ("quantize", made | {"messages": came["messages"]}),
        ("dequantize_reduce", came | {"messages": came["messages"][:1], "without_source": 0}),
        ("count_above", {"x": torch.ones(300).double(), "threshold": 1.0}),
        ("sketch_insert", {"x": torch.ones(1, 300), "seed": 1, "out": torch.zeros(1, 2, 1024)}),
    ]
    for code in ((8, 1, 0), (16, 1, 0), (32, 1, 1), (16, 1, 3), (16, 2, 1)):
        cast = {"flats": [torch.zeros(NUMEL)], "shapes": [1, NUMEL, NUMEL, 0, 0], "format": code}
        table = buffer(NUMEL * code[0] // 8).view(1, 1, 1, -1)
        refused.append(("quantize", made | cast | {"messages": table}))
    for shapes in (*([*shape, 0] for shape in HUGE), 2 * [1, LIMIT, LIMIT, LIMIT, 0]):
        flats = came["flats"] * (len(shapes) // 5)
        refused.append(("dequantize_reduce", came | {"flats": flats, "shapes": shapes}))
    for name, arguments in refused:
        with pytest.raises(RuntimeError, match="zero_topo kernels: "):
            make(name, arguments)


@ours
def test_a_message_of_the_wrong_size_is_not_read(backend: Operators) -> None:
    """The binding says which rule it breaks."""
    short = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="zero_topo kernels: "):
        backend.requantize(from_sources(short[None]), SPEC, SPEC, to_members(buffer(384)), 3)
    with pytest.raises(ValueError, match="384"):
        ops.dequantize(short, SPEC, torch.empty(3))


# -- INT8 weights ----------------------------------------------------------------------------------

CODES = ("codes_assess", "codes_emit", "codes_apply")
Wrong = tuple[int, Callable[[Any], Any]]
"""The place of an argument, and what makes it wrong."""


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
            "codes_emit": [*own, *stored, *change, message],
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
        for now, then in zip(self.memory, before, strict=True):
            assert torch.equal(now, then), what

    def check_each_refused(self, name: str, damages: Iterable[Wrong]) -> None:
        """Damage one argument after the other; undamaged the call is accepted."""
        arguments = self.arguments[name]
        for place, damage in damages:
            whole, arguments[place] = arguments[place], damage(arguments[place])
            self.check_refused(name, (place, arguments[place]))
            arguments[place] = whole
        self.make(name)


BEYOND = [-1, 2**56 + 1, 2**63 - 1, -(2**63)]
PART = [
    [0, 1, 32, 96, 100, 4096, -64],
    [14, *BEYOND],
    [0, 15, *BEYOND],
    [4, *BEYOND],
    [0, *BEYOND],
]
"""Wrong values of each number of a part."""


def numbered(index: int, value: int) -> Callable[[list[int]], list[int]]:
    """Another number in a list of them."""
    return lambda numbers: [*numbers[:index], value, *numbers[index + 1 :]]


def wrong(name: str) -> Iterator[Wrong]:
    """What is wrong whatever stands in the tables of parameters."""
    yield from ((2, lambda stored: stored[:1000]), (4, lambda param_index_of: param_index_of[:12]))
    empty = (2, 3, 4) if name == "codes_apply" else (0, 2, 3, 4)
    yield from ((place, lambda x: x[:0].clone()) for place in empty)
    for index, values in enumerate(PART):
        yield from ((5, numbered(index, value)) for value in values)
    if name == "codes_apply":
        yield from ((1, lambda _, value=value: value) for value in (-2, 6))
        yield from ((0, lambda table: table[..., :255]), (0, lambda table: table[:, :1]))
        yield 0, lambda table: table.repeat(2, 1, 1, 1)
        return
    yield from ((1, numbered(1, value)) for value in (-1, 6))
    if name == "codes_emit":
        yield from ((place, lambda x: x[:0].clone()) for place in (8, 9))


def wrong_by_the_tables(name: str) -> Iterator[Wrong]:
    """What is wrong only because of where the parameters lie, which is known on the device."""
    yield from ((3, lambda param_indices: param_indices[:3]), (5, numbered(4, 7)))
    if name == "codes_apply":
        yield 0, lambda table: table[..., :300]
        return
    yield from ((1, numbered(0, value)) for value in (72, 1000, *BEYOND))
    yield 0, lambda masters: masters[:, :10]
    if name == "codes_emit":
        yield 10, lambda message: message[:300]


@ours
@pytest.mark.parametrize("name", CODES)
def test_one_wrong_argument_of_codes_is_refused(backend: Operators, name: str) -> None:
    """Any number out of its bounds, and tables that are too small; undamaged the call is
    accepted.
    """
    by_tables = wrong_by_the_tables(name) if backend.name == "scalar" else ()
    Calls().check_each_refused(name, (*wrong(name), *by_tables))


@pytest.mark.parametrize("backend", ["wave32"], indirect=True)
@pytest.mark.parametrize(
    ("name", "place"), [*((name, 2) for name in CODES), ("codes_emit", 10), ("codes_apply", 0)]
)
def test_misaligned_memory_is_refused(backend: Operators, name: str, place: int) -> None:
    """Codes and messages lie at multiples of 16 bytes."""
    calls = Calls()
    x = calls.arguments[name][place]
    calls.arguments[name][place] = torch.cat([x.new_zeros(8), x.view(-1)])[8:].view(x.shape)
    calls.check_refused(name)


@cpu
@pytest.mark.parametrize("name", CODES)
def test_tables_that_lead_out_of_bounds_are_refused(backend: Operators, name: str) -> None:
    """No parameter may end beyond what is stored or, where masters are read, their columns; nor may
    changes.
    """
    damages: list[tuple[str, Any, list[int]]] = [("param_index_of", 4, [-1, 6, 2**31 - 1])]
    damages += [("param_indices", (1, column), [-1, 2**57, 2**63 - 1]) for column in range(6)]
    damages += [("param_indices", (0, 0), [10_000]), ("param_indices", (0, 1), [100_000])]
    damages.append(("param_indices", (1, 3), [0, 12]))
    if name != "codes_apply":
        damages.append(("param_indices", (1, 4), [0, 5000]))
    if name == "codes_emit":
        for block in (-1, 7):
            damages.append(("ends", (block, 0), [-1, 37, 2**62]))
            damages.append(("ends", (block, 1), [-1, 2**40, 2**62]))
        damages.append(("counts", (8, 0), [65, 254]))
    calls = Calls()
    for table, place, values in damages:
        memory = getattr(calls, table)
        whole = memory[place].clone()
        for value in values:
            memory[place] = value
            calls.check_refused(name, (table, place, value))
        memory[place] = whole


CONTRADICTIONS: dict[str, tuple[int, int]] = {
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


@cpu
def test_messages_that_contradict_themselves_are_refused(backend: Operators) -> None:
    """Before anything changes, also of the messages before it."""
    calls = Calls()
    words = calls.table[1, 0].view(torch.int32)
    whole = words.clone()
    for kind, (word, value) in CONTRADICTIONS.items():
        words[word if word >= 0 else 4 + word] = value
        calls.check_refused("codes_apply", kind)
        words.copy_(whole)


@cpu
def test_ends_that_disagree_with_counts_are_refused(backend: Operators) -> None:
    """Each chunk's ends are what its counts say, though others would lead nowhere out of bounds."""
    case = golden_codes.Case(golden_codes.single(321), "mixed", "cpu")
    own, codes = case.masters(0), case.copy()
    change = golden_codes.OPS.assess_changes(own, codes)
    nbytes = golden_codes.message_bytes(codes, change)
    message = golden_codes.OPS.encode_changes(own, case.copy(), change, nbytes)
    before = codes.stored.clone()
    for number in (4, 5):
        message.view(torch.int32)[number] += 1
        with pytest.raises(RuntimeError, match="zero_topo kernels: "):
            backend.codes_apply(Messages(message.view(1, 1, 1, -1)), codes)
        assert torch.equal(codes.stored, before)
        message.view(torch.int32)[number] -= 1


@cpu
@given(seed=st.integers(0, 2**31), places=st.lists(st.integers(0, 10_000), max_size=8))
def test_messages_of_any_bytes(backend: Operators, seed: int, places: list[int]) -> None:
    """Whatever bytes come, nothing out of bounds is read or written, and other block columns stay
    as they are.
    """
    calls = any_calls()
    whole = calls.table.clone()
    flat = calls.table.view(-1)
    for place in places:
        flat[place * 37 % flat.numel()] = (seed + place) % 256
    before = calls.stored[:64].clone()
    with contextlib.suppress(RuntimeError):
        calls.make("codes_apply")
    assert torch.equal(calls.stored[:64], before), "a block column that the part leaves out"
    calls.table.copy_(whole)


any_calls = cache(Calls)
