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
from tests.kernels.cpu_library import CpuKernels, Range
from tests.kernels.gpu_library import CMessage, CPiece, CReduce, CSpec, c_messages, c_spec
from zero_topo.quant.pieces import FLOATS, Piece, total_numel
from zero_topo.quant.spec import BLOCK_SIZES, BlockSpec, Reduce, Total

OK, BAD_SPEC, BAD_DTYPE, BAD_SIZE, BAD_RANGE, BAD_LEVEL = range(6)
FILLING = 0xA5
NUMEL, SOURCES = 300, 2
SPEC = BlockSpec(8, 64)

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
    messages, out = [buffer(nbytes) for _ in range(SOURCES)], buffer(nbytes)
    floats, indices, found = buffer(4 * NUMEL), torch.zeros(7, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    x, sketch, picked = torch.ones(n), torch.zeros(rows, 1024), torch.zeros(7)
    mask, bits = torch.ones(n, dtype=torch.uint8), torch.full((-(-n // 8),), 255, dtype=torch.uint8)
    work = buffer(library.zt_test_sketch_work(n, rows))
    memory = [*messages, out, floats, x, mask, bits, sketch, work, found, indices, picked]
    pointer = {"x": x, "mask": mask, "bits": bits, "sketch": sketch, "work": work, "found": found}
    at = {name: tensor.data_ptr() for name, tensor in pointer.items()}
    piece = (CPiece * 1)(CPiece(floats.data_ptr(), 3, NUMEL // 3, NUMEL // 3, NUMEL, 0))
    spec: Arguments = {"spec": c_spec(SPEC)}
    into: Arguments = {"message": CMessage(out.data_ptr(), nbytes)}
    pieces: Arguments = {"pieces": piece, "count": 1}
    terms: Arguments = {"messages": c_messages(messages), "sources": SOURCES}
    reduce: Arguments = {"reduce": CReduce(1.0, 0)}
    blocks: Arguments = {"range": Range(0, SPEC.blocks(NUMEL)), "level": -1}
    chosen: Arguments = {"x": at["x"], "dtype": 0, "threshold": 0.5, "elements": Range(8, 2000)}
    room: Arguments = {"capacity": 7, "indices": indices.data_ptr(), "values": picked.data_ptr()}
    counted: Arguments = {"found": at["found"], "level": -1}
    sketched: Arguments = {"n": n, "seed": 1, "rows": rows}
    lanes, some = {"lanes": Range(3, 1000)}, {"whole": Range(8, 2000)}
    peeled: Arguments = {**sketched, "x": at["x"], **lanes, "work": at["work"], "found": at["found"]}
    given: dict[str, Arguments] = {
        "zt_cpu_quantize": {**spec, **pieces, **into, **blocks},
        "zt_cpu_dequantize": {**spec, **into, **pieces, **blocks},
        "zt_cpu_dequantize_reduce": {**spec, **terms, **pieces, **reduce, **blocks},
        "zt_cpu_requantize": {**spec, **terms, "to": c_spec(SPEC), **into, "numel": NUMEL, **reduce, **blocks},
        "zt_cpu_mask_pack": {"mask": at["mask"], "n": n, "bits": at["bits"], **some},
        "zt_cpu_mask_unpack": {"bits": at["bits"], "n": n, "mask": at["mask"], **some},
        "zt_cpu_count_above": {**chosen, **counted},
        "zt_cpu_compact_above": {**chosen, **room, **counted},
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


def outside(limit: int) -> tuple[int, st.SearchStrategy[Any]]:
    """Ranges that begin before 0, or end beyond the limit or before they begin."""
    end = st.integers(limit + 1, 2**63 - 1) | st.integers(-(2**63), 7)
    return BAD_RANGE, st.builds(Range, NEGATIVE, st.just(16)) | st.builds(Range, st.just(8), end)


FIELDS: dict[str, list[Damage]] = {
    "spec": [
        ("bits", BAD_SPEC, others(8, 4)),
        ("block_size", BAD_SPEC, others(*BLOCK_SIZES)),
        ("symmetric", BAD_SPEC, others(0, 1)),
    ],
    "pieces": [
        ("dtype", BAD_DTYPE, others(0, 1, 2)),
        ("rows", BAD_SIZE, misfits(lambda rows: rows * (NUMEL // 3))),
        ("columns", BAD_SIZE, misfits(lambda columns: 3 * columns)),
        ("row_stride", BAD_SIZE, st.integers(-(2**63), NUMEL // 3 - 1)),
        ("limit", BAD_SIZE, NEGATIVE),
        ("data", BAD_SIZE, st.none()),
    ],
    "message": [
        ("nbytes", BAD_SIZE, others(SPEC.nbytes(NUMEL), **ANY64)),
        ("data", BAD_SIZE, st.none()),
    ],
    "range": [
        ("begin", BAD_RANGE, others(*range(SPEC.blocks(NUMEL) + 1), **ANY64)),
        ("end", BAD_RANGE, others(*range(SPEC.blocks(NUMEL) + 1), **ANY64)),
    ],
}
FIELDS |= {"messages": FIELDS["message"], "to": FIELDS["spec"], "reduce": [("accumulate", BAD_SPEC, others(0, 1))]}
NULL = [(BAD_SIZE, st.none())]
POINTERS = ("pieces", "messages", "x", "mask", "bits", "sketch", "found", "work", "indices", "values")
PLAIN: dict[str, list[tuple[int, st.SearchStrategy[Any]]]] = {
    **{name: NULL for name in POINTERS},
    "count": [(BAD_SIZE, NEGATIVE32), (BAD_SIZE, st.just(0))],
    "sources": [(BAD_SIZE, NEGATIVE32), (BAD_SIZE, st.just(0))],
    "numel": [(BAD_SIZE, misfits(lambda numel: numel))],
    "level": [(BAD_LEVEL, others(-1, 0, 1, 2))],
    "to": [(BAD_SPEC, st.just(CSpec(8, 128, 1))), (BAD_SPEC, st.just(CSpec(8, 64, 0)))],
    "dtype": [(BAD_DTYPE, others(0, 1, 2))],
    "capacity": [(BAD_SIZE, NEGATIVE)],
    "n": [(BAD_SIZE, NEGATIVE)],
    "rows": [(BAD_SIZE, st.integers(-(2**63), 2)), (BAD_SIZE, st.integers(2**31, 2**63 - 1))],
    "whole": [
        (BAD_RANGE, st.builds(Range, st.just(3), st.just(16))),
        (BAD_RANGE, st.builds(Range, st.just(8), st.just(13))),
        outside(2100),
    ],
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


@pytest.mark.parametrize("function", [name for name in cpu_library.SIGNATURES if "_at" not in name])
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


LIMIT = 2**56
HUGE = [
    ((2**62, 4, 4, 0), "rows x columns overflow"),
    ((2**40, 2**20, 2**20, 0), "more values than any machine holds"),
    ((2, 8, 2**62, 8), "strides overflow"),
    ((1, LIMIT + 1, 0, 0), "one value too many"),
]


@pytest.mark.parametrize("shape", [case[0] for case in HUGE], ids=[case[1] for case in HUGE])
def test_sizes_that_overflow_are_refused(library: ctypes.CDLL, shape: tuple[int, int, int, int]) -> None:
    """Products and sums of sizes are checked before anything is computed from them."""
    call = valid_call(library, "zt_cpu_dequantize")
    rows, columns, stride, limit = shape
    values = call.arguments["pieces"][0].data
    call.arguments["pieces"] = (CPiece * 1)(CPiece(values, rows, columns, stride, limit, 0))
    assert call.status(library) == BAD_SIZE
    twice = (CPiece * 2)(*[CPiece(values, 1, LIMIT, LIMIT, 0, 0)] * 2)
    call.arguments |= {"pieces": twice, "count": 2}
    assert call.status(library) == BAD_SIZE


@st.composite
def shapes(draw: st.DrawFn) -> list[Piece]:
    """A few pieces of any shapes and dtypes, which end anywhere."""
    pieces = []
    for _ in range(draw(st.integers(1, 4))):
        rows, columns, gap = draw(st.integers(0, 5)), draw(st.integers(0, 150)), draw(st.integers(0, 9))
        stride = columns + gap
        flat = torch.zeros(draw(st.integers(0, max(0, rows * stride - gap))), dtype=draw(st.sampled_from(FLOATS)))
        pieces.append(Piece(flat, rows, columns, stride))
    return pieces


SPECS = st.builds(BlockSpec, st.sampled_from([8, 4]), st.sampled_from(BLOCK_SIZES), st.booleans())


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
    library: ctypes.CDLL, spec: BlockSpec, pieces: list[Piece], seed: int, sources: int, accumulate: bool
) -> None:
    """Every level makes of any bytes, for pieces of any shapes, what the reference makes of them."""
    numel = total_numel(pieces)
    messages = [random_bytes(spec.nbytes(numel), seed + source) for source in range(sources)]
    for level in range(library.zt_cpu_best_level() + 1):
        backend = CpuKernels(library, level, cuts=1 + seed % 3)
        golden.same_sums(backend, messages, spec, golden.blank(pieces), Reduce(0.75, accumulate), level)


@given(spec=SPECS, pieces=shapes().filter(total_numel), seed=st.integers(0, 2**31), bits=st.sampled_from([8, 4]))
def test_pieces_of_any_bytes(library: ctypes.CDLL, spec: BlockSpec, pieces: list[Piece], seed: int, bits: int) -> None:
    """Every level quantizes any bits, in pieces of any shapes, as the reference does, and sums what comes of it."""
    for piece in pieces:
        raw = piece.flat.view(torch.uint8)
        raw.copy_(random_bytes(raw.numel(), seed))
    to, total = BlockSpec(bits, spec.block_size, spec.symmetric), Total(total_numel(pieces), 0.3)
    for level in range(library.zt_cpu_best_level() + 1):
        backend = CpuKernels(library, level, cuts=1 + seed % 3)
        message = golden.same_message(backend, pieces, spec, what=level)
        golden.same_again(backend, [message, message], spec, to, total, level)


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
