# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Every backend gives the reference's bits: the CPU's kernels at each instruction set, the work
whole or split, the emulated GPU kernels, what the engine loads on a GPU, and Triton.

Triton reads TRITON_INTERPRET when it is imported, so one process runs these tests again with the
variable set, for Triton alone. The interpreter takes a millisecond for what a GPU does in a
nanosecond.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.device import ON_GPU
from tests.kernels import golden, golden_codes, golden_members
from tests.kernels.backends import (
    CPU,
    FENCED,
    GPU,
    INTERPRETED,
    NATIVE,
    SPLIT,
    TRITON,
    opened,
)
from tests.kernels.golden import ALL_FORMATS, CAST_FORMATS, FORMATS, Format
from tests.kernels.operators import Operators
from tests.launching import ROOT, output
from tests.marks import late, often
from zero_topo.quant.operands import FLOATS, View, from_sources, to_members
from zero_topo.quant.spec import BlockSpec, Cast

OURS = () if INTERPRETED else (*CPU, *SPLIT, *GPU, *NATIVE)
"""Backends of all operations."""
EMULATED = () if INTERPRETED else GPU
HARDWARE = () if INTERPRETED else (*GPU, *NATIVE)
FEW, SOME = (1, 1) if ON_GPU or INTERPRETED else (8, 4)
"""``make test`` tries one case in this number of them, ``make test-long`` all."""
LARGE = 2**31 + 2**20 if ON_GPU and "ZERO_TOPO_TEST_SMALL" not in os.environ else 2**20


def each(names: Iterable[str], *values: Sequence[Any], every: int = 1) -> pytest.MarkDecorator:
    """Tries each backend with each value; one value in ``every`` in ``make test``, beginning
    elsewhere for each backend.
    """
    cases = []
    for at, name in enumerate(names):
        for place, value in enumerate(values):
            case = (name, *value)
            cases.append(case if (place - at) % every == 0 else late(*case))
    columns = ("backend", "case", "more")[: 1 + len(values[0])]
    ids = [" ".join(map(str, getattr(case, "values", case))) for case in cases]
    return pytest.mark.parametrize(columns, cases, indirect=["backend"], ids=ids)


def singly(values: Iterable[Any]) -> list[tuple[Any]]:
    """Values of one parameter."""
    return [(value,) for value in values]


