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
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.device import ON_GPU
from tests.kernels import golden, golden_codes
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
from tests.kernels.operators import Operators
from tests.launching import ROOT, output
from tests.marks import late, often
from zero_topo.quant.operands import View, from_sources, to_members, view_of
from zero_topo.quant.spec import BlockSpec, Cast, Format

ALONE = () if INTERPRETED else (*CPU, *SPLIT)
OURS = () if INTERPRETED else (*ALONE, *GPU, *NATIVE)
"""Backends of all operations."""
EMULATED = () if INTERPRETED else GPU
HARDWARE = () if INTERPRETED else (*GPU, *NATIVE)
LARGE = 2**31 + 2**20 if ON_GPU and "ZERO_TOPO_TEST_SMALL" not in os.environ else 2**20
FORMATS = [*golden.SERVED, *golden.CASTS]
LAYOUTS = [*golden_codes.RAGGED, *golden_codes.SINGLE]
SEEDS = st.integers(0, 0 if INTERPRETED else 2**31)
MANY = [(1, -1), (2, -1), (4, 1), (9, 2), (129, 0), (130, 77), (130, 129)]
"""Messages to be summed, and which of them is left out."""


def of(*names: Any) -> pytest.MarkDecorator:
    """Tries each backend."""
    return pytest.mark.parametrize("backend", names, indirect=True)


@pytest.mark.skipif(INTERPRETED, reason="is that process")
@pytest.mark.parametrize(
    "which", ["test_operations and triton and int4", late("")], ids=["few", "all"]
)
def test_triton_in_its_interpreter(which: str) -> None:
    """The checks of this file that Triton serves, on CPU tensors."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-W", "ignore::RuntimeWarning", "-k", which, __file__]
    output(command, env=env, cwd=ROOT)


@of(*OURS, *TRITON)
@pytest.mark.parametrize("spec", FORMATS, ids=str)
@given(seed=SEEDS)
def test_operations(backend: Operators, spec: Format, seed: int) -> None:
    """Messages, sums and messages of sums, wherever pieces and messages lie; nothing is written
    elsewhere.
    """
    golden.check_operations(backend, spec, seed)


@of(*ALONE, *TRITON)
@given(seed=SEEDS, spec=st.sampled_from(golden.BLOCKS))
def test_operations_of_other_blocks(backend: Operators, spec: Format, seed: int) -> None:
    """The same, of blocks of every size, for which the CPU and Triton alone have kernels."""
    golden.check_operations(backend, spec, seed)


@of(*OURS, *TRITON)
def test_nothing_is_limited_by_its_number(backend: Operators) -> None:
    """Messages, this rank's own left out among them; pieces that are sent with a launch, and those
    of which a table lies in device memory; members.
    """
    for sources, hole in MANY[-1:] if INTERPRETED else MANY:
        golden.check_many(backend, sources, hole)
    golden.check_many_pieces(backend, 65, 20 if INTERPRETED else 100)


@of(*often(NATIVE, HARDWARE))
def test_a_gpu_takes_any_number(backend: Operators) -> None:
    """Messages of 9,408 nodes, 5,000 pieces, 1,000 members."""
    golden.check_many(backend, 9408, 5000)
    golden.check_many_pieces(backend, 5000, 1000)


@of(*OURS)
@pytest.mark.parametrize("check", golden.SPARSE)
@given(seed=SEEDS)
def test_sparse(backend: Operators, check: Callable[[Operators, Random], None], seed: int) -> None:
    """Masks, selections, packets, sketches and the optimizer of sparse sums."""
    torch.manual_seed(seed)
    check(backend, Random(seed))


@of(*OURS, *TRITON)
def test_roundings(backend: Operators) -> None:
    """Half way between two values the even one, at every exponent; denormals; the smallest and
    largest blocks.
    """
    golden.check_roundings(backend)


@of(*OURS)
@given(layout=st.sampled_from(LAYOUTS), leave=st.sampled_from([0.0, 0.05, 0.4, 1.0]), seed=SEEDS)
def test_codes_have_the_references_bits(
    backend: Operators, layout: golden_codes.Layout, leave: float, seed: int
) -> None:
    """Scales, messages and what is stored, whichever blocks are sent whole, numbers of them around
    those of a chunk.
    """
    golden_codes.check_codes(backend, layout, leave, seed)


@of(*OURS)
@pytest.mark.parametrize("add", [torch.inf, torch.nan])
def test_codes_of_masters_that_were_edited(backend: Operators, add: float) -> None:
    """The owner's codes are those of its message, whatever its masters became in between."""
    golden_codes.check_edited(backend, add)


