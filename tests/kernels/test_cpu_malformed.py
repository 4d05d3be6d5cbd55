# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What is malformed is refused and nothing is touched; whatever bytes a message holds, nothing beyond it is read.

test_cpu_sanitizers.py runs these tests under AddressSanitizer, which sees every access that is out of bounds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import cpu_library, golden
from tests.kernels.c_types import CPiece, CReduce, CSpec, c_messages, c_pieces, c_spec
from tests.kernels.cpu_library import CpuKernels, Range
from zero_topo.quant.messages import Messages, from_sources, to_members
from zero_topo.quant.pieces import DTYPES, FLOATS, Piece, total_numel
from zero_topo.quant.spec import BLOCK_SIZES, BlockSpec, Cast, Reduce, Total

OK, BAD_SPEC, BAD_DTYPE, BAD_SIZE, BAD_RANGE, BAD_LEVEL = range(6)
FILLING = 0xA5
NUMEL, SOURCES, MEMBERS = 300, 2, 2
SPEC = BlockSpec(8, 64)
BLOCKS = MEMBERS * SPEC.blocks(NUMEL)

Arguments = dict[str, Any]
Damage = tuple[str, int, st.SearchStrategy[Any]]


def buffer(nbytes: int) -> torch.Tensor:
    """Bytes of exactly that many, with a recognisable filling."""
    return torch.full((nbytes,), FILLING, dtype=torch.uint8)


@dataclass
class Call:
    """A valid call of one function: arguments by name, and the memory that they point to."""

    function: str
    arguments: Arguments
    memory: list[torch.Tensor]

    def status(self, library: ctypes.CDLL) -> int:
        """Make the call."""
        return int(getattr(library, self.function)(*self.arguments.values()))