@pytest.mark.skipif(INTERPRETED, reason="is that process")
@pytest.mark.parametrize(
    "which", ["tritons_operations and (int4/256 or bf16-float32)", late("")], ids=["few", "all"]
)
def test_triton_in_its_interpreter(which: str) -> None:
    """The checks of this file that Triton serves, on CPU tensors."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-W", "ignore::RuntimeWarning", "-k", which, __file__]
    output(command, env=env, cwd=ROOT)


BLOCKS = [fmt for fmt in ALL_FORMATS if fmt.spec.block_size in (64, 256, 2048)]
OF_TRITON = [Format(fmt.spec, FLOATS[at % 3]) for at, fmt in enumerate(BLOCKS[::3])][::2]


@each(OURS, *singly([*FORMATS, *CAST_FORMATS]), every=FEW)
def test_operations(backend: Operators, case: Format) -> None:
    """Messages, values and sums of every size and layout; nothing is written where no piece is."""
    golden.check_operations(backend, case)


@each(() if INTERPRETED else (*CPU, *SPLIT), *singly(BLOCKS), every=FEW)
def test_operations_of_other_blocks(backend: Operators, case: Format) -> None:
    """Sizes of blocks that the CPU alone has kernels for."""
    golden.check_operations(backend, case, (3,))
    golden.check_requantize(backend, case.spec, (3,))


@each(TRITON, *singly([*OF_TRITON, *CAST_FORMATS[2::2]]))
def test_tritons_operations(backend: Operators, case: Format) -> None:
    """The same of Triton: it has blocks of every size, and floats."""
    golden.check_operations(backend, case, (3,))


AGAIN = [*golden.SERVED, *golden.CASTS]


@each((*OURS, *TRITON), *singly(AGAIN[:: 1 + INTERPRETED]), every=SOME)
def test_requantize(backend: Operators, case: golden.Spec) -> None:
    """Messages of sums, in the same and in other bits."""
    golden.check_requantize(backend, case, (3,) if INTERPRETED else (1, 3, 8))


OF_MEMBERS = [*FORMATS[::2], *CAST_FORMATS[::2]]


@each((*OURS, *TRITON), *singly(OF_MEMBERS[:: 1 + 4 * INTERPRETED]), every=SOME)
def test_members(backend: Operators, case: Format) -> None:
    """One call serves all members, wherever their pieces and messages lie; the one left out is left
    alone.
    """
    golden_members.check_members(backend, case)
    if not INTERPRETED:
        golden_members.check_members(backend, case, members=(5, 1))


MANY = [(1, -1), (2, -1), (4, 1), (9, 2), (129, 0), (130, 77), (130, 129)]
"""Messages to be summed, and which of them is left out."""


@pytest.mark.parametrize("backend", [*OURS, *TRITON], indirect=True)
def test_nothing_is_limited_by_its_number(backend: Operators) -> None:
    """Messages, this rank's own left out among them; pieces that are sent with a launch, and those
    of which a table lies in device memory; members.
    """
    for sources, hole in MANY[-1:] if INTERPRETED else MANY:
        golden_members.check_many(backend, sources, hole)
    golden_members.check_many_pieces(backend, 65)
    golden_members.check_many_members(backend, 20 if INTERPRETED else 100)


@pytest.mark.parametrize("backend", often(("wave32", "native"), HARDWARE), indirect=True)
def test_a_gpu_takes_any_number(backend: Operators) -> None:
    """Messages of 9,408 nodes, 5,000 pieces, 1,000 members."""
    golden_members.check_many(backend, 9408, 5000)
    golden_members.check_many_pieces(backend, 5000)
    golden_members.check_many_members(backend, 1000)


@pytest.mark.parametrize("backend", OURS, indirect=True)
def test_sparse(backend: Operators) -> None:
    """Masks, selections, packets, sketches and the optimizer of sparse sums."""
    golden.check_sparse(backend)


@pytest.mark.parametrize("backend", [*OURS, *TRITON], indirect=True)
def test_roundings(backend: Operators) -> None:
    """Half way between two values the even one, at every exponent; denormals; the smallest and
    largest blocks.
    """
    golden.check_roundings(backend)


LAYOUTS = [*golden_codes.RAGGED, *golden_codes.SINGLE]


@each(OURS, *singly(golden_codes.FATES), every=1 if ON_GPU else 5)
def test_codes_have_the_references_bits(backend: Operators, case: str) -> None:
    """Scales, messages and what is stored, whichever blocks are sent whole, numbers of them around
    those of a chunk.
    """
    for layout in LAYOUTS:
        golden_codes.check_codes(backend, layout, case)


@pytest.mark.parametrize("backend", OURS, indirect=True)
def test_all_bytes_that_changes_may_come_in(backend: Operators) -> None:
    """Lists of every byte, masks of every size."""
    golden_codes.check_extremes(backend)


@pytest.mark.parametrize("backend", (*EMULATED[:1], *NATIVE, *TRITON), indirect=True)
def test_large_tensors(backend: Operators) -> None:
    """On a GPU more values and codes than 32 bits count."""
    golden.check_large(backend, 2**15 if INTERPRETED else LARGE)
    if backend.kernels is None:
        golden_codes.check_large(backend, LARGE)


@pytest.mark.parametrize("case", golden_members.FAR_CASES, ids=str)
@pytest.mark.parametrize("backend", EMULATED[:1] or TRITON, indirect=True)
def test_places_beyond_32_bits(backend: Operators, case: tuple[Any, int, int | None]) -> None:
    """Rows, members and messages that far apart are found, read and written."""
    golden_members.check_far(backend, *case)


@pytest.mark.parametrize("backend", EMULATED[:1], indirect=True)
def test_codes_beyond_32_bits(backend: Operators) -> None:
    """Parameters, rows of masters and messages over 2^32 bytes apart."""
    golden_codes.check_far(backend, golden.untouched)


# -- anything anywhere -----------------------------------------------------------------------------

COLUMNS = st.integers(0, 150) | st.sampled_from([256, 700, 1029, 2051, 2560, 5120])
SPECS: st.SearchStrategy[golden.Spec] = st.sampled_from([*golden.SERVED, *golden.CASTS])
SOURCES = st.sampled_from([(1, -1), (2, 0), (3, 1), (7, -1), (8, -1), (9, 2), (17, 11), (18, -1)])
"""Messages that are summed, and which of them is left out."""


@st.composite
def views(draw: st.DrawFn) -> list[View]:
    """A few pieces of any shape, dtype, alignment, filling and missing end, of the same members,
    with any bits; most of them aligned.
    """
    members, made = draw(st.integers(1, 3)), []
    dtypes = st.sampled_from(draw(st.sampled_from([FLOATS, *zip(FLOATS)])))
    offsets = draw(st.sampled_from([st.just(0), st.integers(0, 8)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    for _ in range(draw(st.integers(1, 4))):
        rows, width = draw(st.integers(0, 5)), draw(COLUMNS)
        alongside = draw(st.booleans())
        stride = (members * width if alongside else width) + draw(st.sampled_from([0, 1, 8, 100]))
        step = width if alongside else rows * stride + draw(offsets)
        extent = max(0, (members - 1) * step + (rows - 1) * stride + width)
        offset, dtype = draw(offsets), draw(dtypes)
        flat = golden.values(
            offset + draw(st.sampled_from([extent, 2 * extent, extent // 2])), dtype
        )
        if draw(st.booleans()):
            flat.view(torch.uint8).random_(generator=generator)
        columns = width + draw(st.sampled_from([0, 0, 1, 64]))
        made.append(View(flat[offset:], rows, columns, stride, members, step, width))
    return made


@pytest.mark.parametrize("backend", OURS, indirect=True)
@given(
    pieces=views().filter(golden.total_numel),
    spec=SPECS,
    sources=SOURCES,
    how=st.tuples(st.sampled_from([1.0, 0.3]), st.booleans()),
    seed=st.none() | st.integers(0, 2**31),
)
def test_pieces_anywhere(
    backend: Operators,
    pieces: list[View],
    spec: golden.Spec,
    sources: tuple[int, int],
    how: tuple[float, bool],
    seed: int | None,
) -> None:
    """Whatever the pieces, and whatever bytes came: they are read, written and added to where they
    lie and nowhere else, and sums become messages.
    """
    message = golden.same_message(backend, pieces, spec).view(pieces[0].members, -1)
    numel = golden.total_numel(pieces)
    few = golden.messages_of(spec, numel, 5)[1:]
    table = torch.stack([few[i % 4].expand_as(message) for i in range(sources[0])])
    table[-1] = message
    if seed is not None:
        table.random_(generator=torch.Generator().manual_seed(seed))
    stored = [replace(p, flat=p.flat.nan_to_num(0.5)) for p in pieces]
    messages = from_sources(table.to(backend.device), sources[1])
    golden.same_sums(backend, messages, spec, stored, how)
    golden.same_again(backend, messages, spec, golden.others_of(spec)[-1], (numel, how[0]))


@pytest.mark.parametrize("backend", OURS, indirect=True)
@given(
    n=st.integers(1, 5000),
    rows=st.integers(3, 40),
    seed=st.integers(0, 2**31),
    density=st.sampled_from([0, 1]),
)
def test_sketches_of_any_bytes(
    backend: Operators, n: int, rows: int, seed: int, density: int
) -> None:
    """Sketches that are not the sum of what the mask says, and garbage in the mask's unused bits:
    values come out.
    """
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (-(-n // 8),), generator=generator, dtype=torch.uint8)
    sketch = torch.randint(0, 256, (4096 * rows,), generator=generator, dtype=torch.uint8)
    bits, sketch = (x.to(backend.device) for x in (bits * density, sketch))
    out = torch.full((n,), 7.0, device=backend.device)
    left = backend.sketch_peel(sketch.view(torch.float32).view(rows, 1024), bits, seed, out)
    present = torch.zeros(bits.numel() * 8, dtype=torch.bool, device=backend.device)
    backend.mask_unpack(bits, present)
    assert 0 <= int(left) <= int(present[:n].sum())
    assert not out[~present[:n]].any()


# -- fences ----------------------------------------------------------------------------------------


def check_fenced(backend: Operators) -> None:
    """Each operation, of block and of other sizes; with results that go past the caches."""
    for fmt in (*BLOCKS[::5], *CAST_FORMATS[::2]):
        golden.check_operations(backend, fmt, (3,))
    for fmt in (BLOCKS[0], CAST_FORMATS[5]):
        golden_members.check_members(backend, fmt)
    golden.check_sparse(backend)
    for layout in (golden_codes.ragged(64), golden_codes.single(69, 256)):
        golden_codes.check_codes(backend, layout, "mixed")
    for spec in (BlockSpec("int8"), Cast("bf16"), Cast("fp32")):
        wide = golden.calm(4_500_001, torch.bfloat16)
        for piece in (golden.whole(wide[1:]), View(wide, 500, 9000, 9001)):
            message = golden.same_message(backend, [piece], spec)
            golden.same_values(backend, message, spec, [piece])


@pytest.mark.parametrize("name", often(FENCED[2::2], () if INTERPRETED else FENCED))
def test_nothing_beyond_any_array_is_touched(name: str) -> None:
    """Neither read nor written, also by instructions that sanitizers do not see (masked ones, for
    example).
    """
    with opened(name) as fenced:
        child = os.fork()
        if child == 0:  # a fault ends this process only
            status = 1
            try:
                check_fenced(fenced)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0


# -- Triton ----------------------------------------------------------------------------------------

FAR = golden_members.FAR


@pytest.mark.parametrize("backend", TRITON, indirect=True)
def test_triton_refuses_misaligned_messages(backend: Operators) -> None:
    """What is in them would be too, which no kernel can read."""
    for spec in (BlockSpec("int8"), Cast("bf16")):
        room = torch.empty(2 * spec.nbytes(300) + 2, dtype=torch.uint8, device=backend.device)
        odd = room[1:-1].view(2, -1)
        apart = room.new_empty(2, spec.nbytes(300) + 1)[:, :-1]
        piece = golden.whole(torch.empty(300, device=backend.device))
        for messages in (from_sources(odd), from_sources(apart)):
            with pytest.raises(ValueError, match="multiples of"):
                backend.dequantize_reduce(messages, spec, [piece])
        with pytest.raises(ValueError, match="multiples of"):
            backend.quantize([piece], spec, to_members(odd[0]))


def tail_of(message: torch.Tensor, spec: BlockSpec | Cast, numel: int, tail: int) -> torch.Tensor:
    """What a message has of the last values, without its planes' padding."""
    if isinstance(spec, Cast):
        return message[-spec.nbytes(tail) :]
    before, blocks = spec.blocks(numel - tail), spec.blocks(tail)
    planes = (0, spec.block_bytes), (spec.scales_offset(numel), 4)
    return torch.cat([message[begin + before * unit :][: blocks * unit] for begin, unit in planes])


