# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The element-wise operations of the sparse modes: one definition, whose arguments are checked here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zero_topo.quant.operators import OPS
from zero_topo.quant.pieces import FLOATS
from zero_topo.quant.sparse_reference import LANES


@dataclass(frozen=True)
class Picks:
    """Elements of a vector whose magnitude reaches a threshold.

    Attributes:
        indices: int64, ascending; only the first ``min(found, room)`` are written.
        values: in the vector's dtype, likewise.
        found: int64 ``[1]`` on the vector's device: how many there are, even if there was no room for all.
    """

    indices: Tensor
    values: Tensor
    found: Tensor


def pack(mask: Tensor) -> Tensor:
    """Booleans ``[n]`` -> uint8 ``[ceil(n / 8)]``; element ``i`` is bit ``i % 8`` of byte ``i // 8``.

    Raises:
        ValueError: if ``mask`` is not 1-D bool and contiguous.
    """
    _check("mask", mask, (torch.bool,))
    bits = torch.empty(-(-mask.numel() // 8), dtype=torch.uint8, device=mask.device)
    if mask.numel():
        OPS.mask_pack.default(mask, bits)
    return bits


def unpack(bits: Tensor, numel: int) -> Tensor:
    """The inverse of :func:`pack`.

    Raises:
        ValueError: if ``bits`` is not the packed mask of ``numel`` elements.
    """
    _check("bits", bits, (torch.uint8,), -(-numel // 8))
    mask = torch.empty(numel, dtype=torch.bool, device=bits.device)
    if numel:
        OPS.mask_unpack.default(bits, mask)
    return mask


def count_above(x: Tensor, threshold: float) -> Tensor:
    """How many ``|x[i]| >= threshold``, compared in FP32; int64 ``[1]`` on the device of ``x``.

    Raises:
        ValueError: if ``x`` is not 1-D, contiguous, FP32, FP16 or BF16.
    """
    _check("x", x, FLOATS)
    return OPS.count_above.default(x, threshold) if x.numel() else _zero(x)


def compact_above(x: Tensor, threshold: float, room: int) -> Picks:
    """Those elements, at most ``room`` of them, in ascending order of index.

    Raises:
        ValueError: as :func:`count_above`, and for a negative ``room``.
    """
    _check("x", x, FLOATS)
    if room < 0:
        raise ValueError(f"room for {room} elements: it cannot be negative")
    indices = torch.empty(room, dtype=torch.int64, device=x.device)
    values = torch.empty(room, dtype=x.dtype, device=x.device)
    found = OPS.compact_above.default(x, threshold, indices, values) if x.numel() else _zero(x)
    return Picks(indices, values, found)


def row_largest(x: Tensor, k: int) -> Tensor:
    """The columns of the ``k`` largest magnitudes of each row, ascending, int64 ``[rows, k]``.

    Args:
        x: FP32 ``[rows, n]``, contiguous; NaN is larger than all, and of equal ones the first are taken.
        k: at most ``n``.

    Raises:
        ValueError: for another dtype or layout, or a ``k`` that a row does not have.
    """
    _check("x", x.view(-1) if x.dim() == 2 and x.is_contiguous() else x, (torch.float32,))
    if x.dim() != 2 or not 1 <= k <= x.shape[1]:
        raise ValueError(f"{k} elements of each row of {tuple(x.shape)}: give rows, and 1 to as many as they have")
    indices = torch.empty(x.shape[0], k, dtype=torch.int64, device=x.device)
    if x.numel():
        OPS.row_largest.default(x, indices)
    return indices


def sketch(x: Tensor, seed: int, rows: int) -> Tensor:
    """The count sketches of the rows of ``x``; those of one seed and size add up.

    Args:
        x: FP32 ``[members, n]``, or ``[n]`` of one; contiguous.
        seed: of the hash.
        rows: of a sketch.

    Returns:
        FP32 ``[members, rows, 1024]``, or ``[rows, 1024]``.

    Raises:
        ValueError: if ``x`` is not FP32 and contiguous, or for fewer than three rows.
    """
    _check("x", x.view(-1) if x.dim() == 2 and x.is_contiguous() else x, (torch.float32,))
    _check_rows(rows)
    sketch = torch.zeros(*x.shape[:-1], rows, LANES, device=x.device)
    if x.numel():
        OPS.sketch_insert.default(x.view(-1, x.shape[-1]), seed, sketch.view(-1, rows, LANES))
    return sketch


def peel(sketch: Tensor, bits: Tensor, seed: int, numel: int) -> tuple[Tensor, Tensor]:
    """Recover a vector from its sketch and the packed mask of its non-zero elements.

    Args:
        sketch: FP32 ``[rows, 1024]``; used up.
        bits: as :func:`pack` makes them.
        seed: that of :func:`sketch`.
        numel: elements of the vector.

    Returns:
        The vector, FP32 ``[numel]``, and how many elements are only estimates, int64 ``[1]``.

    Raises:
        ValueError: for tensors of other shapes or dtypes.
    """
    _check("bits", bits, (torch.uint8,), -(-numel // 8))
    if sketch.dim() != 2 or sketch.shape[1] != LANES:
        raise ValueError(f"a sketch is [rows, {LANES}], not {tuple(sketch.shape)}")
    _check_rows(sketch.shape[0])
    _check("sketch", sketch.view(-1), (torch.float32,))
    out = torch.empty(numel, device=sketch.device)
    return out, OPS.sketch_peel.default(sketch, bits, seed, out) if numel else _zero(out)


def _zero(x: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=x.device)


def _check(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], numel: int | None = None) -> None:
    if x.dim() != 1 or not x.is_contiguous() or x.dtype not in dtypes or numel not in (None, x.numel()):
        wanted = f"{numel} elements" if numel is not None else "any number of elements"
        raise ValueError(
            f"{name} must be 1-D and contiguous, of {wanted} and one of {dtypes}, not {x.dtype} {tuple(x.shape)}"
        )


def _check_rows(rows: int) -> None:
    if rows < 3:
        raise ValueError(f"a sketch of {rows} rows cannot be peeled: it has three thirds, so give at least 3")
