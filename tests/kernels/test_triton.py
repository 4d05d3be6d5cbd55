# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The Triton backend gives the reference's bits: on a GPU where there is one, and anywhere in
Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so one process runs these tests again with the
variable set (``TRITON_INTERPRET=1 pytest tests/kernels/test_triton.py`` shows them one by one). The
interpreter takes a millisecond for what a GPU does in a nanosecond: it sees every dtype and bit
width, but only some of their combinations, and fewer numbers of sources; a GPU sees them all.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from tests.kernels import golden, golden_members
from tests.kernels.operators import REFERENCE, Operators
from tests.launching import ROOT, output
from zero_topo.quant.operands import FLOATS, View, from_sources, to_members
from zero_topo.quant.spec import BlockSpec, Cast

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"

SPECS = (
    golden.SPECS if GPU else [spec for spec in golden.SPECS if spec.block_size in (64, 256, 2048)]
)
FORMATS = (
    golden.FORMATS if GPU else [golden.Format(spec, FLOATS[i % 3]) for i, spec in enumerate(SPECS)]
)
FORMATS += golden.CAST_FORMATS if GPU else golden.CAST_FORMATS[2::2]
FORMATS = FORMATS if GPU else FORMATS[::2]  # in the interpreter each takes seconds
SOURCES = (1, 3, 8) if GPU else (3,)


@pytest.fixture(scope="module")
def backend() -> Any:
    """The module, and what it leaves to the reference."""
    from zero_topo.quant import triton

    return Operators(triton)


class TestElsewhere:
    """What this process cannot do itself."""

    __test__ = not INTERPRETED

    @pytest.mark.parametrize(
        "which", ["operations", pytest.param("not operations", marks=pytest.mark.long)]
    )
    def test_the_interpreter_runs_these_tests(self, which: str) -> None:
        """Every check of this file passes on CPU tensors, in Triton's interpreter; halves of them
        for two workers.
        """
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::RuntimeWarning",
        ]
        env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        output([*command, "-k", which, __file__], env=env, cwd=ROOT)


class TestBackend:
    """The backend on this process's device."""

    __test__ = INTERPRETED or GPU

    @pytest.mark.parametrize("fmt", FORMATS, ids=str)
    def test_operations_give_the_references_bits(self, backend: Any, fmt: golden.Format) -> None:
        """Every layout and size, special values, factors, accumulation."""
        golden.check_operations(backend, fmt, DEVICE, SOURCES)

    @pytest.mark.parametrize("fmt", FORMATS if GPU else FORMATS[-2:-1], ids=str)
    def test_members_are_served_at_once(self, backend: Any, fmt: golden.Format) -> None:
        """Each gets and gives what is its own, wherever pieces and messages lie; a member and a
        source are left out.
        """
        golden_members.check_members(backend, fmt, DEVICE, (2, 3) if GPU else (1, 3))

    def test_members_of_members(self, backend: Any) -> None:
        """Outer and inner ones, in messages that lie in any order."""
        golden_members.check_members(
            backend, golden.Format(BlockSpec("int4", 64), torch.bfloat16), DEVICE
        )

    @pytest.mark.parametrize("count", [129, 9408] if GPU else [129])
    @pytest.mark.parametrize("hole", [-1, 17])
    def test_any_number_of_messages(self, backend: Any, count: int, hole: int) -> None:
        """There is no limit to the sources of a sum."""
        golden_members.check_many(backend, count, hole, DEVICE)

    @pytest.mark.parametrize("count", [65, 5000] if GPU else [65])
    def test_any_number_of_pieces(self, backend: Any, count: int) -> None:
        """There is no limit to the parts of a message."""
        golden_members.check_many_pieces(backend, count, DEVICE)

    def test_any_number_of_members(self, backend: Any) -> None:
        """There is no limit to the members; a GPU's grid has one, on all axes but the first."""
        golden_members.check_many_members(backend, 2**16 + 1 if GPU else 20, DEVICE)

    @pytest.mark.parametrize("spec", [*SPECS, Cast("bf16")], ids=str)
    def test_sums_are_quantized_again(self, backend: Any, spec: BlockSpec) -> None:
        """To the same and to other bits."""
        golden.check_requantize(backend, spec, DEVICE, SOURCES)

    def test_roundings(self, backend: Any) -> None:
        """Half way between two values the even one, at every exponent; denormals; the smallest and
        largest blocks.
        """
        golden.check_roundings(backend, DEVICE)

    def test_large_tensors(self, backend: Any) -> None:
        """On a GPU more values than 32 bits count."""
        golden.check_large(backend, 2**31 + 2**20 if GPU else 2**15, DEVICE)

    def test_misaligned_messages(self, backend: Any) -> None:
        """What is in them would be too, which no kernel can read: they are refused."""
        for spec in (BlockSpec("int8"), Cast("bf16")):
            odd = torch.empty(2 * spec.nbytes(300) + 2, dtype=torch.uint8, device=DEVICE)[
                1:-1
            ].view(2, -1)
            apart = torch.empty(2, spec.nbytes(300) + 1, dtype=torch.uint8, device=DEVICE)[:, :-1]
            piece = golden.whole(torch.empty(300, device=DEVICE))
            for messages in (from_sources(odd), from_sources(apart)):
                with pytest.raises(ValueError, match="multiples of"):
                    backend.dequantize_reduce(messages, spec, [piece])
            with pytest.raises(ValueError, match="multiples of"):
                backend.quantize([piece], spec, to_members(odd[0]))


