# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What is malformed is refused and nothing is touched; whatever bytes a message of INT8 weights
holds, nothing beyond it is read.

test_sanitizers.py runs these tests under AddressSanitizer, which sees every access that is out of
bounds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.kernels import golden_codes
from tests.kernels.backends import CPU
from tests.kernels.golden import copied
from tests.kernels.operators import REFERENCE, Operators
from zero_topo.quant import ops
from zero_topo.quant.operators import OPS
from zero_topo.quant.spec import BlockSpec

OURS = ("scalar", "wave32")
ours = pytest.mark.parametrize("backend", OURS, indirect=True)
cpu = pytest.mark.parametrize("backend", CPU, indirect=True)
NUMEL, SOURCES, MEMBERS, WIDTH = 300, 2, 2, 100
SPEC = BlockSpec("int8")
Arguments = Mapping[str, Any]


def buffer(nbytes: int) -> Tensor:
    """Bytes of exactly that many, with a recognisable filling."""
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


def calls() -> dict[str, dict[str, Any]]:
    """Valid arguments of operators, by name, in order."""
    nbytes, code = SPEC.nbytes(NUMEL), list(SPEC.code)
    flats = [buffer(4 * MEMBERS * NUMEL).view(torch.float32)]
    pieces = {"flats": flats, "shapes": [3, WIDTH, WIDTH, WIDTH, NUMEL]}
    came = {"messages": buffer(SOURCES * MEMBERS * nbytes).view(SOURCES, 1, MEMBERS, nbytes)}
    out = buffer(MEMBERS * nbytes).view(1, 1, MEMBERS, nbytes)
    source, member, how = {"without_source": -1}, {"without_member": -1}, {"format": code}
    again = {"source": code, "out": out, **member, **how, "numel": NUMEL, "factor": 1.0}
    codes, masters, layout = case = golden_codes.case(golden_codes.ragged(64))
    table, *own = masters[1]
    change = case.change(1)
    made = golden_codes.empty_change(codes)
    _, message = golden_codes.emitted(REFERENCE, masters[1], codes, change)
    changes = message.expand(1, *layout.members, -1).contiguous()
    stored = {"masters": table, "own": own, **codes._asdict()}
    return {
        "quantize": {**pieces, **how, "messages": out, **member},
        "dequantize_reduce": {
            **{**came, **source, **member, **how, **pieces},
            **{"factor": 1.0, "accumulate": False},
        },
        "requantize": {**came, **source, **again},
        "codes_assess": {**stored, **made._asdict()},
        "codes_emit": {**stored, **change._asdict(), "message": message},
        "codes_apply": {"changes": changes, **member, **codes._asdict()},
    }


CALLS = calls()


def make(name: str, arguments: Arguments) -> None:
    """Make a call."""
    getattr(OPS, name).default(*arguments.values())


def check_refused(name: str, arguments: Arguments, what: Any = "") -> None:
    """Make a call that touches nothing."""
    tensors = [x for x in tree_leaves(list(arguments.values())) if isinstance(x, Tensor)]
    before = [copied(x, "cpu") for x in tensors]
    with pytest.raises(RuntimeError):
        make(name, arguments)
    for now, then in zip(tensors, before, strict=True):
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8)), what


Damage = Callable[[Any], Any]


def put(index: int, value: int, numbers: list[int]) -> list[int]:
    """Another number in a list of them."""
    return [*numbers[:index], value, *numbers[index + 1 :]]


def numbers(*wrong: Sequence[int]) -> list[Damage]:
    """Each number of a list is in turn each of these."""
    places = enumerate(wrong)
    return [partial(put, index, value) for index, values in places for value in values]


def instead(*values: int) -> list[Damage]:
    """Another number."""
    return [partial(lambda value, _: value, value) for value in values]


def misaligned(x: Tensor) -> Tensor:
    """Elsewhere in a word of 16 bytes."""
    return torch.cat([x.new_zeros(8), x.view(-1)])[8:].view(x.shape)