@pytest.mark.parametrize(
    "spec", [BlockSpec("int8", 64), BlockSpec("int4", 256), Cast("bf16")], ids=str
)
@pytest.mark.parametrize("backend", TRITON if INTERPRETED else (), indirect=True)
def test_triton_beyond_2_32_values(
    backend: Operators, spec: BlockSpec | Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tile of such a message, in both directions, of rows and of one row, and once more
    from message to message. Of launches of a million programs, only the last one is run.
    """
    from triton.runtime.interpreter import interpreter_builder as interpreter

    def launch(kernel: Any, programs: int, target: Any, *arguments: Any, warps: int = 4) -> None:
        here = (programs - 1, 0, 0)
        monkeypatch.setattr(
            interpreter, "set_grid_idx", lambda *_: setattr(interpreter, "grid_idx", here)
        )
        kernel[(1,)](target, *arguments)

    monkeypatch.setattr(backend.kernels, "launch", launch)
    tail, stride = FAR % 4096, FAR // 8 + 8
    rows = View(golden.untouched(FAR + 7 * 8, torch.bfloat16), 8, FAR // 8, stride)
    for piece in (View(golden.untouched(FAR, torch.bfloat16), 1, FAR, FAR), rows):
        last = golden.whole(piece.flat[-tail:])
        last.flat.copy_(golden.calm(tail, torch.bfloat16))
        quantized, again = (golden.untouched(spec.nbytes(FAR), torch.uint8) for _ in range(2))
        backend.quantize([piece], spec, to_members(quantized))
        backend.requantize(to_members(quantized), spec, spec, to_members(again), FAR)
        small = golden.same_message(golden.REFERENCE, [last], spec)
        wanted = tail_of(small, spec, tail, tail)
        for message in (quantized, again):
            golden.assert_same(tail_of(message, spec, FAR, tail), wanted, str(spec))
        values = golden.blank([last])
        golden.REFERENCE.dequantize_reduce(to_members(small), spec, values)
        last.flat.zero_()
        backend.dequantize_reduce(to_members(quantized), spec, [piece])
        golden.assert_same(last.flat, values[0].flat, f"{spec} back")
