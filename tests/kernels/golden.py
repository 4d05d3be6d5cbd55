# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The suite every backend passes: the reference's bits, for every format and for the values that
break kernels.

A backend is an `Operators`; ``backends.py`` has all of them by name.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tests.kernels.operators import REFERENCE, Operators, serving
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

SERVED: list[Spec] = [BlockSpec("int8"), BlockSpec("int4"), NF4]
"""Formats of blocks that a config can name; the GPU kernels have no other."""
FORMATS = [Format(spec, dtype) for spec, dtype in product(SERVED, FLOATS)]
ALL_FORMATS = [Format(spec, dtype) for spec, dtype in product(SPECS, FLOATS)]
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
    return [replace(p, flat=moved(p.flat, device)) for p in pieces]


def moved(x: Tensor, device: torch.device | str) -> Tensor:
    """A copy, as misaligned as the tensor."""
    ahead = x.storage_offset() % 64
    flat = torch.empty(ahead + x.numel(), dtype=x.dtype, device=device)[ahead:]
    return flat.view(x.shape).copy_(x)


def both(
    backend: Operators, name: str, given: Sequence[Any], written: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], int]:
    """What the reference and a backend write into copies of tensors, and the number that both
    return (0 if none).
    """
    expected = [moved(x, "cpu") for x in written]
    actual = [moved(x, backend.device) for x in written]
    there = [moved(x, backend.device) if isinstance(x, Tensor) else x for x in given]
    wanted = getattr(REFERENCE, name)(*given, *expected)
    found = getattr(backend, name)(*there, *actual)
    number = 0 if wanted is None else int(wanted)
    assert number == (0 if found is None else int(found)), f"{name} returns {found}, not {number}"
    return expected, [x.cpu() for x in actual], number


def same(backend: Operators, name: str, *arguments: Any, written: int) -> tuple[int, list[Tensor]]:
    """A backend writes into the last arguments what the reference does, and returns the same
    number; both are returned.
    """
    at = len(arguments) - written
    expected, actual, number = both(backend, name, arguments[:at], arguments[at:])
    for got, wanted in zip(actual, expected, strict=True):
        assert_same(got, wanted, name)
    return number, expected


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


def same_message(backend: Operators, pieces: Sequence[View], spec: Spec, what: Any = "") -> Tensor:
    """The backend's message of the pieces, which is the reference's, padding bytes included; one of
    each member.
    """
    shape = (pieces[0].members, spec.nbytes(total_numel(pieces)))
    expected = torch.full(shape, 0xA5, dtype=torch.uint8)
    actual = torch.full_like(expected, 0x5A).to(backend.device)
    REFERENCE.quantize(pieces, spec, to_members(expected))
    backend.quantize(on(backend.device, pieces), spec, to_members(actual))
    same_bytes(actual, expected, spec, f"quantize {what}")
    return expected.squeeze(0)


def same_values(
    backend: Operators, message: Tensor, spec: Spec, pieces: Sequence[View], what: Any = ""
) -> None:
    """The backend makes of a message, in pieces like these, what the reference does, and writes
    nothing between them.
    """
    message = message.to(backend.device)
    same_sums(
        backend, to_members(message), spec, blank(pieces), (1.0, False), f"{what} dequantized"
    )


def same_sums(
    backend: Operators,
    messages: Messages | Tensor,
    spec: Spec,
    pieces: Sequence[View],
    how: tuple[float, bool],
    what: Any = "",
) -> None:
    """The backend makes of messages, and of what copies of the pieces stored, the reference's sums.

    A tensor of messages is ``[sources, bytes]`` or ``[sources, members, bytes]``.
    """
    if isinstance(messages, Tensor):
        messages = from_sources(messages.to(backend.device))
    expected = [replace(p, flat=p.flat.cpu().clone()) for p in pieces]
    actual = on(messages.table.device, [replace(p, flat=p.flat.clone()) for p in pieces])
    REFERENCE.dequantize_reduce(_on_cpu(messages), spec, expected, *how)
    backend.dequantize_reduce(messages, spec, actual, *how)
    for got, wanted in zip(actual, expected, strict=True):
        assert_same(got.flat.cpu(), wanted.flat, f"reduce {spec} {how} {what}")