@of(*EMULATED[:1], *NATIVE, *TRITON)
def test_large_tensors(backend: Operators) -> None:
    """On a GPU more values and codes than 32 bits count."""
    golden.check_large(backend, 2**15 if INTERPRETED else LARGE)
    if backend.kernels is None:
        golden_codes.check_large(backend, LARGE)


@of(*(EMULATED[:1] or TRITON))
@pytest.mark.parametrize("case", golden.FAR_CASES, ids=str)
def test_places_beyond_32_bits(backend: Operators, case: tuple[Any, int, int | None]) -> None:
    """Rows, members and messages that far apart are found, read and written."""
    golden.check_far(backend, *case)


@of(*EMULATED[:1])
def test_codes_beyond_32_bits(backend: Operators) -> None:
    """Parameters, rows of masters and messages over 2^32 bytes apart."""
    golden_codes.check_far(backend)


@of(*OURS)
@given(n=st.integers(1, 5000), rows=st.integers(3, 40), seed=SEEDS, density=st.integers(0, 1))
def test_sketches_of_any_bytes(
    backend: Operators, n: int, rows: int, seed: int, density: int
) -> None:
    """Sketches that are not the sum of what the mask says, and garbage in the mask's unused bits:
    values come out.
    """
    torch.manual_seed(seed)
    bits = torch.randint(0, 256, (-(-n // 8),), dtype=torch.uint8)
    sketch = torch.randint(0, 256, (4096 * rows,), dtype=torch.uint8)
    bits, sketch = (x.to(backend.device) for x in (bits * density, sketch))
    out = torch.full((n,), 7.0, device=backend.device)
    left = backend.sketch_peel(sketch.view(torch.float32).view(rows, 1024), bits, seed, out)
    present = torch.zeros(bits.numel() * 8, dtype=torch.bool, device=backend.device)
    backend.mask_unpack(bits, present)
    assert 0 <= int(left) <= int(present[:n].sum())
    assert not out[~present[:n]].any()


# -- fences ----------------------------------------------------------------------------------------


def check_fenced(backend: Operators) -> None:
    """Each operation; with results that go past the caches."""
    for seed, spec in enumerate((*golden.BLOCKS, *golden.CASTS)):
        golden.check_operations(backend, spec, seed)
    for seed, check in enumerate(3 * golden.SPARSE):
        check(backend, Random(seed))
    for layout in (golden_codes.ragged(64), golden_codes.single(69, 256)):
        golden_codes.check_codes(backend, layout, 0.4, 0)
    for spec in (BlockSpec("int8"), Cast("bf16"), Cast("fp32")):
        wide = golden.calm(4_500_001, torch.bfloat16)
        for piece in (view_of(wide[1:]), View(wide, 500, 9000, 9001)):
            messages = to_members(golden.quantized(backend, [piece], spec))
            golden.same(backend, "dequantize_reduce", messages, spec, [piece])


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


@of(*TRITON)
def test_triton_refuses_misaligned_messages(backend: Operators) -> None:
    """What is in them would be too, which no kernel can read."""
    for spec in (BlockSpec("int8"), Cast("bf16")):
        room = torch.empty(2 * spec.nbytes(300) + 2, dtype=torch.uint8, device=backend.device)
        odd = room[1:-1].view(2, -1)
        apart = room.new_empty(2, spec.nbytes(300) + 1)[:, :-1]
        piece = view_of(torch.empty(300, device=backend.device))
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
@of(*(TRITON if INTERPRETED else ()))
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
    numel = golden.FAR
    tail, stride = numel % 4096, numel // 8 + 8
    rows = View(golden.untouched(numel + 7 * 8, torch.bfloat16), 8, numel // 8, stride)
    for piece in (View(golden.untouched(numel, torch.bfloat16), 1, numel, numel), rows):
        last = view_of(piece.flat[-tail:])
        last.flat.copy_(golden.calm(tail, torch.bfloat16))
        made, again = (golden.untouched(spec.nbytes(numel), torch.uint8) for _ in range(2))
        backend.quantize([piece], spec, to_members(made))
        backend.requantize(to_members(made), spec, spec, to_members(again), numel)
        small = golden.quantized(golden.REFERENCE, [last], spec)[0]
        wanted = tail_of(small, spec, tail, tail)
        for message in (made, again):
            assert torch.equal(tail_of(message, spec, numel, tail), wanted)
        sums = golden.same(golden.REFERENCE, "dequantize_reduce", to_members(small), spec, [last])
        last.flat.zero_()
        backend.dequantize_reduce(to_members(made), spec, [piece])
        golden.assert_same(last.flat, sums[2][0].flat, f"{spec} back")
