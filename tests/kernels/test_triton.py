# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The Triton backend gives the reference's bits: on a GPU where there is one, and anywhere in Triton's interpreter.

Triton looks at TRITON_INTERPRET when it is imported, so one process runs these tests again with the variable set
(``TRITON_INTERPRET=1 pytest tests/kernels/test_triton.py`` shows them one by one). The interpreter takes a millisecond
for what a GPU does in a nanosecond: it sees every dtype and bit width, but only some of their combinations, and fewer
numbers of sources; a GPU sees them all.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.kernels import golden
from tests.launching import ROOT
from zero_topo.quant import reference
from zero_topo.quant.pieces import FLOATS, Piece
from zero_topo.quant.spec import BlockSpec, Reduce, Total

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"

SPECS = golden.SPECS if GPU else [spec for spec in golden.SPECS if spec.block_size in (64, 256, 2048)]
FORMATS = golden.FORMATS if GPU else [golden.Format(spec, FLOATS[i % 3]) for i, spec in enumerate(SPECS)]
SOURCES = (1, 3, 8) if GPU else (3,)


@pytest.fixture(scope="module")
def backend() -> Any:
    """The module."""
    from zero_topo.quant import triton

    return triton


class TestElsewhere:
    """What this process cannot do itself."""

    __test__ = not INTERPRETED

    @pytest.mark.parametrize("which", ["operations", "not operations"])
    def test_the_interpreter_runs_these_tests(self, which: str) -> None:
        """Every check of this file passes on CPU tensors, in Triton's interpreter; halves of them for two workers."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
        env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [*command, "-k", which, __file__], env=env, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


class TestBackend:
    """The backend on this process's device."""

    __test__ = INTERPRETED or GPU

    @pytest.mark.parametrize("fmt", FORMATS, ids=str)
    def test_operations_give_the_references_bits(self, backend: Any, fmt: golden.Format) -> None:
        """Every layout and size, special values, factors, accumulation."""
        golden.check_operations(backend, fmt, DEVICE, SOURCES)

    @pytest.mark.parametrize("spec", SPECS, ids=str)
    def test_sums_are_quantized_again(self, backend: Any, spec: BlockSpec) -> None:
        """To the same and to other bits."""
        golden.check_requantize(backend, spec, DEVICE, SOURCES)

    def test_sparse(self, backend: Any) -> None:
        """Masks packed and back; counts and picks above a threshold; sketches and their inverse, some left over."""
        golden.check_sparse(backend, DEVICE)

    @pytest.mark.parametrize("bits", [8, 4])
    @pytest.mark.parametrize("symmetric", [True, False])
    def test_rounds_half_to_even(self, backend: Any, bits: int, symmetric: bool) -> None:
        """Halves and their neighbours, at scales of every exponent: the sum that rounds is one rounding of its own."""
        spec = BlockSpec(bits, 256, symmetric)
        top = spec.levels if symmetric else 2 * spec.levels + 1
        generator = torch.Generator().manual_seed(bits)
        bound = (1 + torch.rand(224, 1, generator=generator)) * 2.0 ** torch.arange(-99, 125)[:, None]
        halves = torch.randint(-top if symmetric else 0, top, (224, 256), generator=generator) + 0.5
        x = bound * halves / top
        x += x * 2.0**-23 * torch.randint(-1, 2, x.shape, generator=generator)
        x[:, 0], x[:, 1] = bound[:, 0], 0.0
        golden.same_message(backend, [golden.whole(x.view(-1))], spec, DEVICE)

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_the_smallest_blocks_that_are_not_zero(self, backend: Any, symmetric: bool) -> None:
        """A magnitude or span of exactly 2^-100 is quantized, one below it is not."""
        edges = [2.0**-100, 2.0**-100 * (1 - 2.0**-24), 2.0**-101, 2.0**-99]
        x = torch.stack([torch.linspace(0, edge, 64) for edge in edges])
        x[:, -1] = torch.tensor(edges)
        golden.same_message(backend, [golden.whole(x.view(-1))], BlockSpec(4, 64, symmetric), DEVICE)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_sums_are_rounded_half_to_even(self, backend: Any, dtype: torch.dtype) -> None:
        """Integers that need one bit more than BF16 has; and what was there survives, if it is denormal, a sum of 0."""
        spec, generator = BlockSpec(8), torch.Generator().manual_seed(3)
        x = torch.randint(-127, 128, (3, 2000), generator=generator).float()
        x[:, ::50], x[:, 1::50] = 127, 0
        sources = torch.stack([torch.empty(spec.nbytes(2000), dtype=torch.uint8) for _ in x])
        for values, message in zip(x, sources, strict=True):
            reference.quantize([golden.whole(values)], spec, message)
        smallest = torch.finfo(dtype).smallest_normal / 2
        for reduce in (Reduce(), Reduce(accumulate=True)):
            held = golden.whole(torch.full((2000,), smallest, dtype=dtype))
            golden.same_sums(backend, list(sources.to(DEVICE)), spec, [held], reduce)

    @pytest.mark.parametrize("rows", [1, 3])
    def test_a_piece_may_end_before_its_tensor(self, backend: Any, rows: int) -> None:
        """What follows in memory is somebody else's, also within a tile that memory has wholly."""
        spec = BlockSpec(8)
        pieces = [Piece(golden.calm(20_000, torch.float32), rows, 1600, 2000)]
        message = golden.same_message(backend, pieces, spec, DEVICE)
        golden.same_values(backend, message.to(DEVICE), spec, pieces)

    @pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3], [2, 0, 3, 1]], ids=str)
    def test_messages_lie_anywhere(self, backend: Any, order: Sequence[int]) -> None:
        """Evenly spaced in one buffer, forwards and backwards, as in a hop's slots, or not."""
        spec, numel = BlockSpec(4), 1000
        buffer = torch.stack(golden.messages_of(spec, numel, 4)).to(DEVICE)
        golden.same_sums(backend, [buffer[i] for i in order], spec, [golden.whole(torch.ones(numel))], Reduce(0.3))

    def test_offsets_have_64_bits(self, backend: Any) -> None:
        """Rows 2^32 elements apart, all but the first beyond the end: with fewer bits they would be the first again."""
        for columns in (64, 48, 400):
            pieces = [Piece(golden.calm(columns, torch.float32), 3, columns, 2**32)]
            message = golden.same_message(backend, pieces, BlockSpec(8, 64), DEVICE)
            golden.same_values(backend, message.to(DEVICE), BlockSpec(8, 64), pieces)

    def test_nothing_beyond_a_message_is_written(self, backend: Any) -> None:
        """The last tile ends with the message, whatever its planes' padding."""
        for spec in SPECS:
            for numel in [1, *(random.Random(spec.block_size).randrange(1, 9000) for _ in range(4))]:
                size = spec.nbytes(numel)
                buffer = torch.full((size + 4096,), 0x77, dtype=torch.uint8, device=DEVICE)
                source = golden.calm(numel, torch.float32).to(DEVICE)
                backend.quantize([golden.whole(source)], spec, buffer[2048 : 2048 + size])
                assert bool((buffer[:2048] == 0x77).all() and (buffer[2048 + size :] == 0x77).all()), f"{spec} {numel}"

    def test_misaligned_messages(self, backend: Any) -> None:
        """Scales in them would be too: to read they are copied, to write they are refused."""
        spec, numel = BlockSpec(8), 300
        (message,) = golden.messages_of(spec, numel, 1)
        odd = torch.empty(message.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].copy_(message)
        golden.same_values(backend, odd, spec, [golden.whole(torch.empty(numel))])
        with pytest.raises(ValueError, match="multiple of 16 bytes"):
            backend.requantize([odd], spec, spec, odd, Total(numel))