def same_again(
    backend: Operators,
    messages: Messages | Tensor,
    spec: Spec,
    to: Spec,
    total: tuple[int, float],
    what: Any = "",
) -> None:
    """The backend's messages of the sums of messages are the reference's."""
    if isinstance(messages, Tensor):
        messages = from_sources(messages.to(backend.device))
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


REDUCES = ((1.0, False), (1 / 3, False), (1 / 3, True), (1.0, True))


def check_operations(backend: Operators, fmt: Format, sources: Sequence[int] = (1, 2, 8)) -> None:
    """Messages, padding bytes included, values and sums of one format, for every size and layout;
    nothing is written between or beyond the rows.
    """
    spec = fmt.spec
    for numel in sizes(spec):
        for name, pieces in layouts(numel, fmt.dtype):
            what = f"{fmt} {numel} {name}"
            same_message(backend, pieces, spec, what)
            same_values(backend, _message(spec, total_numel(pieces), 0), spec, pieces, what)
    for numel, count in zip(sizes(spec)[-len(sources) :], sources, strict=True):
        for name, pieces in layouts(numel, fmt.dtype, calm):
            messages = messages_of(spec, total_numel(pieces), count)
            for reduce in REDUCES:
                same_sums(backend, messages, spec, pieces, reduce, f"{fmt} {numel} {count} {name}")


def check_requantize(backend: Operators, spec: Spec, sources: Sequence[int] = (1, 3, 8)) -> None:
    """The same message of the sum, to the same and to other bits."""
    for to, numel, count in product(others_of(spec), sizes(spec), sources):
        messages = messages_of(spec, numel, count)
        factor = 1.0 if count == 1 else 1 / 7
        same_again(backend, messages, spec, to, (numel, factor), f"{numel} {count}")


def others_of(spec: Spec) -> list[Spec]:
    """Formats in which sums of this one can go on."""
    alone = isinstance(spec, Cast) or spec.name == "nf4"
    return [spec] if alone else [BlockSpec(f"int{bits}", spec.block_size) for bits in (8, 4)]


def check_roundings(backend: Operators) -> None:
    """Halves and their neighbours at scales of every exponent, blocks about the least that is not
    zero and the largest.

    And sums that need one bit more than the output has, added to the smallest value there is too.
    """
    generator = torch.Generator().manual_seed(8)
    bound = (1 + torch.rand(224, 1, generator=generator)) * 2.0 ** torch.arange(-99, 125)[:, None]
    edges = torch.tensor(
        [2.0**-100, 2.0**-100 * (1 - 2.0**-24), 2.0**-99, torch.finfo(torch.float32).max, 2.0**-149]
    )
    for spec in (BlockSpec("int8"), BlockSpec("int4")):
        halves = torch.randint(-spec.levels, spec.levels, (224, 256), generator=generator) + 0.5
        x = bound * halves / spec.levels
        x += x * 2.0**-23 * torch.randint(-1, 2, x.shape, generator=generator)
        x[:, 0], x[:, 1] = bound[:, 0], 0.0
        same_message(backend, [whole(x.view(-1))], spec, "halves")
        x = (edges[:, None] * torch.linspace(0, 1, 256).square()).view(-1)
        message = same_message(backend, [whole(x)], spec, "edges")
        scales = message[spec.scales_offset(x.numel()) :][:20].view(torch.float32)
        assert (scales > 0).tolist() == [True, False, True, True, False]
    spec = BlockSpec("int8")
    for dtype, digits in ((torch.float32, 24), (torch.bfloat16, 8), (torch.float16, 11)):
        message = torch.arange(spec.nbytes(1024)).to(torch.uint8)
        factors = torch.tensor([1 + 2.0**-digits, 1 + 3 * 2.0**-digits, 2.0**-24, 600.5])
        message[spec.scales_offset(1024) :][:16] = factors.view(torch.uint8)
        smallest = torch.full((1024,), torch.finfo(dtype).smallest_normal / 2, dtype=dtype)
        for add, sources in product((False, True), (1, 2)):
            messages = message.expand(sources, -1)
            same_sums(backend, messages, spec, [whole(smallest)], (1.0, add), "ties")


