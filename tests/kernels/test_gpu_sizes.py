# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The GPU kernels, emulated, give the reference's bits for members, messages and pieces of any
number and place.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import golden, golden_members
from tests.kernels.gpu_library import BOTH, OTHER, PLAIN, Emulated, Settings
from tests.kernels.operators import REFERENCE
from tests.kernels.test_cpu_malformed import (
    DAMAGES,
    FUNCTIONS,
    check_one_wrong_argument,
    check_what_does_not_fit,
)
from tests.marks import late
from tests.plans import NEOX
from zero_topo.quant.operands import FLOATS, Messages, View, from_sources, to_members
from zero_topo.quant.spec import BlockSpec, Cast

CASTS = [Cast(name) for name in ("fp32", "fp16", "bf16")]
SOME = [*golden.GPU_FORMATS[::2], *golden.CAST_FORMATS[::2]]

MANY = [(1, -1), (2, -1), (4, 1), (129, -1), (130, 0), (130, 77), (130, 129), (9408, 5000)]
"""Messages to be summed, and which of them is left out."""


@pytest.mark.parametrize("chosen", BOTH)
@pytest.mark.parametrize("fmt", SOME, ids=str)
def test_members(emulated: Emulated, chosen: Settings, fmt: golden.Format) -> None:
    """One launch serves all members, wherever their pieces and messages lie; the one left out is
    left alone.
    """
    golden_members.check_members(emulated(chosen), fmt)


@pytest.mark.parametrize(("sources", "hole"), MANY)
def test_many_messages(emulated: Emulated, sources: int, hole: int) -> None:
    """9,408 nodes may send, this rank's own message left out among theirs."""
    golden_members.check_many(emulated(), sources, hole)


@pytest.mark.parametrize("count", [64, 65, 5000])
def test_many_pieces(emulated: Emulated, count: int) -> None:
    """Views that are sent with a launch, and those of which a table lies in device memory."""
    golden_members.check_many_pieces(emulated(OTHER), count)


def test_empty_pieces_take_no_place(emulated: Emulated) -> None:
    """Among many, in a table."""
    parts = [golden.whole(golden.calm(5 + i, torch.float32)) for i in range(64)]
    parts[5:5] = [View(torch.empty(0), 0, 3, 3)] * 9
    golden.same_message(emulated(), parts, BlockSpec("int4"))


@pytest.mark.parametrize("members", [1000, late(75_264)])
def test_many_members(emulated: Emulated, members: int) -> None:
    """A launch for as many ranks as there are: their blocks, one after the other, are those of one
    long message.
    """
    spec, x = BlockSpec("int8"), golden.calm(256 * members, torch.bfloat16)
    made = torch.full((members, spec.nbytes(256)), 0x5A, dtype=torch.uint8)
    pieces, backend = [View(x, 1, 256, 256, members, 256)], emulated()
    backend.quantize(pieces, spec, to_members(made))
    long = torch.empty(1, spec.nbytes(x.numel()), dtype=torch.uint8)
    REFERENCE.quantize([golden.whole(x)], spec, to_members(long))
    assert torch.equal(made[:, :256], long[0, : 256 * members].view(members, 256))
    scales = long[0, spec.scales_offset(x.numel()) :][: 4 * members]
    assert torch.equal(made[:, 256:260], scales.view(members, 4))
    assert not made[:, 260:].any()
    expected, back = torch.empty_like(x), torch.empty_like(x)
    REFERENCE.dequantize_reduce(to_members(long), spec, [golden.whole(expected)])
    backend.dequantize_reduce(to_members(made), spec, [replace(pieces[0], flat=back)])
    assert torch.equal(back, expected)


COLUMNS = st.sampled_from([1, 3, 8, 16, 40, 64, 129, 256, 700, 1029, 2051, 2560, 5120])
SPECS = st.sampled_from([*golden.SERVED, Cast("bf16")])


