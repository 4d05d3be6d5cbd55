# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the GPU kernels alone may do wrong, emulated: rows, alignments and tables of any number and
place; whatever the device knows and the host does not.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import golden
from tests.kernels.backends import FencedMemory, configure, gpu_module
from tests.kernels.golden import calm, quantized, same
from tests.kernels.golden_codes import FILLING, case, empty_change, ragged, single
from tests.kernels.gpu_library import Settings
from tests.kernels.operators import REFERENCE, Operators
from tests.plans import NEOX
from zero_topo.quant.operands import (
    FLOATS,
    Masters,
    Messages,
    View,
    from_sources,
    to_members,
    view_of,
)
from zero_topo.quant.spec import BlockSpec, Cast, ChangeSpec, Format

emulated = pytest.mark.parametrize("backend", ["wave32"], indirect=True)
other = pytest.mark.parametrize("backend", ["wave64"], indirect=True)


@other
@pytest.mark.parametrize("spec", [*golden.SERVED, Cast("bf16")], ids=str)
def test_rows_of_many_blocks(backend: Operators, spec: Format) -> None:
    """A lane has one block of a row after the other, of which the last one ends in the row."""
    pieces = [View(calm(40 * 2608, torch.bfloat16), 40, 2600, 2608)]
    messages = quantized(backend, pieces, spec)
    for sources in (1, 9):
        table = from_sources(messages.expand(sources, -1))
        same(backend, "dequantize_reduce", table, spec, pieces)


