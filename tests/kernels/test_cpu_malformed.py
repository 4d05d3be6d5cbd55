# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What is malformed is refused and nothing is touched; whatever bytes a message holds, nothing
beyond it is read.

test_cpu_sanitizers.py runs these tests under AddressSanitizer, which sees every access that is out
of bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels import golden
from tests.kernels.operators import Operators, limited
from zero_topo.quant.operands import DTYPES, FLOATS, Messages, View, total_numel
from zero_topo.quant.operators import OPS
from zero_topo.quant.spec import BLOCK_SIZES, BlockSpec, Cast

FILLING = 0xA5
NUMEL, SOURCES, MEMBERS = 300, 2, 2
SPEC = BlockSpec("int8")
FUNCTIONS = ("quantize", "dequantize_reduce", "requantize")
SHAPES, CODES, NUMELS = 1, 2, 3


def buffer(nbytes: int) -> Tensor:
    """Bytes of exactly that many, with a recognisable filling."""
    return torch.full((nbytes,), FILLING, dtype=torch.uint8)


def valid(name: str) -> dict[str, Any]:
    """Arguments of one of the operators on messages, by name, in order."""
    nbytes, shapes, code = (
        SPEC.nbytes(NUMEL),
        [3, NUMEL // 3, NUMEL // 3, NUMEL // 3, NUMEL],
        list(SPEC.code),
    )
    flats = [buffer(4 * MEMBERS * NUMEL).view(torch.float32)]
    came = buffer(SOURCES * MEMBERS * nbytes).view(SOURCES, 1, MEMBERS, nbytes)
    out = buffer(MEMBERS * nbytes).view(1, 1, MEMBERS, nbytes)
    return {
        "quantize": {
            "flats": flats,
            "shapes": shapes,
            "format": code,
            "messages": out,
            "without_member": -1,
        },
        "dequantize_reduce": {
            "messages": came,
            "without_source": -1,
            "without_member": -1,
            "format": code,
            "flats": flats,
            "shapes": shapes,
            "factor": 1.0,
            "accumulate": False,
        },
        "requantize": {
            "messages": came,
            "without_source": -1,
            "source": code,
            "out": out,
            "without_member": -1,
            "format": list(code),
            "numel": NUMEL,
            "factor": 1.0,
        },
    }[name]


def put(
    index: int, values: st.SearchStrategy[int]
) -> st.SearchStrategy[Callable[[list[int]], list[int]]]:
    """Another number in a list of them."""
    return values.map(
        lambda value: lambda numbers: [*numbers[:index], value, *numbers[index + 1 :]]
    )


def instead(values: st.SearchStrategy[int]) -> st.SearchStrategy[Callable[[int], int]]:
    """Another number."""
    return values.map(lambda value: lambda _: value)


def others(*known: int) -> st.SearchStrategy[int]:
    """Numbers of 32 bits that are none of the known ones."""
    return st.integers(-(2**31), 2**31 - 1).filter(lambda n: n not in known)


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
TABLES = st.sampled_from(
    [
        lambda table: table[..., :-1],
        lambda table: table[:0],
        lambda table: table[0],
        lambda table: table.view(torch.int8),
    ]
)
DAMAGES: dict[str, st.SearchStrategy[Callable[[Any], Any]]] = {
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


FAR = put(3, st.integers(2**56 // 3 + 1, 2**63 - 1)) | put(
    4, st.integers(2**56 // MEMBERS + 1, 2**63 - 1)
)
"""Strides beyond what the CPU's kernels compute with."""


@pytest.mark.parametrize("name", FUNCTIONS)
@given(data=st.data())
def test_one_wrong_argument_is_refused(module: ModuleType, name: str, data: st.DataObject) -> None:
    """Any argument out of its bounds is an error, and no byte changes; undamaged the call is
    accepted.
    """
    with limited(module):
        check_one_wrong_argument(name, data, {**DAMAGES, "shapes": DAMAGES["shapes"] | FAR})


def check_one_wrong_argument(
    name: str, data: st.DataObject, damages: Mapping[str, st.SearchStrategy[Callable[[Any], Any]]]
) -> None:
    """Damage one argument of an operator that some kernels serve; and try it whole."""
    arguments = valid(name)
    wrong = data.draw(st.sampled_from([argument for argument in arguments if argument in damages]))
    memory = [
        *arguments.get("flats", ()),
        *(x for x in arguments.values() if isinstance(x, Tensor)),
    ]
    arguments[wrong] = data.draw(damages[wrong])(arguments[wrong])
    before = [tensor.clone() for tensor in memory]
    with pytest.raises(RuntimeError):
        getattr(OPS, name).default(*arguments.values())
    assert all(
        torch.equal(now.view(torch.uint8), then.view(torch.uint8))
        for now, then in zip(memory, before, strict=True)
    )
    getattr(OPS, name).default(*valid(name).values())


LIMIT = 2**56
HUGE = ((2**62, 4, 4, 4), (2**40, 2**20, 2**20, 2**20), (2, 8, 8, 2**62), (1, LIMIT + 1, 0, 0))
"""Rows x columns overflow, more values than fit any machine, strides overflow, one value too
many.
"""


def test_what_does_not_fit_together_is_refused(whole: Operators) -> None:
    """In one call or another."""
    check_what_does_not_fit()


def check_what_does_not_fit() -> None:
    """A float's type and its bits belong together; casts, block sizes, members and sources do not
    mix.

    Nothing else has blocks of one value. Products and sums of sizes are checked before anything is
    computed from them.
    """
    made, came, again = (valid(name) for name in FUNCTIONS)
    half, whole = (
        {"messages": (x := buffer(n).view(1, 1, 1, -1)), "out": x.clone()} for n in (2 * NUMEL, 768)
    )
    refused = [("requantize", again | half | {"source": (16, 1, 1), "format": (16, 1, 2)})]
    refused += [
        ("requantize", again | whole | {"source": (8, 512, 0), "format": (8, 256, 0), "numel": 512})
    ]
    refused += [("requantize", again | {"messages": again["messages"][:, :, :1]})]
    refused += [("quantize", made | {"messages": came["messages"]})]
    refused += [
        ("dequantize_reduce", came | {"messages": came["messages"][:1], "without_source": 0})
    ]
    for code in ((8, 1, 0), (16, 1, 0), (32, 1, 1), (16, 1, 3), (16, 2, 1)):
        cast = {"flats": [torch.zeros(NUMEL)], "shapes": [1, NUMEL, NUMEL, 0, 0], "format": code}
        refused += [
            ("quantize", made | cast | {"messages": buffer(NUMEL * code[0] // 8).view(1, 1, 1, -1)})
        ]
    for shapes in (*([*shape, 0] for shape in HUGE), 2 * [1, LIMIT, LIMIT, LIMIT, 0]):
        flats = came["flats"] * (len(shapes) // 5)
        refused += [("dequantize_reduce", came | {"flats": flats, "shapes": shapes})]
    for name, arguments in refused:
        with pytest.raises(RuntimeError, match="zero_topo kernels: "):
            getattr(OPS, name).default(*arguments.values())


@st.composite
def shapes(draw: st.DrawFn) -> list[View]:
    """A few pieces of any shapes and dtypes, of the same members, which end anywhere."""
    pieces, members = [], draw(st.integers(1, 3))
    for _ in range(draw(st.integers(1, 4))):
        rows, present, gap = (
            draw(st.integers(0, 5)),
            draw(st.integers(0, 150)),
            draw(st.integers(0, 9)),
        )
        columns, width = present + draw(st.integers(0, 70)), present + gap
        stride, apart = (members * width, width) if draw(st.booleans()) else (width, rows * width)
        extent = max(0, members * rows * width - gap)
        flat = torch.zeros(draw(st.integers(0, extent)), dtype=draw(st.sampled_from(FLOATS)))
        pieces.append(View(flat, rows, columns, stride, members, apart, present))
    return pieces


BLOCKED = st.builds(BlockSpec, st.sampled_from(["int8", "int4"]), st.sampled_from(BLOCK_SIZES))
SPECS: st.SearchStrategy[golden.Spec] = BLOCKED | st.builds(Cast, st.sampled_from(list(DTYPES)))


def random_bytes(nbytes: int, seed: int) -> Tensor:
    """Bytes of any kind: scales may be NaN, infinite, negative or denormal, values -128 or -8."""
    return torch.randint(
        0, 256, (nbytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )


def levels(module: ModuleType, seed: int) -> Iterator[tuple[int, Operators]]:
    """The kernels at each instruction set, their work whole or split."""
    for level in range(module.best_level() + 1):
        with limited(module, level, 1 << (4 + seed % 12), 1 + seed % 3) as kernels:
            yield level, kernels


@given(
    spec=SPECS,
    pieces=shapes().filter(total_numel),
    seed=st.integers(0, 2**31),
    sources=st.integers(1, 9),
    accumulate=st.booleans(),
)
def test_messages_of_any_bytes(
    module: ModuleType,
    spec: golden.Spec,
    pieces: list[View],
    seed: int,
    sources: int,
    accumulate: bool,
) -> None:
    """Every level makes of any bytes, for pieces of any shapes, what the reference makes of
    them.
    """
    members, nbytes = pieces[0].members, spec.nbytes(total_numel(pieces))
    table = random_bytes(sources * members * nbytes, seed).view(sources, 1, members, nbytes)
    left_out = seed % 5 if sources > seed % 5 + 1 else -1
    messages = Messages(table, left_out, seed % 7 if members > seed % 7 else -1)
    for level, kernels in levels(module, seed):
        golden.same_sums(kernels, messages, spec, golden.blank(pieces), (0.75, accumulate), level)


@given(
    spec=SPECS,
    pieces=shapes().filter(total_numel),
    seed=st.integers(0, 2**31),
    bits=st.sampled_from([8, 4]),
)
def test_pieces_of_any_bytes(
    module: ModuleType, spec: golden.Spec, pieces: list[View], seed: int, bits: int
) -> None:
    """Every level quantizes any bits, in pieces of any shapes, as the reference does, and sums what
    comes of it.
    """
    for piece in pieces:
        raw = piece.flat.view(torch.uint8)
        raw.copy_(random_bytes(raw.numel(), seed))
    to = spec if isinstance(spec, Cast) else BlockSpec(f"int{bits}", spec.block_size)
    for level, kernels in levels(module, seed):
        message = golden.same_message(kernels, pieces, spec, what=level)
        golden.same_again(
            kernels, torch.stack([message] * 2), spec, to, (total_numel(pieces), 0.3), level
        )


@given(
    n=st.integers(1, 5000),
    rows=st.integers(3, 40),
    seed=st.integers(0, 2**63 - 1),
    density=st.floats(0, 1),
)
def test_sketches_of_any_bytes(
    module: ModuleType, n: int, rows: int, seed: int, density: float
) -> None:
    """Sketches that are not the sum of what the mask says, and garbage in the mask's unused bits:
    values come out.
    """
    bits = random_bytes(-(-n // 8), seed % 2**31) if density > 0.5 else buffer(-(-n // 8))
    for _, kernels in levels(module, seed):
        sketch = random_bytes(4096 * rows, seed % 2**31).view(torch.float32).view(rows, 1024)
        out = torch.full((n,), 7.0)
        left = kernels.sketch_peel(sketch, bits, seed, out)
        present = torch.zeros(bits.numel() * 8, dtype=torch.bool)
        kernels.mask_unpack(bits, present)
        assert 0 <= int(left) <= int(present[:n].sum())
        assert not out[~present[:n]].any()
