# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of block quantization; torch then calls the backend that serves their
device.

All functions take any number of members at once, in one launch. A member is a rank of a group: each
sends or receives one packed buffer, the message. Values are FP32, FP16 or BF16, a tensor or views
(``operands.py``). Tables of messages are uint8, the bytes of each message adjacent. ``without`` is
a member or source whose message is left out; -1 leaves out none.

Note [Codes]
    Codes are INT8 weights. After every publish, each copy of a block holds the codes
    ``clamp(round_half_even(x * (1 / scale)), -127, 127)`` of its FP32 masters ``x``. Let ``top`` be
    the largest ``|x|`` of a block. Its scale stays while ``90 * scale <= top <= 127.49 * scale``
    and ``top`` is finite. Otherwise it becomes ``(top * 1.0625) / 127``, and the block is sent
    whole. A ``top`` below 2**-100 gives scale 0 and codes 0. If ``top`` is NaN, or the scale would
    not be finite, the scale is NaN and the codes are 0, so that gathered weights become NaN. Every
    step is one FP32 operation, correctly rounded. As a result, scales change rarely, and a code
    changes only when its weight has moved by about one quantization step.

    :func:`assess_changes` decides which codes of blocks that are not sent whole change, and by one
    up or down where a tile has no larger change. :func:`encode_changes` applies and sends these
    changes. It reads the masters again only where it sends new codes, and stores what it sends. All
    copies therefore stay equal even if a master is edited in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from zero_topo.quant.operands import (
    FLOATS,
    Change,
    Codes,
    Masters,
    Views,
    described,
    from_sources,
)
from zero_topo.quant.operators import OPS
from zero_topo.quant.reference_sparse import SKETCH_WIDTH
from zero_topo.quant.reference_sparse import aged_adamw as reference_aged_adamw
from zero_topo.quant.spec import ALIGNMENT, FLOAT_NAMES, Cast, ChangeSpec, Format

Target = TypeVar("Target", bound=Views)


def cast_to(dtype: torch.dtype) -> Cast:
    """Return the format of values that are sent uncompressed in a dtype."""
    return Cast(FLOAT_NAMES[FLOATS.index(dtype)])


def quantize(
    x: Views,
    spec: Format,
    out: Tensor | None = None,
    without: int = -1,
) -> Tensor:
    """Quantize values into one message for each member, and return ``out``.

    Args:
        x: a tensor, read in row-major order, or views; three dimensions are
            ``[members, rows, columns]``.
        spec: bits and block size, or a float dtype.
        out: ``[nbytes]``, ``[members, nbytes]`` or ``[outer, inner, nbytes]`` with
            ``nbytes = spec.nbytes(numel)``; allocated if None.
        without: a member whose message is not written.

    Raises:
        ValueError: if ``out`` has the wrong size, or the views have different members.
    """
    flats, shapes, members, numel = described(x)
    nbytes = spec.nbytes(numel)
    if out is None:
        size = [nbytes] if members == 1 else [members, nbytes]
        out = torch.empty(size, dtype=torch.uint8, device=flats[0].device)
    missing = (None,) * (4 - out.dim())
    # a view takes half as long as indexing
    table = out.view(1, 1, 1, -1) if out.dim() == 1 else out[missing]
    _check(table, spec, numel, nbytes, members)
    _check_devices(table, *flats)
    if numel and members:
        OPS.quantize.default(flats, shapes, spec.code, table, without)
    return out


def dequantize(
    messages: Tensor,
    spec: Format,
    out: Target,
    factor: float = 1.0,
    accumulate: bool = False,
    without: int = -1,
) -> Target:
    """Dequantize one message of each member into ``out``, and return it.

    Args:
        messages: shaped like ``out`` of :func:`quantize`.
        spec: format of the messages.
        out: receives the values.
        factor: multiplies the values, unless it is 1; rounded to FP32.
        accumulate: add the values to those of ``out`` instead of overwriting them.
        without: a member whose message is not read.

    Raises:
        ValueError: if a message does not hold as many values of this format as there is room for.
    """
    # Indexing with None is one call for any number of missing dimensions.
    if messages.dim() < 4:
        messages = messages[(None,) * (4 - messages.dim())]
    return _reduced(messages, (-1, without), spec, out, factor, accumulate)