NEGATIVE = [-1, -(2**63)]
BEYOND = [*NEGATIVE, 2**56 + 1, 2**63 - 1]
FORMATS = numbers([0, 4, 7, 16, -8, 2**31 - 1], [0, 1, 32, 64, 100, 4096, -256], [1, 2, -1])
TABLES: list[Damage] = [
    lambda table: table[..., :-1],
    lambda table: table[:0],
    lambda table: table[0],
    lambda table: table.view(torch.int8),
]
EMPTY: list[Damage] = [lambda x: x[:0].clone()]
OF_BLOCKS = [0, 1, 32, 96, 100, 4096, -64]
DAMAGES: dict[str, list[Damage]] = {
    "flats": [lambda flats: [], lambda flats: [flats[0].double()], lambda flats: 2 * flats],
    "shapes": [
        *numbers([0, 2, 6, *BEYOND], [0, 60, 200, *BEYOND], [WIDTH + 1, *BEYOND]),
        *numbers([], [], [], [0, WIDTH - 1, *NEGATIVE], NEGATIVE),
        lambda shapes: shapes[:4],
    ],
    "format": FORMATS,
    "source": FORMATS,
    "messages": TABLES,
    "out": TABLES,
    "without_source": instead(-2, SOURCES, 2**31 - 1),
    "without_member": instead(-2, 6, 2**31 - 1),
    "numel": instead(0, 200, 600, *BEYOND),
    "stored": [*EMPTY, lambda stored: stored[:1000]],
    "param_indices": EMPTY,
    "param_index_of": [*EMPTY, lambda param_index_of: param_index_of[:12]],
    "numbers": numbers(OF_BLOCKS, [14, *BEYOND], [0, 15, *BEYOND], [4, *BEYOND], [0, *BEYOND]),
    "masters": EMPTY,
    "own": numbers([], [-1, 6]),
    "steps": EMPTY,
    "ends": EMPTY,
    "changes": [
        lambda table: table[..., :255],
        lambda table: table[:, :1],
        lambda table: table.repeat(2, 1, 1, 1),
    ],
}
"""What is wrong with an argument of that name."""
ON_CPU: dict[str, list[Damage]] = {
    "shapes": numbers([], [], [], *2 * [[2**56 // MEMBERS + 1, 2**63 - 1]]),
    "param_indices": [lambda param_indices: param_indices[:3]],
    "numbers": numbers([], [], [], [], [7]),
    "changes": [lambda table: table[..., :300]],
    "own": numbers([72, 1000, *BEYOND]),
    "masters": [lambda masters: masters[:, :10]],
    "message": [lambda message: message[:300]],
}
"""What is wrong only because of what the kernels compute with, and of where parameters lie, which a
GPU knows alone.
"""
ON_GPU: dict[str, list[Damage]] = {name: [misaligned] for name in ("stored", "message", "changes")}


@ours
@pytest.mark.parametrize("name", CALLS)
def test_one_wrong_argument_is_refused(backend: Operators, name: str) -> None:
    """Any argument out of its bounds is an error, and no byte changes; undamaged the call is
    accepted.
    """
    arguments = calls()[name]
    more = ON_CPU if backend.name == "scalar" else ON_GPU
    for argument, damages in chain(DAMAGES.items(), more.items()):
        for damage in damages if argument in arguments else ():
            wrong = damage(arguments[argument])
            check_refused(name, {**arguments, argument: wrong}, (argument, wrong))
    make(name, arguments)


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
    made, came, again, *_ = CALLS.values()
    half, whole, short = (
        {"messages": (x := buffer(n).view(1, 1, 1, -1)), "out": x.clone()}
        for n in (2 * NUMEL, 768, 64)
    )
    blocks = {"source": (8, 512, 0), "format": (8, 256, 0), "numel": 512}
    refused = [
        ("requantize", again | half | {"source": (16, 1, 1), "format": (16, 1, 2)}),
        ("requantize", again | whole | blocks),
        ("requantize", again | short | {"numel": 3}),
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
    with pytest.raises(ValueError, match="384"):
        ops.dequantize(buffer(64), SPEC, torch.empty(3))


# -- INT8 weights ----------------------------------------------------------------------------------

FOREIGN: list[tuple[str, str, Any, list[int]]] = [
    ("codes", "param_index_of", 4, [-1, 6, 2**31 - 1]),
    *(("codes", "param_indices", (1, column), [-1, 2**57, 2**63 - 1]) for column in range(6)),
    ("codes", "param_indices", (0, 0), [10_000]),
    ("codes", "param_indices", (0, 1), [100_000]),
    ("codes", "param_indices", (1, 3), [0, 12]),
    ("codes_assess codes_emit", "param_indices", (1, 4), [0, 5000]),
    *(("codes_emit", "ends", (block, 0), [-1, 37, 2**62]) for block in (-1, 7)),
    *(("codes_emit", "ends", (block, 1), [-1, 2**40, 2**62]) for block in (-1, 7)),
    ("codes_emit", "counts", (8, 0), [65, 254]),
]
"""Operators, a table that they get, a place in it, and what there leads out of bounds."""


@cpu
@pytest.mark.parametrize("name", ["codes_assess", "codes_emit", "codes_apply"])
def test_tables_that_lead_out_of_bounds_are_refused(backend: Operators, name: str) -> None:
    """No parameter may end beyond what is stored or, where masters are read, their columns; nor may
    changes.
    """
    arguments = calls()[name]
    for names, table, place, values in FOREIGN:
        for value in values if names == "codes" or name in names else ():
            memory = arguments[table].clone()
            memory[place] = value
            check_refused(name, {**arguments, table: memory}, (table, place, value))


CONTRADICTIONS: dict[str, tuple[int, int]] = {
    "more blocks are sent whole than fit": (2, 30),
    "more blocks are sent whole than there are": (2, -1),
    "fewer are sent whole than counted": (2, 3),
    "there are more changes than counted": (3, 2000),
    "there are fewer changes than counted": (3, 3),
    "there are more changes before the last chunk": (1, 2000),
    "more blocks were sent whole before": (0, 33),
    "a tile has more changes than values": (32, 0x41),
    "only one count changed": (32, 0x3F3F3F3F),
}
"""Words of a message, and what they become."""


@cpu
def test_messages_that_contradict_themselves_are_refused(backend: Operators) -> None:
    """Before anything changes, also of the messages before it; each chunk's ends are what its
    counts say, though others would lead nowhere out of bounds.
    """
    arguments = calls()["codes_apply"]
    words = arguments["changes"][0, 1, 0].view(torch.int32)
    whole = words.clone()
    by_one = [(str(word), (word, int(whole[word]) + 1)) for word in range(4)]
    for kind, (word, value) in chain(CONTRADICTIONS.items(), by_one):
        words[word] = value
        check_refused("codes_apply", arguments, kind)
        words.copy_(whole)


@cpu
@given(seed=st.integers(0, 2**31), places=st.lists(st.integers(0, 10_000), max_size=8))
def test_messages_of_any_bytes(backend: Operators, seed: int, places: list[int]) -> None:
    """Whatever bytes come, nothing out of bounds is read or written, and other block columns stay
    as they are.
    """
    arguments = CALLS["codes_apply"]
    table = arguments["changes"].clone()
    flat = table.view(-1)
    for place in places:
        flat[place * 37 % flat.numel()] = (seed + place) % 256
    before = arguments["stored"][:64].clone()
    with contextlib.suppress(RuntimeError):
        make("codes_apply", {**arguments, "changes": table})
    assert torch.equal(arguments["stored"][:64], before), "a block column that the part leaves out"
