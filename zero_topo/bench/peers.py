# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Other people's 8-bit quantizers, as they come: what a user would reach for in place of ours.

They do not send the same: fbgemm keeps a scale and a bias per row (of 256 here), asymmetric; bitsandbytes quantizes to
a table of non-linear values. They do the same work for a link: one pass that makes a quarter or half of the bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROW = 256
Op = tuple[str, Callable[[], object], int]


@dataclass(frozen=True)
class Peer:
    """Attributes: its name, its block size, and ``prepare``: a buffer -> (op, call, bytes of traffic) of each op."""

    name: str
    block_size: int
    prepare: Callable[[Tensor], list[Op]]


def peers(device: torch.device, skipped: dict[str, str]) -> Iterator[Peer]:
    """Those that are there; why the others are not goes into ``skipped``."""
    yield Peer("eager", ROW, lambda x: _plain(_quantize, _dequantize, x))
    yield Peer("torch.compile", ROW, _compiled)
    if device.type == "cpu":
        yield Peer("fbgemm", ROW, _fbgemm)
    try:
        functional: Any = importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        skipped["bitsandbytes"] = f"not installed: {error}"
    else:
        yield Peer("bitsandbytes", ROW, lambda x: _bitsandbytes(functional, x))


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.view(-1, ROW).float()
    scale = rows.abs().amax(1, keepdim=True) / 127.0
    return (rows / scale).round().to(torch.int8), scale


def _dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (q.float() * scale).to(dtype)


def _plain(quantize: Callable[..., Any], dequantize: Callable[..., Any], x: Tensor) -> list[Op]:
    q, scale = quantize(x)
    traffic = x.nbytes + q.nbytes + scale.nbytes
    return [
        ("quantize", lambda: quantize(x), traffic),
        ("dequantize", lambda: dequantize(q, scale, x.dtype), traffic),
    ]


def _compiled(x: Tensor) -> list[Op]:
    """The same arithmetic, fused by torch's compiler, into outputs it allocates (they come back from its cache)."""
    return _plain(torch.compile(_quantize), torch.compile(_dequantize), x)


def _fbgemm(x: Tensor) -> list[Op]:
    """torch's copy of fbgemm's row-wise quantizer takes FP32 only: other types are converted first, which counts."""
    ops = torch.ops.quantized
    packed = ops.embedding_bag_byte_prepack(x.view(-1, ROW).float())
    traffic = x.nbytes + packed.nbytes
    rows = x.view(-1, ROW)
    return [
        ("quantize", lambda: ops.embedding_bag_byte_prepack(rows.float()), traffic),
        ("dequantize", lambda: ops.embedding_bag_byte_unpack(packed).to(x.dtype), traffic),
    ]


def _bitsandbytes(functional: Any, x: Tensor) -> list[Op]:
    q, state = functional.quantize_blockwise(x, blocksize=ROW)
    traffic = x.nbytes + q.nbytes + state.absmax.nbytes
    return [
        ("quantize", lambda: functional.quantize_blockwise(x, blocksize=ROW), traffic),
        ("dequantize", lambda: functional.dequantize_blockwise(q, state), traffic),
    ]