FAR = golden_members.FAR


def tail_of(message: torch.Tensor, spec: BlockSpec | Cast, numel: int, tail: int) -> torch.Tensor:
    """What a message has of the last values, without its planes' padding."""
    if isinstance(spec, Cast):
        return message[-spec.nbytes(tail) :]
    before, blocks = spec.blocks(numel - tail), spec.blocks(tail)
    planes = (0, spec.block_bytes), (spec.scales_offset(numel), 4)
    return torch.cat([message[begin + before * unit :][: blocks * unit] for begin, unit in planes])


class TestFar:
    """Positions above 2^31 and 2^32, in memory that is not there but where it is written.

    Of launches of a million programs, only the last one is run.
    """

    __test__ = INTERPRETED

    @pytest.fixture
    def last_program(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets each launch run its last program only."""
        from triton.runtime.interpreter import interpreter_builder as interpreter

        def launch(
            kernel: Any, programs: int, target: Any, *arguments: Any, warps: int = 4
        ) -> None:
            here = (programs - 1, 0, 0)
            monkeypatch.setattr(
                interpreter, "set_grid_idx", lambda *_: setattr(interpreter, "grid_idx", here)
            )
            kernel[(1,)](target, *arguments)

        monkeypatch.setattr(backend.kernels, "launch", launch)

    @pytest.mark.parametrize("case", golden_members.FAR_CASES, ids=str)
    def test_members_rows_and_messages_far_apart(
        self, backend: Any, case: tuple[Any, int, int | None]
    ) -> None:
        """Each is read from, and written to, where it lies."""
        golden_members.check_far(backend, *case)

    @pytest.mark.parametrize(
        "spec", [BlockSpec("int8", 64), BlockSpec("int4", 256), Cast("bf16")], ids=str
    )
    def test_a_message_beyond_2_32_values(
        self, backend: Any, last_program: None, spec: BlockSpec | Cast
    ) -> None:
        """The last tile of one, in both directions, of rows and of one row; and once more from
        message to message.
        """
        tail, stride = FAR % 4096, FAR // 8 + 8
        rows = View(golden.untouched(FAR + 7 * 8, torch.bfloat16), 8, FAR // 8, stride)
        for piece in (View(golden.untouched(FAR, torch.bfloat16), 1, FAR, FAR), rows):
            last = golden.whole(piece.flat[-tail:])
            last.flat.copy_(golden.calm(tail, torch.bfloat16))
            made = {
                name: golden.untouched(spec.nbytes(FAR), torch.uint8)
                for name in ("quantized", "again")
            }
            backend.quantize([piece], spec, to_members(made["quantized"]))
            backend.requantize(
                to_members(made["quantized"]), spec, spec, to_members(made["again"]), FAR
            )
            small = golden.same_message(REFERENCE, [last], spec)
            for name, message in made.items():
                wanted = tail_of(small, spec, tail, tail)
                golden.assert_same(tail_of(message, spec, FAR, tail), wanted, f"{spec} {name}")
            values = golden.blank([last])
            REFERENCE.dequantize_reduce(to_members(small), spec, values)
            last.flat.zero_()
            backend.dequantize_reduce(to_members(made["quantized"]), spec, [piece])
            golden.assert_same(last.flat, values[0].flat, f"{spec} back")