def dequantize_reduce(
    messages: Tensor,
    spec: Format,
    out: Target,
    factor: float = 1.0,
    accumulate: bool = False,
    without: int = -1,
) -> Target:
    """Sum the dequantized messages into ``out``, in the order given, and return it.

    Args:
        messages: ``[sources, nbytes]``, or ``[sources, members, nbytes]``.
        spec: format of the messages.
        out: receives the sum, which is computed in FP32 and rounded once when it is written.
        factor: multiplies the sum, unless it is 1; rounded to FP32.
        accumulate: add the sum to the values of ``out`` instead of overwriting them.
        without: a source whose messages are left out.

    Raises:
        ValueError: for no message, or one of the wrong size.
    """
    return _reduced(from_sources(messages).table, (without, -1), spec, out, factor, accumulate)


def requantize(messages: Tensor, spec: Format, out: Tensor, numel: int) -> Tensor:
    """Sum the dequantized messages and quantize the sum without storing it in memory; return
    ``out``.

    Args:
        messages: ``[sources, nbytes]`` or ``[sources, members, nbytes]``, each of ``numel`` values.
        spec: format of the messages and of ``out``.
        out: ``[nbytes]``, or ``[members, nbytes]``.
        numel: values of a message.

    Raises:
        ValueError: for no message, or one of the wrong size.
    """
    sums = from_sources(messages).table
    table = out[(None,) * (4 - out.dim())]
    members = table.shape[1] * table.shape[2]
    nbytes = spec.nbytes(numel)
    _check(sums, spec, numel, nbytes, members)
    _check(table, spec, numel, nbytes, members)
    _check_devices(sums, table)
    if numel and members:
        OPS.requantize.default(sums, -1, spec.code, table, -1, spec.code, numel, 1.0)
    return out


def _reduced(
    table: Tensor,
    without: tuple[int, int],
    spec: Format,
    out: Target,
    factor: float,
    accumulate: bool,
) -> Target:
    flats, shapes, members, numel = described(out)
    _check(table, spec, numel, spec.nbytes(numel), members, without[0])
    _check_devices(table, *flats)
    if numel and members:
        OPS.dequantize_reduce.default(table, *without, spec.code, flats, shapes, factor, accumulate)
    return out


def _check(
    table: Tensor,
    spec: Format,
    numel: int,
    nbytes: int,
    members: int,
    without_source: int = -1,
) -> None:
    """Refuse a table that does not hold ``numel`` values of a format for each of the members."""
    sources, outer, inner, size = table.shape
    if sources <= (without_source >= 0):
        raise ValueError("nothing to reduce: give at least one message")
    if outer * inner != members:
        raise ValueError(f"{outer * inner} messages are not one for each of {members} members")
    # Sizes depend on the format, so a message of another one is found here.
    contiguous = size <= 1 or table.stride(3) == 1
    if size != nbytes or table.dtype != torch.uint8 or not contiguous:
        raise ValueError(
            f"a {spec} message of {numel} values is {nbytes} contiguous bytes of uint8 (a multiple "
            f"of {ALIGNMENT} if quantized), not {size} of {table.dtype}"
        )


def _check_devices(first: Tensor, *others: Tensor) -> None:
    """Refuse tensors of several devices: the kernel would follow pointers of another device."""
    for other in others:
        if other.device != first.device:
            raise ValueError(
                f"a tensor on {first.device} with one on {other.device}; move one of them"
            )


# -- INT8 weights ----------------------------------------------------------------------------------


