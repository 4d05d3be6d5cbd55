# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The GPU kernels, emulated, give the reference's bits for members, messages and pieces of any number and place."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from op_builder import source_dir
from tests.kernels import c_types, golden, golden_members
from tests.kernels import gpu_library as gpu
from tests.kernels.gpu_library import BOTH, OK, OTHER, PLAIN, GpuLibrary, Settings
from tests.kernels.operators import Operators, serving_module
from zero_topo.quant import reference
from zero_topo.quant.operands import FLOATS, Messages, View, to_members
from zero_topo.quant.spec import BlockSpec, Cast

CASTS = [Cast(name) for name in ("fp32", "fp16", "bf16")]
SOME = [*golden.FEW_FORMATS[::5], *golden.CAST_FORMATS[::2]]

MANY = [(1, -1), (2, -1), (4, 1), (129, -1), (130, 0), (130, 77), (130, 129), (9408, 5000)]
"""Messages to be summed, and which of them is left out."""

BAD_SPEC, BAD_DTYPE, BAD_SIZE, NO_TABLE, BAD_ALIGNMENT = 1, 2, 3, 6, 7


@pytest.fixture(scope="module")
def native() -> Iterator[Operators]:
    """The torch module that an engine on a GPU loads, over the emulated kernels."""
    with serving_module(gpu.bound(source_dir())) as served:
        yield served


@pytest.mark.parametrize("chosen", BOTH)
@pytest.mark.parametrize("fmt", SOME, ids=str)
def test_members(library: ctypes.CDLL, chosen: Settings, fmt: golden.Format) -> None:
    """One launch serves all members, wherever their pieces and messages lie; the one left out is left alone."""
    golden_members.check_members(GpuLibrary(library, chosen), fmt)


@pytest.mark.parametrize(("sources", "hole"), MANY)
def test_many_messages(library: ctypes.CDLL, sources: int, hole: int) -> None:
    """9,408 nodes may send, this rank's own message left out among theirs."""
    golden_members.check_many(GpuLibrary(library), sources, hole)


@pytest.mark.parametrize("count", [64, 65, 5000])
def test_many_pieces(library: ctypes.CDLL, count: int) -> None:
    """Pieces that travel with a launch, and those of which a table lies in device memory."""
    golden_members.check_many_pieces(GpuLibrary(library, OTHER), count)


def test_empty_pieces_take_no_place(library: ctypes.CDLL) -> None:
    """Among many, in a table."""
    parts = [golden.whole(golden.calm(5 + i, torch.float32)) for i in range(64)]
    parts[5:5] = [View(torch.empty(0), 0, 3, 3)] * 9
    golden.same_message(GpuLibrary(library), parts, BlockSpec(4, 128))


@pytest.mark.parametrize("members", [1000, 75_264])
def test_many_members(library: ctypes.CDLL, members: int) -> None:
    """A launch for as many ranks as there are: their blocks, one after the other, are those of one long message."""
    spec, x = BlockSpec(8, 64), golden.calm(64 * members, torch.bfloat16)
    made = torch.full((members, spec.nbytes(64)), 0x5A, dtype=torch.uint8)
    pieces, backend = [View(x, 1, 64, 64, members, 64)], GpuLibrary(library)
    backend.quantize(pieces, spec, to_members(made))
    long = torch.empty(1, spec.nbytes(x.numel()), dtype=torch.uint8)
    reference.quantize([golden.whole(x)], spec, to_members(long))
    assert torch.equal(made[:, :64], long[0, : 64 * members].view(members, 64))
    assert torch.equal(made[:, 128:132], long[0, spec.scales_offset(x.numel()) :][: 4 * members].view(members, 4))
    assert not made[:, 64:128].any() and not made[:, 132:].any()
    expected, back = torch.empty_like(x), torch.empty_like(x)
    reference.dequantize_reduce(to_members(long), spec, [golden.whole(expected)])
    backend.dequantize_reduce(to_members(made), spec, [replace(pieces[0], flat=back)])
    assert torch.equal(back, expected)


COLUMNS = st.sampled_from([1, 3, 8, 16, 40, 64, 129, 256, 700, 1029, 2051])
SPECS = st.sampled_from([BlockSpec(8, 64), BlockSpec(4, 256), BlockSpec(4, 512), BlockSpec(8, 2048), Cast("bf16")])


