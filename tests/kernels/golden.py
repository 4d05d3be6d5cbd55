# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The suite every backend passes: the reference's bits, for every format and for the values that
break kernels.

A backend is an `Operators`. A test file of a backend parametrises over
`FORMATS` and calls the checks.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.kernels.operators import REFERENCE, serving
from zero_topo.quant import ops, reference_sparse
from zero_topo.quant.operands import (
    DTYPES,
    FLOATS,
    Messages,
    View,
    from_sources,
    to_members,
    total_numel,
    view_of,
)
from zero_topo.quant.spec import BLOCK_SIZES, NF4, BlockSpec, Cast

Spec = BlockSpec | Cast
SPECS = [*(BlockSpec(f"int{bits}", size) for bits, size in product((8, 4), BLOCK_SIZES)), NF4]


@dataclass(frozen=True)
class Format:
    """A wire format and the dtype of the values."""

    spec: Spec
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.spec}-{str(self.dtype).removeprefix('torch.')}"


PERIOD = 100_003
"""After so many, values come again: making them takes long, and no kernel works in steps of a prime
number.
"""

NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python's mmap does not name."""

FORMATS = [Format(spec, dtype) for spec, dtype in product(SPECS, FLOATS)]
SERVED: list[Spec] = [BlockSpec("int8"), BlockSpec("int4"), NF4]
"""Formats of blocks that a config can name; the GPU kernels have no other."""
GPU_FORMATS = [Format(spec, dtype) for spec, dtype in product(SERVED, FLOATS)]
FEW_FORMATS = [f for f in FORMATS if f.spec.block_size in (64, 256, 2048)]
CASTS: list[Spec] = [Cast(name) for name in DTYPES]
CAST_FORMATS = [Format(spec, dtype) for spec, dtype in product(CASTS, FLOATS)]


def block_of(spec: Spec) -> int:
    """Values of a block; casts have none, and vectors in its place."""
    return 64 if isinstance(spec, Cast) else spec.block_size


def sizes(spec: Spec) -> list[int]:
    """Sizes around one block, and an odd one of several."""
    block = block_of(spec)
    return [1, block - 1, block, block + 1, 5 * block + 37]


