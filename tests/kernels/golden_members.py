# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The part of the golden suite that asks for many members, sources and pieces in one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tests.kernels.golden import (
    REDUCES,
    Format,
    Spec,
    assert_same,
    blank,
    block_of,
    calm,
    messages_of,
    on,
    others_of,
    same_again,
    same_bytes,
    same_message,
    same_sums,
    same_values,
    untouched,
    values,
    whole,
)
from tests.kernels.operators import REFERENCE, Operators
from zero_topo.quant.operands import Messages, View, at_blocks, from_sources, total_numel
from zero_topo.quant.spec import BlockSpec, Cast


def member_layouts(
    members: int, fmt: Format, make: Callable[..., Tensor] = values
) -> Iterator[tuple[str, list[View]]]:
    """Ways in which the parts of several members lie in memory."""
    block, dtype = block_of(fmt.spec), fmt.dtype
    width, columns = 2 * block // 3 + 5, block
    far = 3 * (width + 5) + 7
    yield (
        "side by side",
        [View(make(members * (block + 3), dtype), 1, block + 3, block + 3, members, block + 3)],
    )
    interleaved = View(make(4 * members * width, dtype), 4, width, members * width, members, width)
    yield "interleaved", [interleaved]
    yield "far", [View(make(members * far, dtype), 3, width, width + 5, members, far)]
    limit = members // 2 * far + width + 9
    yield "ending in a member", [View(make(limit, dtype), 3, width, width + 5, members, far)]
    flat = make(3 * members * width - width - 3, dtype)
    filled = View(flat, 3, columns, members * width, members, width, present=width)
    yield "filled up", [filled]
    flat = make(3 * members * width - 1, dtype)
    yield (
        "filled up, rows adjacent",
        [View(flat, 3, columns, width, members, 3 * width, present=width)],
    )
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    absent = View(make(9, dtype), 2, 40, 0, members, 1, present=0)
    row = View(make(members * 33, other), 1, 33, 33, members, 33)
    yield "several", [row, interleaved, absent, replace(filled, flat=make(flat.numel(), other))]
    yield "each at a block", at_blocks([row, interleaved], block)


ORDERS = ((0, 1, 2), (1, 2, 0), (0, 2, 1))
"""Of sources, outer and inner members in memory."""


def arranged(
    messages: Tensor, spec: Spec, order: Sequence[int], device: str
) -> tuple[Tensor, Tensor]:
    """Messages ``[sources, outer, inner, bytes]`` with gaps between them, in this order: a table,
    and its memory.

    They begin where a format's messages may: at multiples of 16 bytes, or of the size of a value if
    it is a cast.
    """
    unit = spec.bits // 8 if isinstance(spec, Cast) else 16
    *shape, nbytes = messages.shape
    size = nbytes + 3 * unit
    memory = torch.full((unit + math.prod(shape) * size,), 0xEE, dtype=torch.uint8, device=device)
    table = memory[unit:].view(*(shape[i] for i in order), size)[..., :nbytes]
    table = table.permute(*(list(order).index(i) for i in range(3)), 3)
    table.copy_(messages)
    return table, memory


def check_members(backend: Operators, fmt: Format, members: tuple[int, int] = (2, 3)) -> None:
    """One call for all members: each gets and gives what is its own, wherever it lies, and one is
    left alone.
    """
    count, device = math.prod(members), backend.device
    for index, (name, pieces) in enumerate(member_layouts(count, fmt)):
        order, without, what = ORDERS[index % 3], (-1, 0, count - 1, 2)[index % 4], f"{fmt} {name}"
        messages = _quantized(backend, pieces, fmt.spec, members, (order, without))
        same_values(backend, messages.flatten(0, 1), fmt.spec, pieces, what)
        table = arranged(messages[None], fmt.spec, order, device)[0]
        same_sums(
            backend, Messages(table, -1, without), fmt.spec, blank(pieces), (1.0, False), what
        )
    for index, (name, pieces) in enumerate(member_layouts(count, fmt, calm)):
        numel, what = total_numel(pieces), f"{fmt} {name}"
        messages = messages_of(fmt.spec, numel, 3 * count).view(3, *members, -1)
        for order, without in zip(ORDERS, (-1, 0, 2), strict=True):
            few = Messages(
                arranged(messages, fmt.spec, order, device)[0],
                without,
                (-1, 1, count - 1)[index % 3],
            )
            same_sums(backend, few, fmt.spec, pieces, REDUCES[index % 4], f"{what} {order}")
        if index < 2:
            few = Messages(arranged(messages, fmt.spec, ORDERS[index], device)[0])
            same_again(backend, few, fmt.spec, others_of(fmt.spec)[-1], (numel, 1 / 3), what)