def valid_call(library: ctypes.CDLL, function: str) -> Call:
    """A valid call of one of the functions, on messages or of the sparse modes."""
    nbytes, n, rows = SPEC.nbytes(NUMEL), 2100, 6
    came, out = buffer(SOURCES * MEMBERS * nbytes), buffer(MEMBERS * nbytes)
    floats, indices = buffer(4 * MEMBERS * NUMEL), torch.zeros(7, dtype=torch.int64)
    found = torch.zeros(1, dtype=torch.int64)
    x, sketch, picked = torch.ones(n), torch.zeros(rows, 1024), torch.zeros(7)
    mask, bits = torch.ones(n, dtype=torch.uint8), torch.full((-(-n // 8),), 255, dtype=torch.uint8)
    work = buffer(library.zt_test_sketch_work(n, rows))
    rows_of = torch.zeros(20 * 7, dtype=torch.int64)
    memory = [rows_of, came, out, floats, x, mask, bits, sketch, work, found, indices, picked]
    pointer = {"x": x, "mask": mask, "bits": bits, "sketch": sketch, "work": work, "found": found}
    at = {name: tensor.data_ptr() for name, tensor in pointer.items()}
    piece = Piece(floats.view(torch.float32), 3, NUMEL // 3, NUMEL // 3, MEMBERS, NUMEL)
    spec: Arguments = {"spec": c_spec(SPEC)}
    into: Arguments = {"out": c_messages(to_members(out.view(MEMBERS, nbytes)))}
    pieces: Arguments = {"pieces": c_pieces([piece]), "count": 1}
    terms: Arguments = {"messages": c_messages(from_sources(came.view(SOURCES, MEMBERS, nbytes)))}
    reduce: Arguments = {"reduce": CReduce(1.0, 0)}
    blocks: Arguments = {"range": Range(0, BLOCKS), "level": -1}
    chosen: Arguments = {"x": at["x"], "dtype": 0, "threshold": 0.5, "elements": Range(8, 2000)}
    room: Arguments = {"capacity": 7, "indices": indices.data_ptr(), "values": picked.data_ptr()}
    counted: Arguments = {"found": at["found"], "level": -1}
    sketched: Arguments = {"n": n, "seed": 1, "rows": rows}
    lanes, some = {"lanes": Range(3, 1000)}, {"whole": Range(8, 2000)}
    peeled: Arguments = {**sketched, "x": at["x"], **lanes, "work": at["work"], "found": at["found"]}
    given: dict[str, Arguments] = {
        "zt_cpu_quantize": {**spec, **pieces, **into, **blocks},
        "zt_cpu_dequantize_reduce": {**spec, **terms, **pieces, **reduce, **blocks},
        "zt_cpu_requantize": {**spec, **terms, "to": c_spec(SPEC), **into, "numel": NUMEL, **reduce, **blocks},
        "zt_cpu_mask_pack": {"mask": at["mask"], "n": n, "bits": at["bits"], **some},
        "zt_cpu_mask_unpack": {"bits": at["bits"], "n": n, "mask": at["mask"], **some},
        "zt_cpu_count_above": {**chosen, **counted},
        "zt_cpu_compact_above": {**chosen, **room, **counted},
        "zt_cpu_row_largest": {
            "x": at["x"],
            "columns": 100,
            "k": 7,
            "indices": rows_of.data_ptr(),
            "twenty": Range(3, 20),
        },
        "zt_cpu_sketch_insert": {"x": at["x"], **sketched, "sketch": at["sketch"], **lanes},
        "zt_cpu_sketch_peel": {"sketch": at["sketch"], "bits": at["bits"], **peeled},
    }
    return Call(function, given[function], memory)


def others(*known: int, low: int = -(2**31), high: int = 2**31 - 1) -> st.SearchStrategy[int]:
    """Numbers that are none of the known ones."""
    return st.integers(low, high).filter(lambda n: n not in known)


def misfits(values: Callable[[int], int]) -> st.SearchStrategy[int]:
    """Numbers n such that values(n) values do not fill a message as long as the one that is given."""
    nbytes = SPEC.nbytes(NUMEL)
    return st.integers(-(2**63), 2**63 - 1).filter(lambda n: n < 0 or SPEC.nbytes(values(n)) != nbytes)


ANY64 = {"low": -(2**63), "high": 2**63 - 1}
NEGATIVE = st.integers(-(2**63), -1)
NEGATIVE32 = st.integers(-(2**31), -1)
FAR = st.integers(2**56 + 1, 2**63 - 1) | st.integers(-(2**63), -(2**56) - 1)


def outside(limit: int) -> tuple[int, st.SearchStrategy[Any]]:
    """Ranges that begin before 0, or end beyond the limit or before they begin."""
    end = st.integers(limit + 1, 2**63 - 1) | st.integers(-(2**63), 7)
    return BAD_RANGE, st.builds(Range, NEGATIVE, st.just(16)) | st.builds(Range, st.just(8), end)


FIELDS: dict[str, list[Damage]] = {
    "spec": [
        ("bits", BAD_SPEC, others(8, 4)),
        ("block_size", BAD_SPEC, others(*BLOCK_SIZES)),
        ("dtype", BAD_SPEC, others(0)),
    ],
    "pieces": [
        ("dtype", BAD_DTYPE, others(0, 1, 2)),
        ("rows", BAD_SIZE, misfits(lambda rows: rows * (NUMEL // 3))),
        ("columns", BAD_SIZE, misfits(lambda columns: 3 * columns)),
        ("present", BAD_SIZE, NEGATIVE | st.integers(NUMEL // 3 + 1, 2**63 - 1)),
        ("row_stride", BAD_SIZE, st.integers(-(2**63), NUMEL // 3 - 1) | st.integers(2**56 // 3 + 1, 2**63 - 1)),
        ("member_stride", BAD_SIZE, NEGATIVE | st.integers(2**56 // MEMBERS + 1, 2**63 - 1)),
        ("limit", BAD_SIZE, NEGATIVE),
        ("data", BAD_SIZE, st.none()),
    ],
    "messages": [
        ("sources", BAD_SIZE, st.integers(-(2**31), 0)),
        ("members", BAD_SIZE, NEGATIVE32),
        ("inner", BAD_SIZE, st.integers(-(2**31), 0)),
        ("without_source", BAD_SIZE, others(-1, *range(SOURCES))),
        ("without_member", BAD_SIZE, others(-1, *range(MEMBERS))),
        *((f"{which}_step", BAD_SIZE, FAR) for which in ("source", "outer", "inner")),
        ("nbytes", BAD_SIZE, others(SPEC.nbytes(NUMEL), **ANY64)),
        ("data", BAD_SIZE, st.none()),
    ],
    "range": [
        ("begin", BAD_RANGE, others(*range(BLOCKS + 1), **ANY64)),
        ("end", BAD_RANGE, others(*range(BLOCKS + 1), **ANY64)),
    ],
}
FIELDS |= {"to": FIELDS["spec"], "reduce": [("accumulate", BAD_SPEC, others(0, 1))]}
FIELDS["out"] = [
    ("sources", BAD_SIZE, others(1)),
    ("without_source", BAD_SIZE, others(-1)),
    *(damage for damage in FIELDS["messages"] if damage[0] not in ("sources", "without_source")),
]
NULL = [(BAD_SIZE, st.none())]
POINTERS = ("pieces", "x", "mask", "bits", "sketch", "found", "work", "indices", "values")
PLAIN: dict[str, list[tuple[int, st.SearchStrategy[Any]]]] = {
    **{name: NULL for name in POINTERS},
    "count": [(BAD_SIZE, NEGATIVE32), (BAD_SIZE, st.just(0))],
    "numel": [(BAD_SIZE, misfits(lambda numel: numel))],
    "level": [(BAD_LEVEL, others(-1, 0, 1, 2))],
    "to": [(BAD_SPEC, st.sampled_from([CSpec(8, 128, 0), CSpec(32, 1, 0)]))],
    "dtype": [(BAD_DTYPE, others(0, 1, 2))],
    "capacity": [(BAD_SIZE, NEGATIVE)],
    "n": [(BAD_SIZE, NEGATIVE)],
    "rows": [(BAD_SIZE, st.integers(-(2**63), 2)), (BAD_SIZE, st.integers(2**31, 2**63 - 1))],
    "whole": [
        (BAD_RANGE, st.builds(Range, st.just(3), st.just(16))),
        (BAD_RANGE, st.builds(Range, st.just(8), st.just(13))),
        outside(2100),
    ],
    "columns": [(BAD_SIZE, st.integers(-(2**63), 6)), (BAD_SIZE, st.integers(2**56 + 1, 2**63 - 1))],
    "k": [(BAD_SIZE, st.integers(-(2**63), 0)), (BAD_SIZE, st.integers(101, 2**63 - 1))],
    "twenty": [(BAD_RANGE, st.builds(Range, NEGATIVE, st.just(16))), (BAD_RANGE, st.builds(Range, st.just(8), FAR))],
    "lanes": [outside(1024)],
    "elements": [outside(2**60)],
}


@st.composite
def damaged(draw: st.DrawFn, make: Callable[[], Call]) -> tuple[Call, int, str]:
    """A call with one thing wrong, the status it should have, and what is wrong."""
    call = make()
    name = draw(st.sampled_from([name for name in call.arguments if name in PLAIN or name in FIELDS]))
    choices: list[tuple[str | None, int, st.SearchStrategy[Any]]] = []
    choices += [(None, status, values) for status, values in PLAIN.get(name, [])]
    choices += FIELDS.get(name, [])
    field, status, values = draw(st.sampled_from(choices))
    value = draw(values)
    if field is None:
        call.arguments[name] = value
        return call, status, f"{name} = {value}"
    target = call.arguments[name]
    if isinstance(target, ctypes.Array):
        target = target[draw(st.integers(0, len(target) - 1))]
    setattr(target, field, value)
    return call, status, f"{name}.{field} = {value}"


@pytest.mark.parametrize("function", [n for n in cpu_library.SIGNATURES if "_at" not in n and "codes" not in n])
@given(data=st.data())
def test_one_wrong_argument_is_refused(library: ctypes.CDLL, function: str, data: st.DataObject) -> None:
    """Any argument or field out of its bounds gives its status, and no byte changes; undamaged the call is accepted."""
    assert valid_call(library, function).status(library) == OK
    call, status, what = data.draw(damaged(lambda: valid_call(library, function)))
    before = [memory.clone() for memory in call.memory]
    assert call.status(library) == status, what
    assert all(torch.equal(now, then) for now, then in zip(call.memory, before, strict=True)), what


def test_requantize_does_not_accumulate(library: ctypes.CDLL) -> None:
    """There is nothing to add to in a message that is written."""
    call = valid_call(library, "zt_cpu_requantize")
    call.arguments["reduce"] = CReduce(1.0, 1)
    assert call.status(library) == BAD_SPEC


CAST_SPECS = [(32, 1, 0), (16, 1, 1), (16, 1, 2)]
NO_CASTS = [(8, 1, 0), (16, 1, 0), (32, 1, 1), (16, 1, 3), (16, 2, 1)]


@pytest.mark.parametrize("function", ["zt_cpu_quantize", "zt_cpu_dequantize_reduce", "zt_cpu_requantize"])
def test_casts_are_formats_of_their_own(library: ctypes.CDLL, function: str) -> None:
    """A float's type and its bits belong together; nothing else has blocks of one value, and casts do not mix."""
    place = buffer(4 * NUMEL)
    for spec in [*CAST_SPECS, *NO_CASTS]:
        call = valid_call(library, function)
        call.arguments["spec"] = call.arguments["to"] = CSpec(*spec)
        if function != "zt_cpu_requantize":
            del call.arguments["to"]
        for name in {"messages", "out"} & set(call.arguments):
            call.arguments[name] = c_messages(Messages(place[: NUMEL * spec[0] // 8].expand(1, 1, MEMBERS, -1)))
        call.arguments["range"] = Range(0, MEMBERS * NUMEL)
        known = spec in CAST_SPECS
        assert call.status(library) == (OK if known else BAD_SPEC), spec
        call.arguments["range"] = Range(0, MEMBERS * NUMEL + 1)
        assert call.status(library) == (BAD_RANGE if known else BAD_SPEC), spec
    call = valid_call(library, "zt_cpu_requantize")
    call.arguments |= {"spec": CSpec(16, 1, 1), "to": CSpec(16, 1, 2)}
    assert call.status(library) == BAD_SPEC


def test_members_must_be_as_many(library: ctypes.CDLL) -> None:
    """Sums of other members than are written are refused."""
    call = valid_call(library, "zt_cpu_requantize")
    call.arguments["messages"].members = 1
    assert call.status(library) == BAD_SIZE


LIMIT = 2**56
HUGE = [
    ((2**62, 4, 4, 4), "rows x columns overflow"),
    ((2**40, 2**20, 2**20, 2**20), "more values than any machine holds"),
    ((2, 8, 8, 2**62), "strides overflow"),
    ((1, LIMIT + 1, 0, 0), "one value too many"),
]


@pytest.mark.parametrize("shape", [case[0] for case in HUGE], ids=[case[1] for case in HUGE])
def test_sizes_that_overflow_are_refused(library: ctypes.CDLL, shape: tuple[int, int, int, int]) -> None:
    """Products and sums of sizes are checked before anything is computed from them."""
    call = valid_call(library, "zt_cpu_dequantize_reduce")
    values = call.arguments["pieces"][0].data
    call.arguments["pieces"] = (CPiece * 1)(CPiece(values, *shape, 0, 8, 0))
    assert call.status(library) == BAD_SIZE
    twice = (CPiece * 2)(*[CPiece(values, 1, LIMIT, LIMIT, LIMIT, 0, 0, 0)] * 2)
    call.arguments |= {"pieces": twice, "count": 2}
    assert call.status(library) == BAD_SIZE
    half = (CPiece * 1)(CPiece(values, 1, LIMIT, 0, 0, 0, 0, 0))
    call.arguments |= {"pieces": half, "count": 1}
    call.arguments["messages"].nbytes = SPEC.nbytes(LIMIT)
    assert call.status(library) == BAD_SIZE, "of all members together"


@st.composite
def shapes(draw: st.DrawFn) -> list[Piece]:
    """A few pieces of any shapes and dtypes, of the same members, which end anywhere."""
    pieces, members = [], draw(st.integers(1, 3))
    for _ in range(draw(st.integers(1, 4))):
        rows, present, gap = draw(st.integers(0, 5)), draw(st.integers(0, 150)), draw(st.integers(0, 9))
        columns, width = present + draw(st.integers(0, 70)), present + gap
        stride, apart = (members * width, width) if draw(st.booleans()) else (width, rows * width)
        extent = max(0, members * rows * width - gap)
        flat = torch.zeros(draw(st.integers(0, extent)), dtype=draw(st.sampled_from(FLOATS)))
        pieces.append(Piece(flat, rows, columns, stride, members, apart, present))
    return pieces


BLOCKED = st.builds(BlockSpec, st.sampled_from([8, 4]), st.sampled_from(BLOCK_SIZES))
SPECS: st.SearchStrategy[golden.Spec] = BLOCKED | st.builds(Cast, st.sampled_from(list(DTYPES)))


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes of any kind: scales may be NaN, infinite, negative or denormal, values -128 or -8."""
    return torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@given(
    spec=SPECS,
    pieces=shapes().filter(total_numel),
    seed=st.integers(0, 2**31),
    sources=st.integers(1, 9),
    accumulate=st.booleans(),
)
def test_messages_of_any_bytes(
    library: ctypes.CDLL, spec: golden.Spec, pieces: list[Piece], seed: int, sources: int, accumulate: bool
) -> None:
    """Every level makes of any bytes, for pieces of any shapes, what the reference makes of them."""
    members, nbytes = pieces[0].members, spec.nbytes(total_numel(pieces))
    table = random_bytes(sources * members * nbytes, seed).view(sources, 1, members, nbytes)
    left_out = seed % 5 if sources > seed % 5 + 1 else None
    messages = Messages(table, left_out, seed % 7 if members > seed % 7 else None)
    for level in range(library.zt_cpu_best_level() + 1):
        backend = CpuKernels(library, level, cuts=1 + seed % 3)
        golden.same_sums(backend, messages, spec, golden.blank(pieces), Reduce(0.75, accumulate), level)


@given(spec=SPECS, pieces=shapes().filter(total_numel), seed=st.integers(0, 2**31), bits=st.sampled_from([8, 4]))
def test_pieces_of_any_bytes(
    library: ctypes.CDLL, spec: golden.Spec, pieces: list[Piece], seed: int, bits: int
) -> None:
    """Every level quantizes any bits, in pieces of any shapes, as the reference does, and sums what comes of it."""
    for piece in pieces:
        raw = piece.flat.view(torch.uint8)
        raw.copy_(random_bytes(raw.numel(), seed))
    to = spec if isinstance(spec, Cast) else BlockSpec(bits, spec.block_size)
    for level in range(library.zt_cpu_best_level() + 1):
        backend = CpuKernels(library, level, cuts=1 + seed % 3)
        message = golden.same_message(backend, pieces, spec, what=level)
        golden.same_again(backend, torch.stack([message] * 2), spec, to, Total(total_numel(pieces), 0.3), level)


@given(n=st.integers(1, 5000), rows=st.integers(3, 40), seed=st.integers(0, 2**63), density=st.floats(0, 1))
def test_sketches_of_any_bytes(library: ctypes.CDLL, n: int, rows: int, seed: int, density: float) -> None:
    """Sketches that are not the sum of what the mask says, and garbage in the mask's unused bits: values come out."""
    bits = random_bytes(-(-n // 8), seed % 2**31) if density > 0.5 else buffer(-(-n // 8))
    for level in range(library.zt_cpu_best_level() + 1):
        sketch = random_bytes(4096 * rows, seed % 2**31).view(torch.float32).view(rows, 1024)
        out = torch.full((n,), 7.0)
        left = CpuKernels(library, level, cuts=3).sketch_peel(sketch, bits, seed, out)
        present = torch.zeros(bits.numel() * 8, dtype=torch.bool)
        CpuKernels(library, level).mask_unpack(bits, present)
        assert 0 <= int(left) <= int(present[:n].sum())
        assert not out[~present[:n]].any()