@st.composite
def pieces_anywhere(draw: st.DrawFn) -> list[View]:
    """Some pieces of any shape, dtype, alignment, filling and missing end; most of them aligned."""
    members, made = draw(st.integers(1, 3)), []
    dtypes = st.sampled_from(draw(st.sampled_from([FLOATS, *zip(FLOATS)])))
    offsets = draw(st.sampled_from([st.just(0), st.integers(0, 8)]))
    for _ in range(draw(st.integers(1, 4))):
        rows, width = draw(st.integers(1, 4)), draw(COLUMNS)
        alongside = draw(st.booleans())
        stride = (members * width if alongside else width) + draw(st.sampled_from([0, 1, 8, 100]))
        step = width if alongside else rows * stride + draw(offsets)
        extent, offset = (members - 1) * step + (rows - 1) * stride + width, draw(offsets)
        flat = golden.values(
            offset + draw(st.sampled_from([extent, 2 * extent, extent // 2])), draw(dtypes)
        )
        columns = width + draw(st.sampled_from([0, 0, 1, 64]))
        made.append(View(flat[offset:], rows, columns, stride, members, step, width))
    return made


SOURCES = st.sampled_from([(1, -1), (2, 0), (3, 1), (7, -1), (8, -1), (9, 5), (17, 11), (18, -1)])
"""Messages that are summed, and which of them is left out."""


@given(
    pieces=pieces_anywhere(),
    spec=SPECS,
    chosen=st.sampled_from([PLAIN, OTHER]),
    sources=SOURCES,
    how=st.tuples(st.sampled_from([1.0, 0.3]), st.booleans()),
)
def test_pieces_anywhere(
    emulated: Emulated,
    pieces: list[View],
    spec: golden.Spec,
    chosen: Settings,
    sources: tuple[int, int],
    how: tuple[float, bool],
) -> None:
    """Whatever the pieces: they are read, written and added to where they lie and nowhere else."""
    backend = emulated(chosen)
    message = golden.same_message(backend, pieces, spec).view(pieces[0].members, -1)
    stored = [replace(p, flat=p.flat.nan_to_num(0.5)) for p in pieces]
    count, hole = sources
    few = golden.messages_of(spec, golden.total_numel(pieces), 4)
    table = torch.stack([few[i % 4].expand_as(message) for i in range(count)])
    table[-1] = message
    golden.same_sums(backend, from_sources(table, hole), spec, stored, how)


@pytest.mark.parametrize("spec", [*golden.SERVED, Cast("bf16")], ids=str)
def test_rows_of_many_blocks(emulated: Emulated, spec: golden.Spec) -> None:
    """A lane has one block of a row after the other, of which the last one ends in the row."""
    pieces = [View(golden.calm(40 * 2608, torch.bfloat16), 40, 2600, 2608)]
    message = golden.same_message(emulated(OTHER), pieces, spec)
    for sources in (1, 9):
        golden.same_sums(
            emulated(OTHER), message[None].expand(sources, -1), spec, pieces, (1.0, False)
        )


def test_a_20b_step_on_384_ranks_has_aligned_rows() -> None:
    """Shards of all parameters are rows of whole units, which aligned tensors keep aligned; all but
    their last blocks take the kernels' fast path. A width of 2,048 has rows of 10,923 values.
    """
    shares = []
    for hidden in (6144, 2048):
        shapes = replace(NEOX, hidden=hidden, intermediate=4 * hidden).shapes()
        rows = [-(-math.prod(shape) // 384) for shape in shapes]
        even = sum(row // 256 * 256 for row in rows if row % 8 == 0)
        shares.append(even / sum(rows))
    assert shares[0] > 0.999 and shares[1] < 0.25


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_alignment(emulated: Emulated, dtype: torch.dtype) -> None:
    """Runs longer than any block, at each multiple of an element's size, read, written and added
    to.
    """
    backend = emulated()
    specs = [*golden.SERVED, *CASTS]
    for offset in range(9):
        pieces = [View(golden.calm(4200 + offset, dtype)[offset:], 1, 4200, 4200)]
        for spec in specs:
            message = golden.same_message(backend, pieces, spec)
            golden.same_sums(
                backend, message[None].expand(2, -1), spec, pieces, (1.0, offset % 2 > 0)
            )


@pytest.mark.parametrize("width", [1023, 1029])
@pytest.mark.parametrize("spec", CASTS, ids=str)
def test_cast_messages_of_every_alignment(emulated: Emulated, spec: Cast, width: int) -> None:
    """Of 9 members side by side every one begins elsewhere in a word of 16 bytes, and ends in a
    chunk of its own.
    """
    backend, x, third = emulated(OTHER), golden.calm(9 * width, torch.float32), width // 3
    messages = golden.same_message(backend, [View(x, 1, width, width, 9, width)], spec)
    golden.same_sums(
        backend,
        messages.expand(3, -1, -1),
        spec,
        [View(x, 3, third, 9 * third, 9, third)],
        (0.3, False),
    )
    made, came = (
        torch.full((2, 9, width * spec.bits // 8), 0x5A, dtype=torch.uint8),
        Messages(messages.view(3, 1, 3, -1)),
    )
    REFERENCE.requantize(came, spec, spec, to_members(made[0, :3]), width, 0.3)
    backend.requantize(came, spec, spec, to_members(made[1, :3]), width, 0.3)
    golden.same_bytes(made[1, :3], made[0, :3], spec, "requantize")
    assert torch.equal(made[1, 3:], made[0, 3:])


def test_tables_are_uploaded_once_for_a_layout(emulated: Emulated) -> None:
    """Pieces that lie where they lay before need no upload; few tables are kept, and an old one is
    made again.
    """
    spec, x, count = BlockSpec("int8"), golden.calm(400, torch.bfloat16), emulated.module.tables
    before = count()
    layouts = [[View(x[i:], 1, 1, 1)] * 65 for i in range(300)]
    for pieces in (layouts[0][:64], layouts[0], layouts[0], layouts[1], layouts[0]):
        golden.same_message(emulated(), pieces, spec)
    assert count() == before + 2
    for pieces in (*layouts, layouts[0]):
        golden.same_message(emulated(), pieces, spec)
    assert count() == 256


@pytest.mark.parametrize("case", golden_members.FAR_CASES, ids=str)
def test_places_beyond_32_bits(
    emulated: Emulated, case: tuple[golden.Spec, int, int | None]
) -> None:
    """Rows, members and messages that far apart are found, read and written."""
    golden_members.check_far(emulated(), *case)


@pytest.mark.parametrize("spec", [BlockSpec("int8"), Cast("bf16")], ids=str)
@pytest.mark.parametrize(
    ("members", "rows", "columns"), [(75_264, 1, 2**24), (1, 2**13, 2**20)], ids=["members", "rows"]
)
def test_members_and_rows_beyond_32_bits(
    emulated: Emulated, spec: golden.Spec, members: int, rows: int, columns: int
) -> None:
    """The last of over 2^32 blocks, and of over 2^32 values in rows that are apart: but one thread
    block is run.
    """
    numel, stride = rows * columns, columns + 8
    # Values of a thread block that quantizes, and of one that sums
    tile, summed = (16384, 16384) if isinstance(spec, BlockSpec) else (4096, 8192)
    x = golden.untouched(members * rows * stride - 8, torch.bfloat16)
    table = golden.untouched(members * spec.nbytes(numel), torch.uint8)
    piece, out = (
        View(x, rows, columns, stride, members, rows * stride),
        to_members(table.view(members, -1)),
    )
    x[-tile:] = golden.calm(tile, torch.bfloat16)
    last = Settings(most_blocks=2**31, shared_tiles=2**40)
    backend = emulated(replace(last, first_block=members * numel // tile - 1))
    backend.quantize([piece], spec, out)
    expected = torch.empty(spec.nbytes(tile), dtype=torch.uint8)
    REFERENCE.quantize([golden.whole(x[-tile:])], spec, to_members(expected))
    size, message = tile * spec.bits // 8, table[-spec.nbytes(numel) :]
    assert torch.equal(message[numel * spec.bits // 8 - size :][:size], expected[:size])
    if isinstance(spec, BlockSpec):
        end, scales = (
            spec.scales_offset(numel) + numel // 64,
            expected[spec.scales_offset(tile) :][: tile // 64],
        )
        assert torch.equal(message[end - tile // 64 : end], scales)
    wanted = torch.empty(tile, dtype=torch.bfloat16)
    REFERENCE.dequantize_reduce(to_members(expected), spec, [golden.whole(wanted)])
    x[-tile:] = 0
    backend = emulated(replace(last, first_block=members * numel // summed - 1))
    backend.dequantize_reduce(out, spec, [piece])
    golden.assert_same(x[-tile:], wanted, "dequantize")


@pytest.mark.parametrize("name", FUNCTIONS)
@given(data=st.data())
def test_one_wrong_argument_is_refused(emulated: Emulated, name: str, data: st.DataObject) -> None:
    """Without a launch, and no byte changes."""
    emulated()
    check_one_wrong_argument(name, data, DAMAGES)


def test_what_does_not_fit_together_is_refused(emulated: Emulated) -> None:
    """Specifications, members, sources and dtypes; a sketch of two rows."""
    kernels, x = emulated(), torch.ones(300)
    check_what_does_not_fit()
    with pytest.raises(RuntimeError, match="dtype is none of"):
        kernels.count_above(x.double(), 1.0)
    with pytest.raises(RuntimeError, match="a size is negative"):
        kernels.sketch_insert(x[None], 1, torch.zeros(1, 2, 1024))


@pytest.mark.parametrize(
    ("spec", "least"), [(BlockSpec("int8", 256), 16), (Cast("fp32"), 4), (Cast("bf16"), 2)], ids=str
)
def test_misaligned_messages_are_refused(emulated: Emulated, spec: golden.Spec, least: int) -> None:
    """Messages begin at multiples of 16 bytes, casts at those of a value's size: each of them, but
    one left out.
    """
    kernels, size, pieces = (
        emulated(),
        spec.nbytes(300),
        [View(torch.ones(600), 1, 300, 300, 2, 300)],
    )
    for step, refused in (
        (least // 2, True),
        (least, False),
        (least * 3 // 2, True),
        (3 * least, False),
    ):
        room = torch.zeros(4 * (size + step), dtype=torch.uint8)
        tables = {
            "the first": room[step:].as_strided((1, 1, 2, size), (0, 0, 0, 1)),
            "sources": room.as_strided((2, 1, 2, size), (step, 0, 0, 1)),
            "outer": room.as_strided((1, 2, 1, size), (0, step, 0, 1)),
            "inner": room.as_strided((1, 1, 2, size), (0, 0, step, 1)),
        }
        for table in tables.values():
            with (
                pytest.raises(RuntimeError, match="does not begin at") if refused else nullcontext()
            ):
                kernels.dequantize_reduce(Messages(table), spec, pieces)