def _quantized(
    backend: Operators,
    pieces: Sequence[View],
    spec: Spec,
    members: tuple[int, int],
    how: tuple[Sequence[int], int],
) -> Tensor:
    """Messages ``[outer, inner, bytes]``: the backend's are the reference's, with nothing written
    between them.
    """
    (order, without), nbytes = how, spec.nbytes(total_numel(pieces))
    filling = torch.full((1, *members, nbytes), 0x33, dtype=torch.uint8)
    (expected, around), (actual, changed) = (
        arranged(filling, spec, order, place) for place in ("cpu", backend.device)
    )
    REFERENCE.quantize(pieces, spec, Messages(expected, -1, without))
    backend.quantize(on(backend.device, pieces), spec, Messages(actual, -1, without))
    same_bytes(actual, expected, spec, f"quantize members, {order} without {without}")
    made = expected[0].clone()
    expected.zero_(), actual.zero_()
    assert torch.equal(changed.cpu(), around), "written between messages"
    return made


def check_many(backend: Operators, sources: int, hole: int = -1) -> None:
    """Any number of messages, side by side, but that one may be left out: the same sums and
    messages.
    """
    numel = 300
    for spec in (BlockSpec("int4"), Cast("bf16")):
        few = messages_of(spec, numel, 6)[1:]  # whose sums are no NaN
        table = torch.stack([few[i * i % 5] for i in range(sources)])
        messages = from_sources(table.to(backend.device), hole)
        what = f"{sources} messages without {hole}"
        same_sums(backend, messages, spec, [whole(torch.full((numel,), 2.5))], (1 / 3, True), what)
        same_again(backend, messages, spec, spec, (numel, 1 / 3), what)


def check_many_pieces(backend: Operators, count: int) -> None:
    """Any number of pieces in a message, of two members; some are empty."""
    flat = calm(20 * count, torch.float32)
    pieces = [View(flat[20 * i : 20 * i + 19], 2, 1 + i % 4, 5, 2, 10) for i in range(count)]
    pieces[5:5] = [View(torch.empty(0), 0, 3, 3, 2, 0)] * 9
    for spec in (BlockSpec("int8"), Cast("bf16")):
        messages = same_message(backend, pieces, spec, f"{count} pieces")
        same_values(backend, messages, spec, pieces, f"{count} pieces")


def check_many_members(backend: Operators, members: int) -> None:
    """Any number of members."""
    flat = calm(2 * 70 * members - 9, torch.bfloat16)
    pieces = [
        View(flat, 2, 256, 70 * members, members, 70, present=70),
        View(flat, 1, 5, 5, members, 5),
    ]
    for spec in (BlockSpec("int4"), Cast("fp32")):
        messages = same_message(backend, pieces, spec, f"{members} members").view(members, -1)
        same_values(backend, messages, spec, pieces[:1] + blank(pieces[1:]), f"{members} members")


FAR = 2**32 + 5000
FAR_CASES = [
    (BlockSpec("int8"), 100, None),
    (BlockSpec("int4"), 499, None),
    (Cast("fp16"), 128, 77),
]


def check_far(backend: Operators, spec: Spec, columns: int, present: int | None) -> None:
    """Rows and members over 2^31 values apart, and messages over 2^31 bytes: read and written where
    they lie.

    Strides are of 32 bits, but not when they are taken twice. Memory is there only where it is
    touched.
    """
    far = View(untouched(FAR, torch.bfloat16), 2, columns, 2**31 + 8, 9, 2**28 + 512, present)
    near = View(
        torch.zeros(18 * columns, dtype=torch.bfloat16),
        2,
        columns,
        columns,
        9,
        2 * columns,
        present,
    )
    for piece in (far, near):
        piece.write(calm(18 * columns, torch.float32).view(9, -1))
    nbytes, strides = spec.nbytes(far.numel), (2**30, 2**30 + 2**12, 2**30 + 2**16, 1)
    table = untouched(3 * 2**31 + 2**18, torch.uint8).as_strided((3, 3, 3, nbytes), strides)
    few = torch.zeros(3, 3, 3, nbytes, dtype=torch.uint8)
    REFERENCE.quantize([near], spec, Messages(few[:1]))
    backend.quantize([far], spec, Messages(table[:1]))
    same_bytes(table[:1].contiguous(), few[:1], spec, "quantize far apart")
    few[1:], table[1:] = few[0], few[0]
    REFERENCE.dequantize_reduce(Messages(few), spec, [near], 0.5)
    backend.dequantize_reduce(Messages(table), spec, [far], 0.5)
    assert_same(far.read(), near.read(), f"{spec} {columns} far apart")
