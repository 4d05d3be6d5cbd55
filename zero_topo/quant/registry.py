# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Which backend quantizes on a device: the best that loads, or the one ``ZERO_TOPO_QUANT`` forces."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

import torch

from zero_topo.quant import reference
from zero_topo.quant.code_ops import CodeBackend, CodeOps
from zero_topo.quant.ops import Backend, BackendUnavailable, Quantizer
from zero_topo.quant.sparse_ops import SparseBackend, SparseOps

logger = logging.getLogger(__name__)

VARIABLE = "ZERO_TOPO_QUANT"
CPU = torch.device("cpu")


def _native(device: torch.device) -> Backend:
    from zero_topo.quant.native import load

    return load(device)


def _triton(device: torch.device) -> Backend:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendUnavailable("Triton runs on GPUs, and on a CPU only in its interpreter (TRITON_INTERPRET=1)")
    try:
        from zero_topo.quant import triton
    except ImportError as error:
        raise BackendUnavailable(f"triton is not installed: {error}") from error
    except AttributeError as error:
        raise BackendUnavailable(f"this triton is older than 3.4: {error}") from error
    return triton


def _reference(device: torch.device) -> Backend:
    return reference


# Best first.
BACKENDS: Mapping[str, Callable[[torch.device], Backend]] = MappingProxyType(
    {"native": _native, "triton": _triton, "reference": _reference}
)


def select_quantizer(device: torch.device = CPU, env: Mapping[str, str] = os.environ) -> Quantizer:
    """The best backend that loads for a device, or the one ``ZERO_TOPO_QUANT`` forces; logs one line for either.

    Raises:
        ValueError: if ``ZERO_TOPO_QUANT`` names a backend that does not exist or does not load.
    """
    forced = env.get(VARIABLE)
    if forced:
        return _forced(forced, device)
    skipped = []
    for name, load in BACKENDS.items():
        try:
            quantizer = Quantizer(name, load(device))
        except BackendUnavailable as reason:
            skipped.append(f"not {name}: {reason}")
            continue
        logger.info("zero_topo: kernels on %s: %s%s", device.type, name, "".join(f"; {why}" for why in skipped))
        return quantizer
    raise AssertionError("the reference serves every device")


def sparse_ops(quantizer: Quantizer, device: torch.device = CPU) -> SparseOps:
    """The element-wise operations of the sparse modes, by the backend that quantizes."""
    return SparseOps(quantizer.name, cast(SparseBackend, BACKENDS[quantizer.name](device)))


def code_ops(quantizer: Quantizer, device: torch.device = CPU) -> CodeOps:
    """The operations on weights held as codes, by the backend that quantizes."""
    backend = cast(CodeBackend, BACKENDS[quantizer.name](device))
    return CodeOps(backend, sparse_ops(quantizer, device))


def _forced(name: str, device: torch.device) -> Quantizer:
    if name not in BACKENDS:
        raise ValueError(f"{VARIABLE}={name} is no quantization backend; unset it or choose one of {list(BACKENDS)}")
    try:
        quantizer = Quantizer(name, BACKENDS[name](device))
    except BackendUnavailable as reason:
        raise ValueError(f"{VARIABLE}={name} cannot serve {device.type}: {reason}; unset it") from reason
    logger.info("zero_topo: kernels on %s: %s (%s)", device.type, name, VARIABLE)
    return quantizer