def values(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Ordinary values of growing size, with every special one strewn into some blocks of 64."""
    return _values(min(numel, PERIOD), dtype, seed).repeat(-(-numel // PERIOD) or 1)[:numel]


@lru_cache(maxsize=1024)
def _values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + numel)
    x = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(
        -6, 5, (numel,), generator=generator
    )
    top = torch.finfo(dtype).max
    specials = [
        torch.nan,
        torch.inf,
        -torch.inf,
        top,
        -top,
        0.0,
        -0.0,
        1e-42,
        -1e-45,
        2.0**-100,
        2.0**-101,
        0.5,
    ]
    x = x.to(dtype)
    for begin in range(0, numel, 64):
        kind = int(torch.randint(0, 24, (), generator=generator))
        part = x[begin : begin + 64]
        if kind < len(specials):
            part[int(torch.randint(0, part.numel(), (), generator=generator))] = specials[kind]
        elif kind == 12:
            part.zero_()
        elif kind == 13:
            part.mul_(1e-38)
        elif kind == 14:
            part.copy_((torch.arange(part.numel()) - 32).to(dtype) / 2)  # ties
    return x


def calm(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Ordinary values only."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed + 7 * numel)).to(dtype)


def untouched(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags=flags), dtype=dtype)


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal bit for bit, but that one NaN is as good as another."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    if actual.dtype.is_floating_point:
        nan = expected.isnan()
        assert torch.equal(actual.isnan(), nan), f"{what}: other NaNs"
        kind = torch.int32 if actual.dtype == torch.float32 else torch.int16
        actual, expected = (
            actual.view(kind).masked_fill(nan, 0),
            expected.view(kind).masked_fill(nan, 0),
        )
    wrong = (actual != expected).nonzero()
    where = wrong[0].tolist() if len(wrong) else []
    assert not where, (
        f"{what}: {len(wrong)} differ, first at {where}: {actual[where[0]]} for "
        f"{expected[where[0]]}"
    )


def layouts(
    numel: int, dtype: torch.dtype, make: Callable[..., Tensor] = values
) -> Iterator[tuple[str, list[View]]]:
    """Ways in which `numel` values lie in memory: plain, in aligned rows, misaligned, strided,
    ending early, in several pieces.
    """
    yield "plain", [whole(make(numel, dtype))]
    even = -(-numel // 16) * 8
    yield "aligned", [View(make(2 * even + 16, dtype), 2, even, even + 16)]
    yield "misaligned", [whole(make(numel + 1, dtype)[1:])]
    columns = max(1, numel // 3)
    stride = columns + 5
    yield "strided", [View(make(2 * stride + columns, dtype), 3, columns, stride)]
    yield "ending in a row", [View(make(stride + columns // 2, dtype), 3, columns, stride)]
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    few = [
        whole(make(1, other)),
        View(make(3 * stride, dtype), 3, columns, stride),
        whole(make(33, dtype)),
    ]
    yield "several", few
    empty = View(make(0, dtype), 2, 3, 3)
    yield "with some that do not exist", [empty, whole(make(70, dtype)), empty]


def whole(x: Tensor) -> View:
    """A contiguous tensor as a piece."""
    return view_of(x)


def on(device: torch.device | str, pieces: Sequence[View]) -> list[View]:
    """The pieces, copied to a device and there as misaligned as here; on the CPU nothing is
    copied.
    """
    if torch.device(device).type == "cpu":
        return list(pieces)
    return [replace(p, flat=_copied(p.flat, device)) for p in pieces]


def _copied(x: Tensor, device: torch.device | str) -> Tensor:
    ahead = x.storage_offset()
    return torch.empty(ahead + x.numel(), dtype=x.dtype, device=device)[ahead:].copy_(x)


def blank(pieces: Sequence[View]) -> list[View]:
    """Pieces of the same shapes with a recognisable filling."""
    return [replace(p, flat=torch.full_like(p.flat, 3.25)) for p in pieces]


def messages_of(spec: Spec, numel: int, sources: int) -> Tensor:
    """Messages of several ranks, ``[sources, bytes]``, by the reference; the values of the first
    one are special.
    """
    return torch.stack([_message(spec, numel, source) for source in range(sources)])


@lru_cache(maxsize=1024)
def _message(spec: Spec, numel: int, source: int) -> Tensor:
    x = values(numel, torch.float32) if source == 0 else calm(numel, torch.float32, source)
    made = torch.full((spec.nbytes(numel),), 0x5A, dtype=torch.uint8)
    REFERENCE.quantize([whole(x)], spec, to_members(made))
    return made


def same_message(
    backend: Any, pieces: Sequence[View], spec: Spec, device: str = "cpu", what: Any = ""
) -> Tensor:
    """The backend's message of the pieces, which is the reference's, padding bytes included; one of
    each member.
    """
    expected = torch.full(
        (pieces[0].members, spec.nbytes(total_numel(pieces))), 0xA5, dtype=torch.uint8
    )
    actual = torch.full_like(expected, 0x5A).to(device)
    REFERENCE.quantize(pieces, spec, to_members(expected))
    backend.quantize(on(device, pieces), spec, to_members(actual))
    same_bytes(actual, expected, spec, f"quantize {what}")
    return expected.squeeze(0)


def same_values(
    backend: Any, message: Tensor, spec: Spec, pieces: Sequence[View], what: Any = ""
) -> None:
    """The backend makes of a message, in pieces like these, what the reference does, and writes
    nothing between them.

    The backend works where the message lies; the reference wants it aligned.
    """
    same_sums(
        backend, to_members(message), spec, blank(pieces), (1.0, False), f"{what} dequantized"
    )


def same_sums(
    backend: Any,
    messages: Messages | Tensor,
    spec: Spec,
    pieces: Sequence[View],
    how: tuple[float, bool],
    what: Any = "",
) -> None:
    """The backend makes of messages, and of what copies of the pieces stored, the reference's sums.

    The backend works where the messages lie; a tensor of them is ``[sources, bytes]`` or
    ``[sources, members, bytes]``.
    """
    messages = messages if isinstance(messages, Messages) else from_sources(messages)
    expected = [replace(p, flat=p.flat.cpu().clone()) for p in pieces]
    actual = on(messages.table.device, [replace(p, flat=p.flat.clone()) for p in pieces])
    REFERENCE.dequantize_reduce(_on_cpu(messages), spec, expected, *how)
    backend.dequantize_reduce(messages, spec, actual, *how)
    for got, wanted in zip(actual, expected, strict=True):
        assert_same(got.flat.cpu(), wanted.flat, f"reduce {spec} {how} {what}")


def same_again(
    backend: Any,
    messages: Messages | Tensor,
    spec: Spec,
    to: Spec,
    total: tuple[int, float],
    what: Any = "",
) -> None:
    """The backend's messages of the sums of messages are the reference's; it works where the
    messages lie.
    """
    messages = messages if isinstance(messages, Messages) else from_sources(messages)
    expected = torch.full((messages.members, to.nbytes(total[0])), 0xA5, dtype=torch.uint8)
    actual = torch.full_like(expected, 0x5A).to(messages.table.device)
    REFERENCE.requantize(_on_cpu(messages), spec, to, to_members(expected), *total)
    backend.requantize(messages, spec, to, to_members(actual), *total)
    same_bytes(actual, expected, to, f"requantize {spec} {what}")


def _on_cpu(messages: Messages) -> Messages:
    return replace(messages, table=messages.table.cpu().clone())


def same_bytes(actual: Tensor, expected: Tensor, spec: Spec, what: str) -> None:
    """Messages, equal as :func:`assert_same` says; casts are compared as the floats that they
    are.
    """
    kind = DTYPES[spec.dtype] if isinstance(spec, Cast) else torch.uint8
    got, wanted = (message.cpu().flatten().view(kind) for message in (actual, expected))
    assert_same(got, wanted, f"{what} to {spec}")


def check_quantize(
    backend: Any, fmt: Format, device: str = "cpu", numels: Sequence[int] = ()
) -> None:
    """The same message, padding bytes included, for every size and layout."""
    for numel in numels or sizes(fmt.spec):
        for name, pieces in layouts(numel, fmt.dtype):
            same_message(backend, pieces, fmt.spec, device, f"{fmt} {numel} {name}")


def check_dequantize(
    backend: Any, fmt: Format, device: str = "cpu", numels: Sequence[int] = ()
) -> None:
    """The same values, and nothing written between or beyond the rows."""
    for numel in numels or sizes(fmt.spec):
        for name, pieces in layouts(numel, fmt.dtype):
            messages = messages_of(fmt.spec, total_numel(pieces), 1).to(device)
            same_values(backend, messages[0], fmt.spec, pieces, f"{fmt} {numel} {name}")


REDUCES = ((1.0, False), (1 / 3, False), (1 / 3, True), (1.0, True))


def check_reduce(
    backend: Any, fmt: Format, device: str = "cpu", sources: Sequence[int] = (1, 2, 8)
) -> None:
    """The same sums, by the same roundings, for every number of sources, factor and
    accumulation.
    """
    for (numel, count), reduce in product(
        zip(sizes(fmt.spec)[-len(sources) :], sources, strict=True), REDUCES
    ):
        for name, pieces in layouts(numel, fmt.dtype, calm):
            messages = messages_of(fmt.spec, total_numel(pieces), count).to(device)
            same_sums(backend, messages, fmt.spec, pieces, reduce, f"{fmt} {numel} {count} {name}")


def check_operations(
    backend: Any, fmt: Format, device: str = "cpu", sources: Sequence[int] = (1, 2, 8)
) -> None:
    """Messages, values and sums of one format."""
    check_quantize(backend, fmt, device)
    check_dequantize(backend, fmt, device)
    check_reduce(backend, fmt, device, sources)


def check_requantize(
    backend: Any, spec: Spec, device: str = "cpu", sources: Sequence[int] = (1, 3, 8)
) -> None:
    """The same message of the sum, to the same and to other bits."""
    for to, numel, count in product(others_of(spec), sizes(spec), sources):
        messages = messages_of(spec, numel, count).to(device)
        same_again(
            backend, messages, spec, to, (numel, 1.0 if count == 1 else 1 / 7), f"{numel} {count}"
        )


def others_of(spec: Spec) -> list[Spec]:
    """Formats in which sums of this one can go on."""
    alone = isinstance(spec, Cast) or spec.name == "nf4"
    return [spec] if alone else [BlockSpec(f"int{bits}", spec.block_size) for bits in (8, 4)]


def check_roundings(backend: Any, device: str = "cpu") -> None:
    """Halves and their neighbours at scales of every exponent, blocks about the least that is not
    zero and the largest.

    And sums that need one bit more than the output has, added to the smallest value there is too.
    """
    generator = torch.Generator().manual_seed(8)
    bound = (1 + torch.rand(224, 1, generator=generator)) * 2.0 ** torch.arange(-99, 125)[:, None]
    for spec in (BlockSpec("int8"), BlockSpec("int4")):
        halves = torch.randint(-spec.levels, spec.levels, (224, 256), generator=generator) + 0.5
        x = bound * halves / spec.levels
        x += x * 2.0**-23 * torch.randint(-1, 2, x.shape, generator=generator)
        x[:, 0], x[:, 1] = bound[:, 0], 0.0
        same_message(backend, [whole(x.view(-1))], spec, device, "halves")
    edges = torch.tensor(
        [2.0**-100, 2.0**-100 * (1 - 2.0**-24), 2.0**-99, torch.finfo(torch.float32).max, 2.0**-149]
    )
    for spec in (BlockSpec("int8"), BlockSpec("int4")):
        x = (edges[:, None] * torch.linspace(0, 1, 256).square()).view(-1)
        message = same_message(backend, [whole(x)], spec, device, "edges")
        scales = message[spec.scales_offset(x.numel()) :][:20].view(torch.float32)
        assert (scales > 0).tolist() == [True, False, True, True, False]
    spec = BlockSpec("int8")
    for dtype, digits in ((torch.float32, 24), (torch.bfloat16, 8), (torch.float16, 11)):
        message = torch.arange(spec.nbytes(1024)).to(torch.uint8)
        factors = torch.tensor([1 + 2.0**-digits, 1 + 3 * 2.0**-digits, 2.0**-24, 600.5])
        message[spec.scales_offset(1024) :][:16] = factors.view(torch.uint8)
        smallest = torch.full((1024,), torch.finfo(dtype).smallest_normal / 2, dtype=dtype)
        for add in (False, True):
            for sources in (1, 2):
                messages = message.to(device).expand(sources, -1)
                same_sums(backend, messages, spec, [whole(smallest)], (1.0, add), "ties")


def check_large(backend: Any, numel: int, device: str = "cpu") -> None:
    """More values than 32 bits count: wherever blocks lie, they are those of the same few values
    alone.

    Args:
        backend: to check.
        numel: of the tensor, in BF16: a multiple of 8192.
        device: where; a GPU uses up to five times the tensor.
    """
    spec, few = BlockSpec("int4"), 8192
    part = calm(few, torch.bfloat16)
    same_values(
        backend, same_message(backend, [whole(part)], spec, device).to(device), spec, [whole(part)]
    )
    small, back = (torch.empty(n, dtype=torch.bfloat16, device=device) for n in (few, numel))
    with serving(backend, device):
        ops.dequantize(ops.quantize(part.to(device), spec), spec, small)
        message = ops.quantize(part.to(device).repeat(numel // few), spec)
        ops.dequantize(message, spec, back)
        assert bool((back.view(-1, few) == small).all())
        ops.dequantize_reduce(message.expand(2, -1), spec, back, 0.5)
    assert bool((back.view(-1, few) == small).all())


def check_sparse(backend: Any, device: str = "cpu", dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """Masks, sketches, and selections of these dtypes."""
    check_masks(backend, device)
    check_rows(backend, device)
    check_ternary(backend, device)
    check_sketch(backend, device)
    check_aged_adamw(backend, device)
    for dtype in dtypes:
        check_selection(backend, dtype, device)


def check_aged_adamw(backend: Any, device: str = "cpu") -> None:
    """Weights, moments and ages, where all elements arrive, some or none; with numbers that are
    none among them.

    To the bit, but for weights (torch's square root on CPUs may be an ulp off) and Triton's
    interpreter, which fuses no product and sum.
    """
    fused = os.environ.get("TRITON_INTERPRET") != "1"
    for n, density in product((1, 255, 4097, 70001), (0.0, 0.2, 1.0)):
        generator = torch.Generator().manual_seed(n)
        p, g, mean = (torch.randn(n, generator=generator) for _ in range(3))
        g *= (torch.rand(n, generator=generator) < density) * 10.0 ** torch.randint(
            -30, 15, (n,), generator=generator
        )
        g[n // 3 : n // 3 + 2] *= (
            torch.tensor([torch.inf, torch.nan])[: max(0, n - n // 3)][:2] if n > 1 else 1.0
        )
        age = torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8)
        steps = torch.arange(1, 257, dtype=torch.float64)
        rows = [1 / steps, 1 - 0.9**steps, 0.95**steps, (1 - 0.95**steps) / steps]
        table = torch.stack(
            [torch.cat([torch.tensor([float(k == 2)]), row]) for k, row in enumerate(rows)]
        ).float()
        state, settings = [p, g, mean, mean * mean, age, table], [0.999, 0.7, 1e-8, -0.003]
        own = [x.to(device, copy=True) for x in state]
        for which, given in ((backend, own), (REFERENCE, state)):
            which.aged_adamw(*given, settings)
        for name, actual, expected in zip(
            ("p", "g", "mean", "square", "age"), own, state, strict=False
        ):
            close = 0.0 if fused and name != "p" else 1e-5
            torch.testing.assert_close(
                actual.cpu(), expected, rtol=close, atol=close, equal_nan=True
            )


def check_masks(backend: Any, device: str = "cpu") -> None:
    """Packed masks and back, with unused bits zero."""
    for n in (1, 7, 8, 9, 63, 64, 65, 1000, 4099, 70001):
        mask = torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.3
        expected = torch.full((-(-n // 8),), 0xA5, dtype=torch.uint8)
        REFERENCE.mask_pack(mask, expected)
        bits = torch.full_like(expected, 0x5A).to(device)
        backend.mask_pack(mask.to(device), bits)
        assert_same(bits.cpu(), expected, f"mask_pack {n}")
        back = torch.ones(n, dtype=torch.bool, device=device)
        backend.mask_unpack(bits, back)
        assert_same(back.cpu(), mask, f"mask_unpack {n}")


def check_selection(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Counts and selections above a threshold: equal ones are in, NaN is, a full buffer is not
    overrun.
    """
    for n, threshold in product((1, 15, 64, 65, 4095, 4096, 4097, 30011), (0.0, 0.5, 1.0, 3e38)):
        x = values(n, dtype, 5)
        found = int(REFERENCE.count_above(x, threshold))
        assert int(backend.count_above(x.to(device), threshold)) == found, f"count {n} {threshold}"
        for room in {found, found // 2, found + 3}:
            wanted, selected = (
                (torch.full((room,), -7), torch.full((room,), -7.0, dtype=dtype)) for _ in range(2)
            )
            actual = selected[0].to(device), selected[1].to(device)
            REFERENCE.compact_above(x, threshold, *wanted)
            total = backend.compact_above(x.to(device), threshold, *actual)
            assert int(total) == found
            assert_same(actual[0].cpu(), wanted[0], f"indices {n} {threshold} {room}")
            assert_same(actual[1].cpu(), wanted[1], f"values {n} {threshold} {room}")


def check_rows(backend: Any, device: str = "cpu") -> None:
    """The largest of each row: NaN and infinity before all, of equal magnitudes the first, all of a
    row.

    Also of long rows, of which the CPU's kernel reads a sample of 2048 first: that it misleads,
    both ways. And of short ones of unequal size, for which it begins with the threshold of the row
    before.
    """
    short = ((1, 1, 1), (3, 64, 5), (2, 4096, 205), (5, 4097, 1), (2, 300, 300), (70, 4096, 41))
    for rows, columns, k in (*short, (2, 40_001, 400), (1, 40_000, 5_000), (1, 32_768, 1)):
        x = values(rows * columns, torch.float32, rows).view(rows, columns)
        few, sample = torch.zeros_like(x), torch.arange(2048)
        few[:, :: 2 * columns // k] = x[:, :: 2 * columns // k]
        seen, stride = x.clone(), max(columns // 2048, 1)
        seen[:, (sample * stride + (sample * 2654435761 >> 12) % stride) % columns] *= 100
        uneven = x * 10.0 ** (torch.arange(rows) % 5 - 2)[:, None]
        for case in (
            x,
            uneven,
            x.round(),
            x.sign(),
            torch.zeros_like(x),
            torch.where(x > 1, torch.nan, x),
            few,
            seen,
        ):
            wanted, actual = (torch.full((rows, k), -7, device=at) for at in ("cpu", device))
            REFERENCE.row_largest(case, wanted)
            backend.row_largest(case.to(device), actual)
            assert_same(actual.cpu(), wanted, f"row_largest {rows} {columns} {k}")


def check_ternary(backend: Any, device: str = "cpu") -> None:
    """Packets, counts, positions and values: few elements that are not zero, none, NaN, infinity;
    all dtypes.
    """
    shapes = (
        (3, 2, 4096, 205, 4),
        (1, 5, 4096, 41, 6),
        (2, 1, 4096, 4096, 0),
        (2, 3, 64, 1, 6),
        (1, 1, 1, 1, 0),
    )
    for (rows, blocks, block, k, low), dtype in product(shapes, range(len(FLOATS))):
        form, x = (
            [block, k, low, dtype],
            values(rows * blocks * block, torch.float32, k).view(-1, block),
        )
        size = (
            -(-blocks * (k + (block >> low) + k * (low + 1)) // 8) + blocks * FLOATS[dtype].itemsize
        )
        begins = torch.arange(rows * blocks).view(rows, blocks) * 100_000
        few = x * (torch.arange(block) % 37 == 5)
        for case in (
            x,
            few,
            few.abs() - few,
            torch.zeros_like(x),
            torch.where(x > 1, torch.nan, x),
            x.sign(),
        ):
            indices = torch.empty(len(x), k, dtype=torch.int64)
            REFERENCE.row_largest(case, indices)
            wanted, packets = (
                torch.full((rows, size), 0xA5, dtype=torch.uint8, device=at)
                for at in ("cpu", device)
            )
            count = REFERENCE.ternary_encode(case, indices, form, wanted)
            assert int(
                backend.ternary_encode(case.to(device), indices.to(device), form, packets)
            ) == int(count)
            what = f"ternary {rows} {blocks} {block} {k} {dtype}"
            scales = size - blocks * FLOATS[dtype].itemsize
            assert_same(packets.cpu()[:, :scales], wanted[:, :scales], what)
            one, other = (
                x[:, scales:].reshape(-1).clone().view(FLOATS[dtype])
                for x in (packets.cpu(), wanted)
            )
            assert_same(one, other, what)  # any NaN
            decoded = [
                (
                    torch.full((indices.numel(),), -7, device=at),
                    torch.full((indices.numel(),), 9.0, device=at),
                )
                for at in ("cpu", device)
            ]
            REFERENCE.ternary_decode(wanted, begins, form, *decoded[0])
            backend.ternary_decode(packets, begins.to(device), form, *decoded[1])
            for one, other in zip(*decoded, strict=True):
                assert_same(other.cpu(), one, what)
            sent = torch.zeros(begins.numel() * 100_000).index_add_(0, *decoded[0])
            assert int(sent.count_nonzero()) == int(count), what


def check_sketch(backend: Any, device: str = "cpu") -> None:
    """Sketches are the reference's bits; peeling gives its values, also where some are left
    over.
    """
    for n, rows, density in (
        (1, 3, 1.0),
        (1500, 30, 0.1),
        (40 * 1024 + 5, 20, 0.2),
        (40 * 1024 + 5, 12, 0.5),
    ):
        generator = torch.Generator().manual_seed(n)
        mask = torch.rand(n, generator=generator) < density
        x = torch.randn(n, generator=generator) * mask
        expected = torch.full((2, rows, reference_sparse.SKETCH_WIDTH), 3.0)
        sketch = torch.full_like(expected, 5.0).to(device)
        members = torch.stack([2 * x, x])
        REFERENCE.sketch_insert(members, 11, expected)
        backend.sketch_insert(members.to(device), 11, sketch)
        assert_same(sketch.cpu(), expected, f"sketch {n} {rows}")
        expected, sketch = expected[1], sketch[1]
        bits = torch.empty(-(-n // 8), dtype=torch.uint8)
        REFERENCE.mask_pack(mask, bits)
        wanted, peeled = torch.full((n,), 9.0), torch.full((n,), 8.0, device=device)
        left = REFERENCE.sketch_peel(expected, bits, 11, wanted)
        assert int(backend.sketch_peel(sketch, bits.to(device), 11, peeled)) == int(left)
        assert torch.equal(peeled.cpu(), wanted), f"peel {n} {rows}"
        assert n > 1500 or int(left) == 0
        assert density < 0.5 or n == 1 or int(left) > 0
