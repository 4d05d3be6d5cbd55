# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Other people's 8-bit quantizers, as they come: what a user would reach for in place of ours.

They do not send the same: fbgemm keeps a scale and a bias per row (of 256 here), asymmetric;
bitsandbytes quantizes to a table of non-linear values. They do the same work for a link: one pass
that makes a quarter or half of the bytes.
"""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder.quantizer import QuantizerBuilder
from torch import Tensor

from zero_topo.quant import ops
from zero_topo.quant.operators import use
from zero_topo.quant.spec import BlockSpec

ROW = 256
SOURCES = 8
COMPILER = ("g++", "-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")


@dataclass(frozen=True)
class Op:
    """One kernel: its name, how to run it once on buffers of its own, the bytes it reads and
    writes, its format.

    What ``prepare`` does before each run is not timed.
    """

    name: str
    call: Callable[[], object]
    traffic: int
    bits: int = 8
    block_size: int = ROW
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Peer:
    """Attributes: its name, and ``prepare``: a buffer -> its operations."""

    name: str
    prepare: Callable[[Tensor], list[Op]]


def peers(device: torch.device, skipped: dict[str, str]) -> Iterator[Peer]:
    """Those that are there; why the others are not goes into ``skipped``."""
    yield Peer("eager", lambda x: _plain(_quantize, _dequantize, x))
    yield Peer("torch.compile", _compiled)
    if device.type == "cpu":
        yield Peer("fbgemm", _fbgemm)
        try:
            library = _plain_library()
        except (OSError, subprocess.SubprocessError) as error:
            skipped["plain loop"] = skipped["vector loop"] = f"do not compile: {error}"
        else:
            yield Peer("plain loop", partial(_loops, library, "plain"))
            yield Peer("vector loop", partial(_loops, library, "vectors"))
    else:
        try:
            module = QuantizerBuilder().load(verbose=False)
        except Exception as error:  # whatever its builder runs into
            skipped["deepspeed"] = f"does not compile: {error}"
        else:
            yield Peer("deepspeed", partial(_deepspeed, module))
    try:
        functional: Any = importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        skipped["bitsandbytes"] = f"not installed: {error}"
    else:
        yield Peer("bitsandbytes", lambda x: _bitsandbytes(functional, x))


def keep_freed_memory() -> None:
    """Have malloc give back what was freed: peers allocate their outputs, and fresh pages cost up
    to ten times a copy.

    Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold = -1
        m_mmap_max = -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


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
        Op("quantize", lambda: quantize(x), traffic),
        Op("dequantize", lambda: dequantize(q, scale, x.dtype), traffic),
    ]


def _compiled(x: Tensor) -> list[Op]:
    """The same arithmetic, fused by torch's compiler, into outputs it allocates (they come back
    from its cache).
    """
    return _plain(torch.compile(_quantize), torch.compile(_dequantize), x)


def _fbgemm(x: Tensor) -> list[Op]:
    """torch's copy of fbgemm's row-wise quantizer takes FP32 only: other types are converted first,
    which counts.
    """
    ops = torch.ops.quantized
    packed = ops.embedding_bag_byte_prepack(x.view(-1, ROW).float())
    traffic = x.nbytes + packed.nbytes
    rows = x.view(-1, ROW)
    return [
        Op("quantize", lambda: ops.embedding_bag_byte_prepack(rows.float()), traffic),
        Op("dequantize", lambda: ops.embedding_bag_byte_unpack(packed).to(x.dtype), traffic),
    ]


def _bitsandbytes(functional: Any, x: Tensor) -> list[Op]:
    q, state = functional.quantize_blockwise(x, blocksize=ROW)
    traffic = x.nbytes + q.nbytes + state.absmax.nbytes
    return [
        Op("quantize", lambda: functional.quantize_blockwise(x, blocksize=ROW), traffic),
        Op("dequantize", lambda: functional.dequantize_blockwise(q, state), traffic),
    ]


def _deepspeed(module: Any, x: Tensor) -> list[Op]:
    """What ZeRO++ calls, on FP16, which is all that it takes; its reduction quantizes the sum
    again.
    """
    half = x.half().view(SOURCES, -1)
    ops = []
    for bits, block in product((8, 4), (ROW, 2048)):
        groups = half.numel() // block
        args = groups, bits, module.Symmetric
        q, scales = module.quantize(half, *args)
        sums = q, scales, groups, groups // SOURCES, bits, module.Symmetric, SOURCES
        calls = {
            "quantize": (partial(module.quantize, half, *args), half.nbytes),
            "dequantize": (partial(module.dequantize, q, scales, *args), half.nbytes),
            "dequantize_reduce": (
                partial(module.quantized_reduction, *sums),
                (q.nbytes + scales.nbytes) // SOURCES,
            ),
        }
        ops += [
            Op(name, call, q.nbytes + scales.nbytes + alongside, bits, block)
            for name, (call, alongside) in calls.items()
        ]
    return ops


def _plain_library() -> ctypes.CDLL:
    source = Path(__file__).parent / "plain_reduce.cpp"
    with tempfile.TemporaryDirectory(prefix="zero_topo_plain_") as folder:
        target = Path(folder) / "plain_reduce.so"
        subprocess.run(
            [*COMPILER, str(source), "-o", str(target)],
            check=True,
            capture_output=True,
            timeout=120,
        )
        return ctypes.CDLL(str(target))  # mapped: the file may go


class _Job(ctypes.Structure):
    """What plain_reduce.cpp sums: messages, how many, values of each, block size, where scales
    begin.
    """

    _fields_ = [("messages", ctypes.c_void_p)] + [
        (name, ctypes.c_int64) for name in ("sources", "numel", "block_size", "scales_at")
    ]


def _loops(library: ctypes.CDLL, how: str, x: Tensor) -> list[Op]:
    """Convert, multiply, add: the sum of ``SOURCES`` INT4 shards as one would first write it, one
    thread, whole blocks.

    Raises:
        ValueError: where its bits are not those of the reference.
    """
    kind = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(x.dtype)
    if kind is None or torch.get_num_threads() > 1:
        return []
    blocks = [block for block in (256, 2048) if len(x) >= SOURCES * block]
    return [
        _loop(getattr(library, f"{how}_{kind}"), x, BlockSpec("int4", block)) for block in blocks
    ]


def _loop(function: Any, x: Tensor, spec: BlockSpec) -> Op:
    use("reference", x.device)
    parts = x[: len(x) // (SOURCES * spec.block_size) * SOURCES * spec.block_size].chunk(SOURCES)
    messages = torch.stack([ops.quantize(part, spec) for part in parts])
    out = torch.zeros_like(parts[0])
    expected = torch.zeros_like(parts[0])
    pointers = (ctypes.c_void_p * SOURCES)(*(message.data_ptr() for message in messages))
    numel = out.numel()
    job = _Job(
        ctypes.addressof(pointers), SOURCES, numel, spec.block_size, spec.scales_offset(numel)
    )

    def call(stored: object = (pointers, messages)) -> object:  # addresses keep nothing alive
        return function(job, ctypes.c_void_p(out.data_ptr()))

    call()
    ops.dequantize_reduce(messages, spec, expected)
    if not torch.equal(out, expected):
        raise ValueError("the plain loop does not compute what the reference does")
    traffic = messages.nbytes + out.nbytes
    return Op("dequantize_reduce", call, traffic, spec.bits, spec.block_size)
