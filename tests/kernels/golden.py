# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What every backend passes: the bits of the reference, of each operator, on arguments that a seed
makes.

A backend is an `Operators`; ``backends.py`` has all of them by name.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product, starmap
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map_only

from tests.kernels.backends import run_of
from tests.kernels.operators import REFERENCE, Operators, serving
from zero_topo.quant import ops
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
from zero_topo.quant.reference_sparse import SKETCH_WIDTH
from zero_topo.quant.spec import BLOCK_SIZES, NF4, BlockSpec, Cast, Format

SERVED: list[Format] = [BlockSpec("int8"), BlockSpec("int4"), NF4]
"""Formats of blocks that a config can name; the GPU kernels have no other."""
BLOCKS: list[Format] = [*starmap(BlockSpec, product(("int8", "int4"), BLOCK_SIZES)), NF4]
CASTS: list[Format] = [Cast(name) for name in DTYPES]
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python's mmap does not name."""

register_pytree_node(View, lambda x: ([x.flat], x), lambda new, x: replace(x, flat=next(iter(new))))
register_pytree_node(
    Messages, lambda x: ([x.table], x), lambda new, x: replace(x, table=next(iter(new)))
)


def copied(x: Tensor, device: torch.device | str) -> Tensor:
    """A copy on a device: as misaligned as the tensor, with its strides and what lies between."""
    run = run_of(x)
    ahead = x.storage_offset() % 64
    room = torch.empty(ahead + run.numel(), dtype=x.dtype, device=device)[ahead:]
    return room.copy_(run).as_strided(x.shape, x.stride())


def both(backend: Operators, name: str, *arguments: Any) -> tuple[list[Any], list[Any], int]:
    """Arguments after the reference's call and after the backend's, each of copies, and the number
    that both return (0 if none).
    """
    made = []
    for kernels in (REFERENCE, backend):
        copy = partial(copied, device=kernels.device)
        inside: list[Any] = tree_map_only(Tensor, copy, list(arguments))
        number = getattr(kernels, name)(*inside)
        made.append((inside, 0 if number is None else int(number)))
    (wanted, expected), (found, number) = made
    assert number == expected, f"{name} returns {number}, not {expected}"
    return wanted, found, expected


def same(backend: Operators, name: str, *arguments: Any) -> list[Any]:
    """The arguments after the reference's call, as which the backend leaves them; messages of casts
    are compared as floats.
    """
    wanted, found, _ = both(backend, name, *arguments)
    casts = [DTYPES[x.dtype] for x in arguments if isinstance(x, Cast)]
    assert_equal(found, wanted, name, *casts[:1])
    return wanted


def assert_equal(found: Any, wanted: Any, what: str, of_bytes: torch.dtype = torch.uint8) -> None:
    """All tensors are the same; those of bytes hold this type."""
    for number, (actual, expected) in enumerate(
        zip(tree_leaves(found), tree_leaves(wanted), strict=True)
    ):
        if isinstance(expected, Tensor):
            got, right = (run_of(x).cpu() for x in (actual, expected))
            if expected.dtype == torch.uint8:
                got, right = (run.clone().view(of_bytes) for run in (got, right))
            assert_same(got, right, f"{what}, tensor {number}")


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal bit for bit, but that one NaN is as good as another."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    if actual.dtype in BITS:
        nan = expected.isnan()
        assert torch.equal(actual.isnan(), nan), f"{what}: other NaNs"
        kind = BITS[actual.dtype]
        actual = actual.view(kind).masked_fill(nan, 0)
        expected = expected.view(kind).masked_fill(nan, 0)
    wrong = (actual != expected).nonzero()
    assert not len(wrong), f"{what}: {len(wrong)} differ, first at {wrong[0].tolist()}"


# -- what is given to kernels ----------------------------------------------------------------------