def test_bytes_of_a_20b_step_on_384_ranks_that_take_the_fast_path() -> None:
    """Whole blocks of a row do, also where it begins at no aligned word: at width 2,048, where it
    has 10,923 values. The rest of a row is moved unit by unit.
    """
    for hidden, aligned in ((6144, 0.999), (2048, 0.0)):
        shapes = replace(NEOX, hidden=hidden, intermediate=4 * hidden).shapes()
        rows = [-(-math.prod(shape) // 384) for shape in shapes]
        for block in (64, 256):
            whole = [row // block * block for row in rows]
            assert sum(whole) > 0.98 * sum(rows)
        even = sum(fast for row, fast in zip(rows, whole, strict=True) if row % 8 == 0)
        assert aligned <= even / sum(rows) <= aligned + 0.25


@emulated
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_alignment(backend: Operators, dtype: torch.dtype) -> None:
    """Runs longer than any block, at each multiple of an element's size, read, written and added
    to.
    """
    for offset in range(9):
        pieces = [view_of(calm(4200 + offset, dtype)[offset:])]
        for spec in (*golden.SERVED, *golden.CASTS):
            table = from_sources(quantized(backend, pieces, spec).expand(2, -1))
            same(backend, "dequantize_reduce", table, spec, pieces, 1.0, offset % 2 > 0)


@other
@pytest.mark.parametrize("width", [1023, 1029])
@pytest.mark.parametrize("spec", golden.CASTS, ids=str)
def test_cast_messages_of_every_alignment(backend: Operators, spec: Cast, width: int) -> None:
    """Of 9 members side by side every one begins elsewhere in a word of 16 bytes, and ends in a
    chunk of its own.
    """
    x, third = calm(9 * width, torch.float32), width // 3
    messages = quantized(backend, [View(x, 1, width, width, 9, width)], spec)
    table = from_sources(messages.expand(3, -1, -1))
    pieces = [View(x, 3, third, 9 * third, 9, third)]
    same(backend, "dequantize_reduce", table, spec, pieces, 0.3)
    made = to_members(torch.full_like(messages[:3], 0x5A))
    same(backend, "requantize", from_sources(messages.view(3, 3, -1)), spec, spec, made, width, 0.3)


@emulated
def test_tables_are_uploaded_once_for_a_layout(backend: Operators) -> None:
    """Pieces that lie where they lay before need no upload; few tables are kept, and an old one is
    made again.
    """
    spec, x, count = BlockSpec("int8"), calm(400, torch.bfloat16), gpu_module().tables
    before = count()
    layouts = [[View(x[i:], 1, 1, 1)] * 65 for i in range(300)]

    def check(pieces: list[View]) -> None:
        # Not of copies, which lie elsewhere
        made, expected = torch.ones(2, spec.nbytes(len(pieces)), dtype=torch.uint8)
        backend.quantize(pieces, spec, to_members(made))
        REFERENCE.quantize(pieces, spec, to_members(expected))
        assert torch.equal(made, expected)

    for pieces in (layouts[0][:64], layouts[0], layouts[0], layouts[1], layouts[0]):
        check(pieces)
    assert count() == before + 2
    for pieces in (*layouts, layouts[0]):
        check(pieces)
    assert count() == 256


@emulated
@pytest.mark.parametrize("spec", [BlockSpec("int8"), Cast("bf16")], ids=str)
@pytest.mark.parametrize(
    ("members", "rows", "columns"), [(75_264, 1, 2**24), (1, 2**13, 2**20)], ids=["members", "rows"]
)
def test_members_and_rows_beyond_32_bits(
    backend: Operators, spec: Format, members: int, rows: int, columns: int
) -> None:
    """The last of over 2^32 blocks, and of over 2^32 values in rows that are apart: but one thread
    block is run.
    """
    numel, stride = rows * columns, columns + 8
    # Values of a thread block that quantizes, and of one that sums
    tile, summed = (16384, 16384) if isinstance(spec, BlockSpec) else (4096, 8192)
    x = golden.untouched(members * rows * stride - 8, torch.bfloat16)
    table = golden.untouched(members * spec.nbytes(numel), torch.uint8)
    piece = View(x, rows, columns, stride, members, rows * stride)
    out = to_members(table.view(members, -1))
    x[-tile:] = calm(tile, torch.bfloat16)
    last = Settings(most_blocks=2**31, shared_tiles=2**40)
    configure(replace(last, first_block=members * numel // tile - 1))
    backend.quantize([piece], spec, out)
    expected = torch.empty(spec.nbytes(tile), dtype=torch.uint8)
    REFERENCE.quantize([view_of(x[-tile:])], spec, to_members(expected))
    size, message = tile * spec.bits // 8, table[-spec.nbytes(numel) :]
    assert torch.equal(message[numel * spec.bits // 8 - size :][:size], expected[:size])
    if isinstance(spec, BlockSpec):
        end = spec.scales_offset(numel) + numel // 64
        scales = expected[spec.scales_offset(tile) :][: tile // 64]
        assert torch.equal(message[end - tile // 64 : end], scales)
    wanted = torch.empty(tile, dtype=torch.bfloat16)
    REFERENCE.dequantize_reduce(to_members(expected), spec, [view_of(wanted)])
    x[-tile:] = 0
    configure(replace(last, first_block=members * numel // summed - 1))
    backend.dequantize_reduce(out, spec, [piece])
    configure()
    golden.assert_same(x[-tile:], wanted, "dequantize")


@emulated
@pytest.mark.parametrize(
    ("spec", "least"), [(BlockSpec("int8", 256), 16), (Cast("fp32"), 4), (Cast("bf16"), 2)], ids=str
)
def test_misaligned_messages_are_refused(backend: Operators, spec: Format, least: int) -> None:
    """Messages begin at multiples of 16 bytes, casts at those of a value's size: each of them, but
    one left out.
    """
    size, pieces = spec.nbytes(300), [View(torch.ones(600), 1, 300, 300, 2, 300)]
    for step in (least // 2, least, least * 3 // 2, 3 * least):
        refusal = partial(pytest.raises, RuntimeError, match="does not begin at")
        expected: Any = refusal if step % least else nullcontext
        room = torch.zeros(4 * (size + step), dtype=torch.uint8)
        tables = [room[step:].as_strided((1, 1, 2, size), (0, 0, 0, 1))]
        for dim in range(3):
            shape, strides = [1, 1, 1, size], [0, 0, 0, 1]
            shape[dim] = 2
            strides[dim] = step
            tables.append(room.as_strided(shape, strides).expand(-1, -1, 2 if dim != 1 else 1, -1))
        for table in tables:
            with expected():
                backend.dequantize_reduce(Messages(table), spec, pieces)


@other
@pytest.mark.parametrize("spec", golden.SERVED, ids=str)
def test_padding_of_messages_does_not_count(backend: Operators, spec: BlockSpec) -> None:
    """Whatever lies behind the last value of a message: the padding of the message of the sum
    stands for zeros.
    """
    blocks = 16384 // spec.block_size
    numel = blocks * spec.block_size + 3
    messages = golden.messages_of(spec, numel, 2)
    messages[:, numel * spec.bits // 8 + 1 : (blocks + 1) * spec.block_bytes] = 0x77
    out = to_members(torch.empty_like(messages[0]))
    same(backend, "requantize", from_sources(messages), spec, spec, out, numel)


# -- INT8 weights ----------------------------------------------------------------------------------

ENDS = st.lists(st.sampled_from([0, 1, 36, 37, 2**31, 2**32 - 1]), min_size=24, max_size=24)


@emulated
@given(seed=st.integers(0, 2**40), ends=ENDS)
def test_no_message_reaches_beyond(backend: Operators, seed: int, ends: list[int]) -> None:
    """Whatever bytes came: nothing behind a message is read, and of what is stored only the
    members' part is written.
    """
    torch.manual_seed(seed)
    codes, _, layout = case(ragged(64))
    n, spec = codes.blocks, ChangeSpec(64)
    nbytes, size = spec.nbytes(n, seed % (n + 1), 0), codes.stored.numel()
    table = FencedMemory(at_end=True).tensor(6 * nbytes, torch.uint8).view(1, 2, 3, nbytes)
    table.random_(0, 256)
    table[..., :16].view(torch.int32).copy_(torch.tensor(ends).to(torch.int32).view(1, 2, 3, 4))
    table[..., spec.offsets(n).counts : spec.offsets(n).scales] &= [0, 7, 63, 255][seed % 4]
    stored = codes._replace(stored=codes.stored.clone())
    backend.codes_apply(Messages(table, without_member=layout.without), stored)
    wholes = torch.zeros(1, 2, 3, spec.largest(n), dtype=torch.uint8)
    wholes[..., spec.offsets(n).counts : spec.offsets(n).scales] = 255
    may = stored._replace(stored=torch.full((size,), FILLING, dtype=torch.uint8))
    REFERENCE.codes_apply(Messages(wholes, without_member=layout.without), may)
    wrong = (stored.stored != codes.stored) & (may.stored == FILLING)
    assert not wrong.any(), f"written at {wrong.nonzero().view(-1).tolist()}"


@emulated
def test_a_message_without_room_is_not_written(backend: Operators) -> None:
    """One that is too small for its changes leaves codes and message as they were: sizes are known
    on the device.
    """
    codes, (masters,), _ = made = case(single(40))
    change = made.change()
    count, size = change.ends[-1].tolist()
    room = ChangeSpec(64).offsets(40, count).changes + size - 1
    message = torch.full((room,), FILLING, dtype=torch.uint8)
    before = codes.stored.clone()
    backend.codes_emit(masters, codes, change, message)
    assert torch.equal(codes.stored, before)
    assert bool((message == FILLING).all())


@emulated
@pytest.mark.parametrize("cut", [(0, 70), (0, 640), (33, 640)], ids=str)
def test_masters_that_are_not_there_are_zero(backend: Operators, cut: tuple[int, int]) -> None:
    """Parameters are known on the device: columns that a table lacks, on either side, are not
    read.
    """
    codes, (masters,), _ = made = case(single(10))
    first, past = cut
    there = FencedMemory(at_end=True).tensor(past - first, torch.float32)[None]
    there.copy_(masters.table[:, first:past])
    masters.table[:, : 64 if first else 0] = 0.0  # a block that does not begin in the table
    masters.table[:, past:] = 0.0
    found = empty_change(codes)
    backend.codes_assess(Masters(there, masters.first + first, 0), codes, *found)
    change = made.change()
    sums = found._replace(steps=change.steps, ends=found.ends.cumsum(0))
    golden.assert_equal(sums, change, "codes_assess")