@st.composite
def pieces_anywhere(draw: st.DrawFn) -> list[View]:
    """Some pieces of any shape, dtype, alignment, filling and missing end."""
    members, made = draw(st.integers(1, 3)), []
    for _ in range(draw(st.integers(1, 4))):
        rows, width = draw(st.integers(1, 4)), draw(COLUMNS)
        beside = draw(st.booleans())
        stride = (members * width if beside else width) + draw(st.sampled_from([0, 1, 8, 100]))
        step = width if beside else rows * stride + draw(st.integers(0, 9))
        extent, offset = (members - 1) * step + (rows - 1) * stride + width, draw(st.integers(0, 8))
        flat = golden.values(
            offset + draw(st.sampled_from([extent, 2 * extent, extent // 2])), draw(st.sampled_from(FLOATS))
        )
        columns = width + draw(st.sampled_from([0, 0, 1, 64]))
        made.append(View(flat[offset:], rows, columns, stride, members, step, width))
    return made


@given(pieces=pieces_anywhere(), spec=SPECS, chosen=st.sampled_from([PLAIN, OTHER]))
def test_pieces_anywhere(library: ctypes.CDLL, pieces: list[View], spec: golden.Spec, chosen: Settings) -> None:
    """Whatever the pieces: they are read, written and added to where they lie and nowhere else."""
    backend = GpuLibrary(library, chosen)
    message = golden.same_message(backend, pieces, spec).view(pieces[0].members, -1)
    held = [replace(p, flat=p.flat.nan_to_num(0.5)) for p in pieces]
    golden.same_sums(backend, message.expand(3, -1, -1), spec, held, (0.3, True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_alignment(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Runs longer than any block, at each multiple of an element's size, read, written and added to."""
    backend = GpuLibrary(library)
    specs: list[golden.Spec] = [BlockSpec(8, 128), BlockSpec(8, 512), BlockSpec(8, 2048), *CASTS]
    for offset in range(9):
        pieces = [View(golden.calm(4200 + offset, dtype)[offset:], 1, 4200, 4200)]
        for spec in specs:
            message = golden.same_message(backend, pieces, spec)
            golden.same_sums(backend, message[None].expand(2, -1), spec, pieces, (1.0, offset % 2 > 0))


@pytest.mark.parametrize("width", [1023, 1029])
@pytest.mark.parametrize("spec", CASTS, ids=str)
def test_cast_messages_of_every_alignment(library: ctypes.CDLL, spec: Cast, width: int) -> None:
    """Of 9 members side by side every one begins elsewhere in a word of 16 bytes, and ends in a chunk of its own."""
    backend, x, third = GpuLibrary(library, OTHER), golden.calm(9 * width, torch.float32), width // 3
    messages = golden.same_message(backend, [View(x, 1, width, width, 9, width)], spec)
    golden.same_sums(backend, messages.expand(3, -1, -1), spec, [View(x, 3, third, 9 * third, 9, third)], (0.3, False))
    made, came = (
        torch.full((2, 9, width * spec.bits // 8), 0x5A, dtype=torch.uint8),
        Messages(messages.view(3, 1, 3, -1)),
    )
    reference.requantize(came, spec, spec, to_members(made[0, :3]), width, 0.3)
    backend.requantize(came, spec, spec, to_members(made[1, :3]), width, 0.3)
    golden.same_bytes(made[1, :3], made[0, :3], spec, "requantize")
    assert torch.equal(made[1, 3:], made[0, 3:])


def test_the_binding_for_torch(native: Operators) -> None:
    """Arguments arrive in the kernels as they were given."""
    golden_members.check_many(native, 130, 77)
    golden_members.check_members(native, golden.CAST_FORMATS[-1])
    golden_members.check_members(native, golden.FORMATS[0])
    golden.check_a_little(native)


def test_tables_are_uploaded_once_for_a_layout(native: Operators) -> None:
    """Pieces that lie where they lay before need no upload; few tables are kept, and an old one is made again."""
    spec, x, count = BlockSpec(8, 64), golden.calm(400, torch.bfloat16), gpu.bound(source_dir()).tables
    before = count()
    layouts = [[View(x[i:], 1, 1, 1)] * 65 for i in range(300)]
    for pieces in (layouts[0][:64], layouts[0], layouts[0], layouts[1], layouts[0]):
        golden.same_message(native, pieces, spec)
    assert count() == before + 2
    for pieces in (*layouts, layouts[0]):
        golden.same_message(native, pieces, spec)
    assert count() == 256


@pytest.mark.parametrize("spec", [BlockSpec(8, 256), Cast("fp16")], ids=str)
@pytest.mark.parametrize("members", [1, 3])
def test_places_beyond_32_bits(library: ctypes.CDLL, spec: golden.Spec, members: int) -> None:
    """Rows and members over 2^31 elements (and 2^32 bytes) apart, and messages, are found, read and written."""
    backend, apart, nbytes = GpuLibrary(library), 2**31 + 24, spec.nbytes(2997)
    flat = golden.untouched(5 * apart + 1000, torch.bfloat16)
    piece = View(flat, 3, 999, apart, members, apart)
    near = View(torch.empty(5 * 1000, dtype=torch.bfloat16), 3, 999, 1000, members, 1000)
    for row in range(5):
        near.flat[row * 1000 :][:1000] = flat[row * apart :][:1000] = golden.calm(1000, torch.bfloat16, row)
    table = golden.untouched(members * 2**33, torch.uint8).view(1, 1, members, -1)[..., 16 : 16 + nbytes]
    expected = torch.empty(members, nbytes, dtype=torch.uint8)
    reference.quantize([near], spec, to_members(expected))
    backend.quantize([piece], spec, Messages(table))
    assert torch.equal(table[0, 0], expected)
    reference.dequantize_reduce(to_members(expected), spec, [near], 0.5)
    backend.dequantize_reduce(Messages(table), spec, [piece], 0.5)
    for row in range(5):
        golden.assert_same(flat[row * apart :][:1000], near.flat[row * 1000 :][:1000], f"row {row}")


@pytest.mark.parametrize("spec", [BlockSpec(8, 64), Cast("bf16")], ids=str)
@pytest.mark.parametrize(
    ("members", "rows", "columns"), [(75_264, 1, 2**24), (1, 2**13, 2**20)], ids=["members", "rows"]
)
def test_members_and_rows_beyond_32_bits(
    library: ctypes.CDLL, spec: golden.Spec, members: int, rows: int, columns: int
) -> None:
    """The last of over 2^32 blocks, and of over 2^32 values in rows that are apart: but one thread block is run."""
    numel, stride, tile = rows * columns, columns + 8, 4096
    x = golden.untouched(members * rows * stride - 8, torch.bfloat16)
    table = golden.untouched(members * spec.nbytes(numel), torch.uint8)
    piece, out = View(x, rows, columns, stride, members, rows * stride), to_members(table.view(members, -1))
    x[-tile:] = golden.calm(tile, torch.bfloat16)
    last = GpuLibrary(library, Settings(most_blocks=2**31, first_block=members * numel // tile - 1))
    last.quantize([piece], spec, out)
    expected = torch.empty(spec.nbytes(tile), dtype=torch.uint8)
    reference.quantize([golden.whole(x[-tile:])], spec, to_members(expected))
    size, message = tile * spec.bits // 8, table[-spec.nbytes(numel) :]
    assert torch.equal(message[numel * spec.bits // 8 - size :][:size], expected[:size])
    if isinstance(spec, BlockSpec):
        end, scales = spec.scales_offset(numel) + numel // 16, expected[spec.scales_offset(tile) :][: tile // 16]
        assert torch.equal(message[end - tile // 16 : end], scales)
    wanted = torch.empty(tile, dtype=torch.bfloat16)
    reference.dequantize_reduce(to_members(expected), spec, [golden.whole(wanted)])
    x[-tile:] = 0
    last.dequantize_reduce(out, spec, [piece])
    golden.assert_same(x[-tile:], wanted, "dequantize")


class Call:
    """A call of 300 values in one message, or of as many messages as its fields say, and what may be wrong with it."""

    def __init__(self, library: ctypes.CDLL, spec: golden.Spec) -> None:
        self.backend, self.x, size = GpuLibrary(library), torch.ones(300), spec.nbytes(300)
        self.room = torch.zeros(8, size + 16, dtype=torch.uint8)
        self.spec, self.pieces = c_types.c_spec(spec), c_types.c_pieces([golden.whole(self.x)] * 65)
        self.messages = c_types.c_messages(to_members(self.room[0, :size]))

    def quantize(self, count: int = 1, **fields: int) -> int:
        """With other fields of the specification, the first piece or the messages."""
        for name, value in fields.items():
            owner = next(s for s in (self.spec, self.pieces[0], self.messages) if hasattr(s, name))
            setattr(owner, name, value)
        return self.backend.status_of("quantize", self.spec, self.pieces, count, None, self.messages)

    def reduce(self, **fields: int) -> int:
        """With other fields of the messages."""
        for name, value in fields.items():
            setattr(self.messages, name, value)
        piece = self.pieces, 1, None, c_types.CReduce(1.0, 0)
        return self.backend.status_of("dequantize_reduce", self.spec, self.messages, *piece)


BAD = [
    ({"bits": 7}, BAD_SPEC),
    ({"count": 65}, NO_TABLE),
    ({"count": -1}, BAD_SIZE),
    ({"rows": -1}, BAD_SIZE),
    ({"present": -1}, BAD_SIZE),
    ({"present": 301}, BAD_SIZE),
    ({"member_stride": -1}, BAD_SIZE),
    ({"limit": -1}, BAD_SIZE),
    ({"rows": 2, "columns": 150, "present": 150, "row_stride": 149}, BAD_SIZE),
    ({"rows": 2**40, "columns": 2**40, "present": 0}, BAD_SIZE),
    ({"data": 0}, BAD_SIZE),
    ({"nbytes": 272}, BAD_SIZE),
    ({"members": -1}, BAD_SIZE),
    ({"members": 3, "inner": 2}, BAD_SIZE),
    ({"members": 2, "inner": 0}, BAD_SIZE),
    ({"members": 2, "inner": 2, "inner_step": -16}, BAD_SIZE),
    ({"members": 2, "inner": 2, "inner_step": 2**60}, BAD_SIZE),
    ({"members": 2**30, "member_stride": 2**40}, BAD_SIZE),
    ({"without_member": 1}, BAD_SIZE),
    ({"without_member": -2}, BAD_SIZE),
    ({"without_source": 0}, BAD_SIZE),
    ({"sources": 2}, BAD_SIZE),
]


@pytest.mark.parametrize("spec", [BlockSpec(8, 256), Cast("fp32")], ids=str)
@pytest.mark.parametrize(("fields", "expected"), BAD, ids=str)
def test_refusals(library: ctypes.CDLL, spec: golden.Spec, fields: dict[str, int], expected: int) -> None:
    """What the C interface cannot do it says, without a launch."""
    assert Call(library, spec).quantize() == OK
    assert Call(library, spec).quantize(**fields) == expected


SUMS = [
    ({"sources": 2, "source_step": 16}, OK),
    ({"sources": 0}, BAD_SIZE),
    ({"without_source": 0}, BAD_SIZE),
    ({"sources": 2, "without_source": 2}, BAD_SIZE),
    ({"sources": 2, "without_source": 1, "source_step": 16}, OK),
    ({"sources": 2, "source_step": -16}, BAD_SIZE),
    ({"sources": 2, "source_step": 2**58}, BAD_SIZE),
    ({"without_member": 0}, OK),
]


@pytest.mark.parametrize("spec", [BlockSpec(4, 64), Cast("bf16")], ids=str)
@pytest.mark.parametrize(("fields", "expected"), SUMS, ids=str)
def test_refusals_of_sums(library: ctypes.CDLL, spec: golden.Spec, fields: dict[str, int], expected: int) -> None:
    """A sum has a source that is not left out; one of no member is nothing, gladly."""
    assert Call(library, spec).reduce(**fields) == expected


@pytest.mark.parametrize(("spec", "least"), [(BlockSpec(8, 256), 16), (Cast("fp32"), 4), (Cast("bf16"), 2)], ids=str)
def test_refusals_of_addresses(library: ctypes.CDLL, spec: golden.Spec, least: int) -> None:
    """Messages begin at multiples of 16 bytes, casts at those of a value's size: each of them."""
    for bad, good in ((least // 2, least), (least * 3 // 2, 3 * least)):
        for step, expected in ((bad, BAD_ALIGNMENT), (good, OK)):
            call = Call(library, spec)
            assert call.quantize(members=1, inner_step=step, outer_step=step, source_step=step) == OK
            assert call.reduce(sources=2, source_step=step) == expected
            assert call.reduce(sources=1, members=2, inner=2, inner_step=step, without_member=0) == expected
            assert call.reduce(members=2, inner=1, outer_step=step) == expected
            call.messages.data = call.room.data_ptr() + step
            assert call.reduce(members=1, inner=1, without_member=-1) == expected


def test_refusals_of_what_does_not_fit_together(library: ctypes.CDLL) -> None:
    """Specifications, members and dtypes."""
    spec, other = BlockSpec(8, 256), c_types.c_spec(BlockSpec(8, 512))
    call, made, plain = Call(library, spec), Call(library, spec), c_types.CReduce(1.0, 0)
    rest = call.messages, call.spec, made.messages, 300
    assert call.backend.status_of("requantize", call.spec, *rest, plain) == OK
    assert call.backend.status_of("requantize", other, *rest, plain) == BAD_SPEC
    assert call.backend.status_of("requantize", call.spec, *rest, c_types.CReduce(1.0, 1)) == BAD_SPEC
    cast = [c_types.c_spec(Cast(name)) for name in ("fp16", "bf16")]
    assert call.backend.status_of("requantize", cast[0], call.messages, cast[1], made.messages, 300, plain) == BAD_SPEC
    made.messages.members = 2
    assert call.backend.status_of("requantize", call.spec, *rest, plain) == BAD_SIZE
    call.pieces[0].dtype = 3
    assert call.quantize() == BAD_DTYPE
    x, to = call.x.data_ptr(), call.room.data_ptr()
    assert call.backend.status_of("count_above", x, 3, 300, 1.0, to) == BAD_DTYPE
    assert call.backend.status_of("sketch_insert", x, 1, 300, 1, 2, to) == BAD_SIZE