def values(numel: int, dtype: torch.dtype) -> Tensor:
    """Values of all sizes, with special ones, and runs of 64 that are special, strewn into many or
    a few.
    """
    top = torch.finfo(dtype).max
    specials = [torch.nan, torch.inf, -torch.inf, top, -top, -0.0, 1e-42, 2.0**-100, 2.0**-101, 0.5]
    runs = -(-numel // 64)
    x = torch.randn(runs, 64) * 10.0 ** torch.randint(-6, 5, (runs, 64))
    kind = torch.randint(0, 20 if torch.rand(()) < 0.5 else 1000, (runs,))
    x[kind == 10] = 0.0
    x[kind == 11] *= 1e-38
    x[kind == 12] = (torch.arange(64) - 32) / 2  # ties
    x = x.to(dtype)
    place = torch.randint(0, 64, (runs,))
    for number, special in enumerate(specials):
        chosen = kind == number
        x[chosen, place[chosen]] = special
    return x.view(-1)[:numel]


def calm(numel: int, dtype: torch.dtype) -> Tensor:
    """Ordinary values only."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(7 * numel)).to(dtype)


def untouched(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags=flags), dtype=dtype)


def views(chance: Random, members: int) -> list[View]:
    """A few pieces of any shape, dtype, alignment, filling and missing end; most of them
    aligned.
    """
    made = [View(values(members, torch.float32), 1, 1, 1, members, 1)]
    dtypes = chance.choice([FLOATS, *zip(FLOATS)])
    offsets = chance.choice([range(1), range(9)])
    for _ in range(chance.randint(1, 4)):
        rows = chance.randrange(6)
        width = chance.choice([chance.randrange(150), 256, 700, 1029, 2051, 2560, 5120])
        alongside = chance.random() < 0.5
        stride = (members * width if alongside else width) + chance.choice([0, 1, 8, 100])
        step = width if alongside else rows * stride + chance.choice(offsets)
        extent = max(0, (members - 1) * step + (rows - 1) * stride + width)
        offset = chance.choice(offsets)
        numel = offset + chance.choice([extent, extent, 2 * extent, extent // 2])
        flat = values(numel, chance.choice(dtypes))[offset:]
        columns = width + chance.choice([0, 0, 1, 64])
        made.append(View(flat, rows, columns, stride, members, step, width))
    return made[chance.choice([0, 1]) if total_numel(made) > 1 else 0 :]


def room(chance: Random, spec: Format, shape: Sequence[int], numel: int) -> Tensor:
    """A table of messages ``[sources, outer, inner, bytes]``, in memory in any order, apart or not;
    each begins where one of its format may.
    """
    unit = spec.bits // 8 if isinstance(spec, Cast) else 16
    nbytes = spec.nbytes(numel)
    size = nbytes + -nbytes % unit + unit * chance.choice([0, 3])
    order = chance.sample(range(3), 3)
    memory = torch.full((unit + math.prod(shape) * size,), 0xEE, dtype=torch.uint8)
    table = memory[unit:].view(*(shape[i] for i in order), size)[..., :nbytes]
    return table.permute(*(order.index(i) for i in range(3)), 3)


def messages_of(spec: Format, numel: int, sources: int) -> Tensor:
    """Messages of ordinary values, ``[sources, bytes]``, by the reference."""
    table = torch.empty(sources, spec.nbytes(numel), dtype=torch.uint8)
    for message in table:
        REFERENCE.quantize([view_of(torch.randn(numel))], spec, to_members(message))
    return table


def size(chance: Random) -> int:
    """A number of elements: few, around a chunk, and many."""
    return chance.choice([chance.randint(1, 300), chance.randint(4090, 4100), 20_011])


# -- operators -------------------------------------------------------------------------------------


def check_operations(backend: Operators, spec: Format, seed: int) -> None:
    """Messages of all members but one, padding included; sums of messages, and sums that become
    messages; nothing is written beside them.
    """
    torch.manual_seed(seed)
    chance = Random(seed)
    shape = chance.randint(1, 3), chance.randint(1, 3)
    members = math.prod(shape)
    without = chance.randrange(-1, members)
    pieces = views(chance, members)
    numel = total_numel(pieces)
    out = room(chance, spec, (1, *shape), numel)
    *_, made = same(backend, "quantize", pieces, spec, Messages(out, -1, without))
    sources = chance.choice([1, 1, 2, 3, 4, 7, 8, 9, 17])
    came = room(chance, spec, (sources, *shape), numel)
    came.copy_(messages_of(spec, numel, 4)[torch.randint(0, 4, came.shape[:3])])
    if chance.random() < 0.5:
        came[-1:] = made.table
    elif chance.random() < 0.2:
        came.random_()
    hole = chance.randrange(-1, sources) if sources > 1 else -1
    factor = chance.choice([1.0, 1 / 3])
    how = spec, pieces, factor, chance.random() < 0.5
    same(backend, "dequantize_reduce", Messages(came, hole, without), *how)
    to = chance.choice(others_of(spec))
    out = room(chance, to, (1, *shape), numel)
    again = spec, to, Messages(out, -1, without), numel, factor
    same(backend, "requantize", Messages(came, hole), *again)


def others_of(spec: Format) -> list[Format]:
    """Formats in which sums of this one can go on."""
    alone = isinstance(spec, Cast) or spec.name == "nf4"
    return [spec] if alone else [BlockSpec(f"int{bits}", spec.block_size) for bits in (8, 4)]


def quantized(backend: Operators, pieces: Sequence[View], spec: Format) -> Tensor:
    """The messages of the pieces, ``[members, bytes]``, which are the reference's."""
    shape = pieces[0].members, spec.nbytes(total_numel(pieces))
    out = to_members(torch.full(shape, 0xA5, dtype=torch.uint8))
    table: Tensor = same(backend, "quantize", pieces, spec, out)[-1].table
    return table[0, 0]


def check_many(backend: Operators, sources: int, hole: int) -> None:
    """Any number of messages, of which one may be left out: the same sums and messages."""
    numel = 300
    for spec in (BlockSpec("int4"), Cast("bf16")):
        few = messages_of(spec, numel, 5)
        messages = from_sources(few[torch.arange(sources) ** 2 % 5], hole)
        stored = [view_of(torch.full((numel,), 2.5))]
        same(backend, "dequantize_reduce", messages, spec, stored, 1 / 3, True)
        out = to_members(torch.empty_like(few[0]))
        same(backend, "requantize", messages, spec, spec, out, numel, 1 / 3)


def check_many_pieces(backend: Operators, count: int, members: int) -> None:
    """Any number of pieces in a message, some of them empty; any number of members."""
    flat = calm(20 * count, torch.float32)
    pieces = [View(flat[20 * i : 20 * i + 19], 2, 1 + i % 4, 5, 2, 10) for i in range(count)]
    pieces[5:5] = [View(torch.empty(0), 0, 3, 3, 2, 0)] * 9
    wide = calm(2 * 70 * members - 9, torch.bfloat16)
    filled = View(wide, 2, 256, 70 * members, members, 70, present=70)
    for many in (pieces, [filled, View(wide, 1, 5, 5, members, 5)]):
        for spec in (BlockSpec("int8"), Cast("bf16")):
            messages = to_members(quantized(backend, many, spec))
            same(backend, "dequantize_reduce", messages, spec, many)


def check_roundings(backend: Operators) -> None:
    """Halves and their neighbours at scales of every exponent, blocks about the least that is not
    zero and the largest.

    And sums that need one bit more than the output has, added to the smallest value there is too.
    """
    torch.manual_seed(8)
    bound = (1 + torch.rand(224, 1)) * 2.0 ** torch.arange(-99, 125)[:, None]
    least, largest = 2.0**-100, torch.finfo(torch.float32).max
    edges = torch.tensor([least, least * (1 - 2.0**-24), 2 * least, largest, 2.0**-149])
    for spec in (BlockSpec("int8"), BlockSpec("int4")):
        halves = torch.randint(-spec.levels, spec.levels, (224, 256)) + 0.5
        x = bound * halves / spec.levels
        x += x * 2.0**-23 * torch.randint(-1, 2, x.shape)
        x[:, 0] = bound[:, 0]
        x[:, 1] = 0.0
        quantized(backend, [view_of(x.view(-1))], spec)
        x = (edges[:, None] * torch.linspace(0, 1, 256).square()).view(-1)
        message = quantized(backend, [view_of(x)], spec)[0]
        scales = message[spec.scales_offset(x.numel()) :][:20].view(torch.float32)
        assert (scales > 0).tolist() == [True, False, True, True, False]
    spec = BlockSpec("int8")
    for dtype, digits in ((torch.float32, 24), (torch.bfloat16, 8), (torch.float16, 11)):
        message = torch.arange(spec.nbytes(1024)).to(torch.uint8)
        factors = torch.tensor([1 + 2.0**-digits, 1 + 3 * 2.0**-digits, 2.0**-24, 600.5])
        message[spec.scales_offset(1024) :][:16] = factors.view(torch.uint8)
        smallest = torch.full((1024,), torch.finfo(dtype).smallest_normal / 2, dtype=dtype)
        for add, sources in product((False, True), (1, 2)):
            messages = from_sources(message.expand(sources, -1))
            same(backend, "dequantize_reduce", messages, spec, [view_of(smallest)], 1.0, add)


def check_large(backend: Operators, numel: int) -> None:
    """More values than 32 bits count: wherever blocks lie, they are those of the same few values
    alone.

    Args:
        backend: to check.
        numel: of the tensor, in BF16: a multiple of 8192; a GPU uses up to five times the tensor.
    """
    spec, few = BlockSpec("int4"), 8192
    part = calm(few, torch.bfloat16)
    message = quantized(backend, [view_of(part)], spec)
    small = same(backend, "dequantize_reduce", to_members(message), spec, [view_of(part)])[2][0]
    small = small.flat.to(backend.device)
    part = part.to(backend.device)
    back = part.new_empty(numel)
    with serving(backend):
        message = ops.quantize(part.repeat(numel // few), spec)
        ops.dequantize(message, spec, back)
        assert bool((back.view(-1, few) == small).all())
        ops.dequantize_reduce(message.expand(2, -1), spec, back, 0.5)
    assert bool((back.view(-1, few) == small).all())


FAR = 2**32 + 5000
FAR_CASES = [
    (BlockSpec("int8"), 100, None),
    (BlockSpec("int4"), 499, None),
    (Cast("fp16"), 128, 77),
]


def check_far(backend: Operators, spec: Format, columns: int, present: int | None) -> None:
    """Rows and members over 2^31 values apart, and messages over 2^31 bytes: read and written where
    they lie.

    Strides are of 32 bits, but not when they are taken twice. Memory is there only where it is
    touched.
    """
    far = View(untouched(FAR, torch.bfloat16), 2, columns, 2**31 + 8, 9, 2**28 + 512, present)
    flat = torch.zeros(18 * columns, dtype=torch.bfloat16)
    near = View(flat, 2, columns, columns, 9, 2 * columns, present)
    for piece in (far, near):
        piece.write(calm(18 * columns, torch.float32).view(9, -1))
    nbytes, strides = spec.nbytes(far.numel), (2**30, 2**30 + 2**12, 2**30 + 2**16, 1)
    table = untouched(3 * 2**31 + 2**18, torch.uint8).as_strided((3, 3, 3, nbytes), strides)
    few = torch.zeros(3, 3, 3, nbytes, dtype=torch.uint8)
    REFERENCE.quantize([near], spec, Messages(few[:1]))
    backend.quantize([far], spec, Messages(table[:1]))
    assert torch.equal(table[:1], few[:1])
    few[1:], table[1:] = few[0], few[0]
    REFERENCE.dequantize_reduce(Messages(few), spec, [near], 0.5)
    backend.dequantize_reduce(Messages(table), spec, [far], 0.5)
    assert_same(far.read(), near.read(), f"{spec} {columns} far apart")


# -- sparse modes ----------------------------------------------------------------------------------


def check_aged_adamw(backend: Operators, chance: Random) -> None:
    """Weights, moments and ages, where all elements arrive, some or none; with numbers that are
    none among them.

    To the bit, but for weights: torch's square root on CPUs may be an ulp off.
    """
    n = size(chance)
    p, g, mean = torch.randn(3, n)
    g *= torch.rand(n) < chance.choice([0.0, 0.2, 1.0])
    g *= 10.0 ** torch.randint(-30, 15, (n,))
    g[n // 3 : n // 3 + 2] *= torch.tensor([torch.inf, torch.nan])[: n - n // 3]
    age = torch.randint(0, 256, (n,), dtype=torch.uint8)
    steps = torch.arange(257, dtype=torch.float64)
    table = torch.stack([0.95**steps, (1 - 0.95**steps) / steps])
    table[:, 0] = torch.tensor([1.0, 0.0])
    state = p, g, mean, mean * mean, age, table.float()
    settings = [0.999, 0.7, 1e-8, -0.003, -0.02, 0.1]
    wanted, found, _ = both(backend, "aged_adamw", *state, settings)
    weights = found[0].cpu()
    torch.testing.assert_close(weights, wanted[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert_equal(found[1:], wanted[1:], "aged_adamw")


def check_masks(backend: Operators, chance: Random) -> None:
    """Packed masks and back, with unused bits zero, from and to any address."""
    n, offset = size(chance), chance.randrange(9)
    mask = (torch.rand(n + offset) < chance.random())[offset:]
    bits = torch.full((-(-n // 8) + offset,), 0xA5, dtype=torch.uint8)[offset:]
    _, bits = same(backend, "mask_pack", mask, bits)
    _, back = same(backend, "mask_unpack", bits, ~mask)
    assert torch.equal(back, mask)


def check_selection(backend: Operators, chance: Random) -> None:
    """Counts and selections above a threshold: equal ones are in, NaN is, a full buffer is not
    overrun.
    """
    dtype = chance.choice(FLOATS)
    half = torch.float16 if dtype == torch.float16 else torch.bfloat16
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(half)
    numbers = every[~every.isnan()].to(dtype)
    x = chance.choice([values(size(chance), dtype), numbers])
    # Also between two numbers of 16 bits, and among the subnormal ones of FP16
    threshold = chance.choice([0.0, 0.5, 1.0, 3e38, 0.7, 3e-5, 4e-8, 65505.0])
    *_, found = both(backend, "count_above", x, threshold)
    for count in (found, found // 2, found + 3):
        out = torch.full((count,), -7), torch.full((count,), -7.0, dtype=x.dtype)
        same(backend, "compact_above", x, threshold, *out)


def unusual(x: Tensor) -> list[Tensor]:
    """Values of which many are equal, zero or no numbers."""
    return [x, x.round(), x.sign(), x * 0.0, torch.where(x > 1, torch.nan, x)]


def check_rows(backend: Operators, chance: Random) -> None:
    """The largest of each row: NaN and infinity before all, of equal magnitudes the first, all of a
    row.

    Also of long rows, of which the CPU's kernel reads a sample of 2048 first: that it misleads,
    both ways. And of short ones of unequal size, for which it begins with the threshold of the row
    before.
    """
    shapes = [(2, 40_001), (1, 32_768), (chance.randint(1, 70), chance.choice([1, 64, 300, 4097]))]
    rows, columns = chance.choice(shapes)
    k = chance.choice([1, columns // 100 + 1, columns // 8 + 1, columns])
    x = values(rows * columns, torch.float32).view(rows, columns)
    few, sample = torch.zeros_like(x), torch.arange(2048)
    apart = max(1, 2 * columns // k)
    few[:, ::apart] = x[:, ::apart]
    seen, stride = x.clone(), max(columns // 2048, 1)
    seen[:, (sample * stride + (sample * 2654435761 >> 12) % stride) % columns] *= 100
    uneven = x * 10.0 ** (torch.arange(rows) % 5 - 2)[:, None]
    for case in (uneven, few, seen, *unusual(x)):
        same(backend, "row_largest", case, torch.full((rows, k), -7))


def check_ternary(backend: Operators, chance: Random) -> None:
    """Packets, counts, positions and values: few elements that are not zero, none, NaN, infinity;
    all dtypes.
    """
    shapes = [(4096, 205, 4), (4096, 41, 6), (4096, 4096, 0), (64, 1, 6), (1, 1, 0)]
    block, k, low = chance.choice(shapes)
    dtype = chance.randrange(len(FLOATS))
    form = [block, k, low, dtype]
    rows, blocks = chance.randint(1, 3), chance.randint(1, 5)
    x = values(rows * blocks * block, torch.float32).view(-1, block)
    few = x * (torch.arange(block) % 37 == 5)
    case = chance.choice([few, few.abs() - few, *unusual(x)])
    scales = -(-blocks * (k + (block >> low) + k * (low + 1)) // 8)
    nbytes = scales + blocks * FLOATS[dtype].itemsize
    packets = torch.full((rows, nbytes), 0xA5, dtype=torch.uint8)
    _, indices = same(backend, "row_largest", case, torch.empty(len(x), k, dtype=torch.int64))
    wanted, found, _ = both(backend, "ternary_encode", case, indices, form, packets)
    packets, made = wanted[-1], found[-1].cpu()
    assert_same(made[:, :scales], packets[:, :scales], f"ternary {form}")
    parts = (packet[:, scales:].reshape(-1).clone() for packet in (made, packets))
    got, right = (part.view(FLOATS[dtype]) for part in parts)
    assert_same(got, right, f"scales {form}")  # any NaN
    begins = torch.arange(rows * blocks).view(rows, blocks) * 100_000
    out = torch.full((indices.numel(),), -7), torch.full((indices.numel(),), 9.0)
    same(backend, "ternary_decode", packets, begins, form, *out)


def check_sketch(backend: Operators, chance: Random) -> None:
    """Sketches are the reference's bits; peeling gives its values, also where some are left
    over.
    """
    cases = [(1, 3, 1.0), (1500, 30, 0.1), (20_485, 10, 0.2), (20_485, 6, 0.5)]
    n, rows, density = chance.choice(cases)
    mask = torch.rand(n) < density
    x = torch.randn(n) * mask
    out = torch.full((2, rows, SKETCH_WIDTH), 3.0)
    seed = chance.getrandbits(30)
    *_, made = same(backend, "sketch_insert", torch.stack([2 * x, x]), seed, out)
    bits = torch.empty(-(-n // 8), dtype=torch.uint8)
    REFERENCE.mask_pack(mask, bits)
    wanted, found, _ = both(backend, "sketch_peel", made[1], bits, seed, torch.full((n,), 9.0))
    assert_equal(found[-1], wanted[-1], "sketch_peel")


SPARSE: list[Callable[[Operators, Random], None]] = [
    check_aged_adamw,
    check_masks,
    check_selection,
    check_rows,
    check_ternary,
    check_sketch,
]