def assess_changes(masters: Masters, codes: Codes) -> Change:
    """Return what publishing these masters would change, without changing anything.

    Args:
        masters: masters of one member's rows.
        codes: the part to publish.
    """
    _check_masters(masters, codes)
    _check_devices(masters.table, codes.stored)
    tile = ChangeSpec(codes.block).tile
    blocks = codes.blocks
    device = codes.stored.device
    scales = torch.empty(blocks, dtype=torch.float32, device=device)
    counts = torch.empty(blocks, codes.block // tile, dtype=torch.uint8, device=device)
    steps = torch.empty(*counts.shape, 2, tile // 8, dtype=torch.uint8, device=device)
    sizes = torch.empty(blocks, 2, dtype=torch.int64, device=device)
    table, *own = masters
    OPS.codes_assess.default(table, own, *codes, scales, counts, steps, sizes)
    # On a GPU torch scans one row in parallel, but gives each column of a table one thread, which
    # walks all rows.
    whole, changed = sizes.unbind(1)
    ends = torch.stack([whole.cumsum(0), changed.cumsum(0)], dim=1)
    return Change(scales, counts, steps, ends)


def encode_changes(
    masters: Masters,
    codes: Codes,
    change: Change,
    nbytes: int,
) -> Tensor:
    """Change the codes of the masters' rows, and encode the changes in a message.

    Args:
        masters: masters of one member's rows.
        codes: the part to publish; changed in place.
        change: the result of :func:`assess_changes`.
        nbytes: bytes of the message, at least those of :class:`~zero_topo.quant.spec.ChangeSpec`.

    Returns:
        uint8 ``[nbytes]``.
    """
    _check_devices(masters.table, codes.stored, change.scales)
    message = torch.empty(nbytes, dtype=torch.uint8, device=codes.stored.device)
    table, *own = masters
    OPS.codes_emit.default(table, own, *codes, *change, message)
    return message


def apply_changes(messages: Tensor, codes: Codes, without: int) -> None:
    """Apply the changes in all members' messages to the codes of their rows.

    Args:
        messages: uint8 ``[outer, inner, nbytes]``, one of each member.
        codes: the part that each message has; changed in place.
        without: a member whose rows are up to date, -1 for none.
    """
    outer, inner, _ = messages.shape
    members = codes.numbers[-1]
    if outer * inner != members:
        raise ValueError(
            f"messages {tuple(messages.shape)} are not one for each of {members} members"
        )
    _check_devices(messages, codes.stored)
    OPS.codes_apply.default(messages[None], without, *codes)


def _check_masters(masters: Masters, codes: Codes) -> None:
    table, _, member = masters
    *_, part_rows, members = codes.numbers
    if (
        table.dtype != torch.float32
        or table.dim() != 2
        or (table.shape[1] > 1 and table.stride(1) != 1)
    ):
        raise ValueError(
            f"masters are FP32 rows of adjacent columns, not {table.dtype} {tuple(table.shape)}"
        )
    rows = len(table)
    if rows != part_rows or not 0 <= member < members:
        raise ValueError(f"{rows} rows of member {member} are not {part_rows} of {members}")


# -- sparse modes ----------------------------------------------------------------------------------


def pack(mask: Tensor) -> Tensor:
    """Pack booleans ``[n]`` into uint8 ``[ceil(n / 8)]``; element ``i`` is bit ``i % 8`` of byte
    ``i // 8``.

    Raises:
        ValueError: if ``mask`` is not 1-D bool and contiguous.
    """
    _check_vector("mask", mask, (torch.bool,))
    bits = mask.new_empty(-(-mask.numel() // 8), dtype=torch.uint8)
    if mask.numel():
        OPS.mask_pack.default(mask, bits)
    return bits


def unpack(bits: Tensor, numel: int) -> Tensor:
    """Unpack the result of :func:`pack`.

    Raises:
        ValueError: if ``bits`` is not the packed mask of ``numel`` elements.
    """
    _check_vector("bits", bits, (torch.uint8,), -(-numel // 8))
    mask = bits.new_empty(numel, dtype=torch.bool)
    if numel:
        OPS.mask_unpack.default(bits, mask)
    return mask


def count_above(x: Tensor, threshold: float) -> Tensor:
    """Count the elements with ``|x[i]| >= threshold``, compared in FP32; int64 ``[1]`` on the
    device of ``x``.

    Raises:
        ValueError: if ``x`` is not 1-D, contiguous, FP32, FP16 or BF16.
    """
    _check_vector("x", x, FLOATS)
    return OPS.count_above.default(x, threshold) if x.numel() else _zero(x)


def compact_above(x: Tensor, threshold: float, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the elements with ``|x[i]| >= threshold``, at most ``room`` of them, in ascending
    order of index.

    Returns:
        Indices, int64 ``[room]``, and values ``[room]`` in the dtype of ``x``; only the first
        entries are written. Then the number of such elements, even if there was no room for all,
        int64 ``[1]``.

    Raises:
        ValueError: if ``x`` is not 1-D, contiguous, FP32, FP16 or BF16, or ``room`` is negative.
    """
    _check_vector("x", x, FLOATS)
    if room < 0:
        raise ValueError(f"room for {room} elements: it cannot be negative")
    indices = x.new_empty(room, dtype=torch.int64)
    values = x.new_empty(room)
    if not x.numel():
        return indices, values, _zero(x)
    number = OPS.compact_above.default(x, threshold, indices, values)
    return indices, values, number


def row_largest(x: Tensor, k: int) -> Tensor:
    """Return the columns of the ``k`` largest magnitudes of each row, ascending, int64
    ``[rows, k]``.

    Args:
        x: FP32 ``[rows, n]``, contiguous. NaN counts as the largest; among equal magnitudes the
            first are taken.
        k: at most ``n``.

    Raises:
        ValueError: for another dtype or layout, or if ``k`` is not in the range of a row.
    """
    _check_vector("x", x, (torch.float32,), dims=2)
    if x.dim() != 2 or not 1 <= k <= x.shape[1]:
        raise ValueError(
            f"{k} elements of each row of {tuple(x.shape)}: give rows, and 1 to as many as they "
            "have"
        )
    indices = x.new_empty(x.shape[0], k, dtype=torch.int64)
    if x.numel():
        OPS.row_largest.default(x, indices)
    return indices


def ternary_encode(
    x: Tensor,
    rows: int,
    indices: Tensor,
    low_bits: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Encode elements of blocks as signs with one scale a block, the mean of their magnitudes.

    A packet has the bits of all its blocks, part by part (Note [Positions] in
    ``config/sparse_config.py``): the upper bits of the positions, the lower ones, and the signs.
    The scales follow, from the next byte on. An element that is zero is not sent: it repeats the
    position before it, or the first of those after it.

    Args:
        x: FP32 ``[rows * blocks of a row, block]``, contiguous; a block has at most 2**15 elements.
        rows: number of packets, one for each row of the table.
        indices: int64 ``[rows * blocks of a row, k]``, ascending positions in each block, each
            once.
        low_bits: low bits of a position that are sent unchanged.
        dtype: dtype of the scales.

    Returns:
        The packets, uint8 ``[rows, bytes]``, and the number of elements sent, int64 ``[1]``.

    Raises:
        ValueError: for another dtype or layout of ``x`` or ``indices``.
    """
    form = _ternary_form(x.shape[-1], indices.shape[-1], low_bits, dtype)
    _check_vector("x", x, (torch.float32,), dims=2)
    _check_vector("indices", indices.view(-1), (torch.int64,), len(x) * form[1])
    nbytes = _ternary_bytes(form, len(x) // max(rows, 1))
    packets = x.new_empty(rows, nbytes, dtype=torch.uint8)
    if not packets.numel():
        return packets, _zero(x)
    return packets, OPS.ternary_encode.default(x, indices, form, packets)


def ternary_decode(
    packets: Tensor,
    begins: Tensor,
    block: int,
    k: int,
    low_bits: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Decode packets of :func:`ternary_encode`; an element that was not sent has the value 0, so
    values may be added.

    Args:
        packets: uint8 ``[rows, bytes]``.
        begins: int64 ``[rows, blocks of a row]``, where each block begins in the vector that the
            result refers to.
        block, k, low_bits, dtype: as at the sender.

    Returns:
        Indices, int64, and values, FP32, both ``[rows * blocks of a row * k]``.

    Raises:
        ValueError: if the size of the packets does not fit the number of blocks.
    """
    form = _ternary_form(block, k, low_bits, dtype)
    rows, blocks = begins.shape
    nbytes = rows * _ternary_bytes(form, blocks)
    _check_vector("packets", packets.view(-1), (torch.uint8,), nbytes)
    numel = rows * blocks * k
    indices = packets.new_empty(numel, dtype=torch.int64)
    values = packets.new_empty(numel, dtype=torch.float32)
    if numel:
        OPS.ternary_decode.default(packets, begins.contiguous(), form, indices, values)
    return indices, values


def _ternary_form(block: int, k: int, low_bits: int, dtype: torch.dtype) -> list[int]:
    if not 1 <= k <= block <= 1 << 15 or not 0 <= low_bits < 15:
        raise ValueError(
            f"{k} elements of a block of {block}, with {low_bits} low bits: choose 1 to {block} of "
            "2**15"
        )
    return [block, k, low_bits, FLOATS.index(dtype)]


def _ternary_bytes(form: list[int], blocks: int) -> int:
    block, k, low_bits, dtype = form
    # Upper bits of the positions in unary, lower ones and signs.
    bits = k + (block >> low_bits) + k * (low_bits + 1)
    return -(-blocks * bits // 8) + blocks * FLOATS[dtype].itemsize


def sketch(x: Tensor, seed: int, rows: int) -> Tensor:
    """Return the count sketches of the rows of ``x``; sketches of one seed and size can be summed.

    Args:
        x: FP32 ``[members, n]``, or ``[n]`` for one member; contiguous.
        seed: seed of the hash.
        rows: rows of a sketch.

    Returns:
        FP32 ``[members, rows, 1024]``, or ``[rows, 1024]``.

    Raises:
        ValueError: if ``x`` is not FP32 and contiguous, or for fewer than three rows.
    """
    _check_vector("x", x, (torch.float32,), dims=2)
    _check_rows(rows)
    shape = rows, SKETCH_WIDTH
    sketch = x.new_zeros(*x.shape[:-1], *shape, dtype=torch.float32)
    if x.numel():
        members = x.view(-1, x.shape[-1])
        OPS.sketch_insert.default(members, seed, sketch.view(-1, *shape))
    return sketch


def peel(sketch: Tensor, bits: Tensor, seed: int, numel: int) -> tuple[Tensor, Tensor]:
    """Recover a vector from its sketch and the packed mask of its non-zero elements.

    Args:
        sketch: FP32 ``[rows, 1024]``; overwritten.
        bits: the mask as packed by :func:`pack`.
        seed: the seed given to :func:`sketch`.
        numel: elements of the vector.

    Returns:
        The vector, FP32 ``[numel]``, and the number of elements that are only estimates, int64
        ``[1]``.

    Raises:
        ValueError: for tensors of other shapes or dtypes.
    """
    _check_vector("bits", bits, (torch.uint8,), -(-numel // 8))
    if sketch.dim() != 2 or sketch.shape[1] != SKETCH_WIDTH:
        raise ValueError(f"a sketch is [rows, {SKETCH_WIDTH}], not {tuple(sketch.shape)}")
    _check_rows(sketch.shape[0])
    _check_vector("sketch", sketch.view(-1), (torch.float32,))
    _check_devices(sketch, bits)
    out = sketch.new_empty(numel, dtype=torch.float32)
    if not numel:
        return out, _zero(out)
    return out, OPS.sketch_peel.default(sketch, bits, seed, out)


def aged_adamw(state: Sequence[Tensor], table: Tensor, settings: Sequence[float]) -> None:
    """Update the weights and the state of ``AgedAdamW``; FP32 parameters in one kernel.

    Args:
        state: weights, gradients, both moments, and the steps that each element has waited (uint8),
            ``[n]`` each, contiguous; all but the gradients change in place. An element has arrived
            if its gradient is not zero.
        table: ``[2, 257]`` in the dtype of the weights, by steps since the last arrival (0: none
            now): the decay of the second moment, the weight of the squared sum in it.
        settings: the factor by which all weights decay, the square root of the second moment's bias
            correction, epsilon, minus the learning rate over the momentum's bias correction, the
            same for a sum of several steps, and the weight of a gradient in the momentum.
    """
    # Kernels exist for FP32 alone.
    in_fp32 = state[0].dtype == state[1].dtype == torch.float32
    update: Callable[..., None] = OPS.aged_adamw.default if in_fp32 else reference_aged_adamw
    update(*state, table, settings)


def _zero(x: Tensor) -> Tensor:
    return x.new_zeros(1, dtype=torch.int64)


def _check_vector(
    name: str,
    x: Tensor,
    dtypes: tuple[torch.dtype, ...],
    numel: int | None = None,
    dims: int = 1,
) -> None:
    """Refuse what is not a contiguous vector, or rows if it may have two dimensions."""
    fits = 1 <= x.dim() <= dims and x.is_contiguous()
    if not fits or x.dtype not in dtypes or numel not in (None, x.numel()):
        wanted = f"{numel} elements" if numel is not None else "any number of elements"
        raise ValueError(
            f"{name} must be 1-D and contiguous, of {wanted} and one of {dtypes}, not {x.dtype} "
            f"{tuple(x.shape)}"
        )


def _check_rows(rows: int) -> None:
    if rows < 3:
        raise ValueError(
            f"a sketch of {rows} rows cannot be peeled: it has three thirds, so give at least 3"
        )