def check_large(backend: Operators, numel: int) -> None:
    """More values than 32 bits count: wherever blocks lie, they are those of the same few values
    alone.

    Args:
        backend: to check.
        numel: of the tensor, in BF16: a multiple of 8192; a GPU uses up to five times the tensor.
    """
    spec, few = BlockSpec("int4"), 8192
    part = calm(few, torch.bfloat16)
    same_values(backend, same_message(backend, [whole(part)], spec), spec, [whole(part)])
    part = part.to(backend.device)
    small, back = part.new_empty(few), part.new_empty(numel)
    with serving(backend):
        ops.dequantize(ops.quantize(part, spec), spec, small)
        message = ops.quantize(part.repeat(numel // few), spec)
        ops.dequantize(message, spec, back)
        assert bool((back.view(-1, few) == small).all())
        ops.dequantize_reduce(message.expand(2, -1), spec, back, 0.5)
    assert bool((back.view(-1, few) == small).all())


def check_sparse(backend: Operators) -> None:
    """Masks, sketches, selections and the optimizer of sparse sums."""
    check_masks(backend)
    check_rows(backend)
    check_ternary(backend)
    check_sketch(backend)
    check_aged_adamw(backend)
    for dtype in FLOATS:
        check_selection(backend, dtype)


def check_aged_adamw(backend: Operators) -> None:
    """Weights, moments and ages, where all elements arrive, some or none; with numbers that are
    none among them.

    To the bit, but for weights: torch's square root on CPUs may be an ulp off.
    """
    for n, density in product((1, 255, 4097, 70001), (0.0, 0.2, 1.0)):
        generator = torch.Generator().manual_seed(n)
        p, g, mean = (torch.randn(n, generator=generator) for _ in range(3))
        g *= torch.rand(n, generator=generator) < density
        g *= 10.0 ** torch.randint(-30, 15, (n,), generator=generator)
        if n > 1:
            g[n // 3 : n // 3 + 2] *= torch.tensor([torch.inf, torch.nan])
        age = torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8)
        steps = torch.arange(1, 257, dtype=torch.float64)
        rows = [1 / steps, 1 - 0.9**steps, 0.95**steps, (1 - 0.95**steps) / steps]
        firsts = [torch.tensor([float(k == 2)]) for k in range(4)]
        table = torch.stack([torch.cat(pair) for pair in zip(firsts, rows, strict=True)]).float()
        state = [p, g, mean, mean * mean, age, table]
        own = [x.to(backend.device, copy=True) for x in state]
        for which, given in ((backend, own), (REFERENCE, state)):
            which.aged_adamw(*given, [0.999, 0.7, 1e-8, -0.003])
        torch.testing.assert_close(own[0].cpu(), p, rtol=1e-5, atol=1e-5, equal_nan=True)
        for actual, expected in zip(own[1:5], state[1:5], strict=True):
            assert_same(actual.cpu(), expected, f"aged_adamw {n} {density}")


def check_masks(backend: Operators) -> None:
    """Packed masks and back, with unused bits zero, from and to any address."""
    for n, offset in product((1, 7, 8, 9, 63, 64, 65, 1000, 4099, 70001), (0, 1, 7, 8)):
        mask = torch.rand(n + offset, generator=torch.Generator().manual_seed(n))[offset:] < 0.3
        room = torch.full((-(-n // 8) + offset,), 0xA5, dtype=torch.uint8)[offset:]
        _, (bits,) = same(backend, "mask_pack", mask, room, written=1)
        _, (back,) = same(backend, "mask_unpack", bits, torch.ones_like(mask), written=1)
        assert torch.equal(back, mask)


def check_selection(backend: Operators, dtype: torch.dtype) -> None:
    """Counts and selections above a threshold: equal ones are in, NaN is, a full buffer is not
    overrun.
    """
    for n, threshold in product((1, 15, 64, 65, 4095, 4096, 4097, 30011), (0.0, 0.5, 1.0, 3e38)):
        x = values(n, dtype, 5)
        found, _ = same(backend, "count_above", x, threshold, written=0)
        for room in {found, found // 2, found + 3}:
            wanted = torch.full((room,), -7), torch.full((room,), -7.0, dtype=dtype)
            same(backend, "compact_above", x, threshold, *wanted, written=2)


def check_rows(backend: Operators) -> None:
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
        for case in (x, uneven, few, seen, *unusual(x)):
            same(backend, "row_largest", case, torch.full((rows, k), -7), written=1)


def unusual(x: Tensor) -> list[Tensor]:
    """Values of which many are equal, zero or no numbers."""
    return [x.round(), x.sign(), torch.zeros_like(x), torch.where(x > 1, torch.nan, x)]


def check_ternary(backend: Operators) -> None:
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
        form = [block, k, low, dtype]
        x = values(rows * blocks * block, torch.float32, k).view(-1, block)
        scales = -(-blocks * (k + (block >> low) + k * (low + 1)) // 8)
        size = scales + blocks * FLOATS[dtype].itemsize
        begins = torch.arange(rows * blocks).view(rows, blocks) * 100_000
        few = x * (torch.arange(block) % 37 == 5)
        for case in (x, few, few.abs() - few, *unusual(x)[1:]):
            indices = torch.empty(len(x), k, dtype=torch.int64)
            REFERENCE.row_largest(case, indices)
            room = torch.full((rows, size), 0xA5, dtype=torch.uint8)
            (wanted,), (packets,), count = both(
                backend, "ternary_encode", (case, indices, form), (room,)
            )
            assert_same(packets[:, :scales], wanted[:, :scales], f"ternary {form}")
            kind = FLOATS[dtype]
            got, right = (p[:, scales:].reshape(-1).clone().view(kind) for p in (packets, wanted))
            assert_same(got, right, f"scales {form}")  # any NaN
            places = torch.full((indices.numel(),), -7)
            out = places, torch.full(places.shape, 9.0)
            _, decoded = same(backend, "ternary_decode", wanted, begins, form, *out, written=2)
            sent = torch.zeros(begins.numel() * 100_000).index_add_(0, *decoded)
            assert int(sent.count_nonzero()) == count


def check_sketch(backend: Operators) -> None:
    """Sketches are the reference's bits; peeling gives its values, also where some are left
    over.
    """
    large = 40 * 1024 + 5
    for n, rows, density in ((1, 3, 1.0), (1500, 30, 0.1), (large, 20, 0.2), (large, 12, 0.5)):
        generator = torch.Generator().manual_seed(n)
        mask = torch.rand(n, generator=generator) < density
        x = torch.randn(n, generator=generator) * mask
        room = torch.full((2, rows, reference_sparse.SKETCH_WIDTH), 3.0)
        _, (made,) = same(backend, "sketch_insert", torch.stack([2 * x, x]), 11, room, written=1)
        bits = torch.empty(-(-n // 8), dtype=torch.uint8)
        REFERENCE.mask_pack(mask, bits)
        left, _ = same(backend, "sketch_peel", made[1], bits, 11, torch.full((n,), 9.0), written=1)
        assert left > 0 if density == 0.5 else n == large or left == 0
