# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Registers the operators ``torch.ops.zero_topo``: schemas, fake kernels, and the backend of each
device.

Operators
    torch selects a kernel by the device of the arguments, names it in profiles and runs the fake
    one for FakeTensors. The reference serves every device that no other backend serves, and every
    operator that a device's backend leaves out. An operator writes only to arguments that its
    schema marks, and returns nothing or a new tensor: torch forbids returning an alias of an
    argument. An index that leaves out a source or a member is -1 for none. A process has one
    backend per device type: the last one selected.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from threading import Lock
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from zero_topo.quant import reference
from zero_topo.quant.spec import KINDS, Cast

logger = logging.getLogger(__name__)

VARIABLE = "ZERO_TOPO_QUANT"
CPU = torch.device("cpu")
BLOCKS_ONLY = (
    "updates of INT8 weights and sparse selection run as torch operators; "
    '"zero-topo build" compiles kernels for them'
)
"""The log line of Triton's kernels, which quantize, dequantize and sum."""
OPS: Any = torch.ops.zero_topo

_OWN = "Tensor masters, int[] own"
_CODES = "Tensor param_indices, Tensor param_index_of, int[] part"
SCHEMAS = (
    "quantize(Tensor[] flats, int[] shapes, int[] format, Tensor(a!) messages, int without_member) "
    "-> ()",
    "dequantize_reduce(Tensor messages, int without_source, int without_member, int[] format, "
    "Tensor(a!)[] flats, int[] shapes, float factor, bool accumulate) -> ()",
    "requantize(Tensor messages, int without_source, int[] source, Tensor(a!) out, int "
    "without_member, int[] format, int numel, float factor) -> ()",
    "mask_pack(Tensor mask, Tensor(a!) bits) -> ()",
    "mask_unpack(Tensor bits, Tensor(a!) mask) -> ()",
    "count_above(Tensor x, float threshold) -> Tensor",
    "compact_above(Tensor x, float threshold, Tensor(a!) indices, Tensor(b!) values) -> Tensor",
    "row_largest(Tensor x, Tensor(a!) indices) -> ()",
    "ternary_encode(Tensor x, Tensor indices, int[] form, Tensor(a!) packets) -> Tensor",
    "ternary_decode(Tensor packets, Tensor begins, int[] form, Tensor(a!) indices, Tensor(b!) "
    "values) -> ()",
    "sketch_insert(Tensor x, int seed, Tensor(a!) sketch) -> ()",
    "sketch_peel(Tensor(a!) sketch, Tensor bits, int seed, Tensor(b!) out) -> Tensor",
    "aged_adamw(Tensor(a!) p, Tensor g, Tensor(b!) mean, Tensor(c!) square, Tensor(d!) age, Tensor "
    "table, float[] settings) -> ()",
    f"codes_assess({_OWN}, Tensor stored, {_CODES}, Tensor(a!) scales, Tensor(b!) counts, "
    "Tensor(c!) steps, Tensor(d!) sizes) -> ()",
    f"codes_emit({_OWN}, Tensor(a!) stored, {_CODES}, Tensor scales, Tensor counts, Tensor steps, "
    "Tensor ends, Tensor(b!) message) -> ()",
    f"codes_apply(Tensor messages, int without_member, Tensor(a!) stored, {_CODES}) -> ()",
)
"""``own``: first column and member of `Masters`; ``part``: the numbers of `Codes`."""


class BackendUnavailable(Exception):
    """Raised if a backend cannot serve a device on this machine; the message gives the reason, in
    one line.
    """


def kernels_of(backend: Any) -> dict[str, Callable[..., Any]]:
    """Return operator -> kernel of a backend: a Python module with some of the functions of
    ``reference.py``, which take what the schemas say.
    """
    names = map(_name, SCHEMAS)
    return {name: getattr(backend, name) for name in names if hasattr(backend, name)}


def _name(schema: str) -> str:
    return schema.partition("(")[0]


# Kept alive: registrations end when it is garbage-collected
_LIBRARY = torch.library.Library("zero_topo", "FRAGMENT")


def _define() -> None:
    for schema in SCHEMAS:
        _LIBRARY.define(schema)
        # `torch.compile` runs the fake kernels to learn shapes.
        fake = _number if schema.endswith("-> Tensor") else _nothing
        torch.library.register_fake(f"zero_topo::{_name(schema)}", fake, lib=_LIBRARY)
    for name, kernel in kernels_of(reference).items():
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        # Gradients do not flow through operators
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")


def _nothing(*arguments: Any) -> None:
    """Do nothing: the fake kernel of operators that only write to their arguments."""


def _number(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(1, dtype=torch.int64)


_define()

Serve = Callable[[str], Callable[[], object]]
"""Registers kernels for a dispatch key, and returns a function that unregisters them."""


def _native(device: torch.device) -> Serve:
    from zero_topo.op_builder.builder import CPUBuilder, GPUBuilder
    from zero_topo.op_builder.jit import BuildError

    if device.type not in ("cpu", "cuda"):
        raise BackendUnavailable(f"there are no native kernels for {device.type}")
    try:
        module = (CPUBuilder if device.type == "cpu" else GPUBuilder)().load()
    except BuildError as error:
        raise BackendUnavailable(str(error)) from error
    return partial(serve_native, module)


def serve_native(module: Any, key: str) -> Callable[[], object]:
    """Register the kernels of a module built from ``csrc/zt_binding.cpp``."""
    module.serve(key)
    return partial(module.serve, "")


def _triton(device: torch.device) -> Serve:
    if device.type not in ("cpu", "cuda"):
        raise BackendUnavailable(f"Triton's kernels were never run on {device.type}")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendUnavailable(
            "Triton runs on GPUs, and on a CPU only in its interpreter (TRITON_INTERPRET=1)"
        )
    try:
        from zero_topo.quant import triton
    except ImportError as error:
        raise BackendUnavailable(f"triton is not installed: {error}") from error
    except AttributeError as error:
        raise BackendUnavailable(f"this triton is older than 3.4: {error}") from error
    return partial(_serve_python, triton)


def _serve_python(backend: Any, key: str) -> Callable[[], object]:
    library = torch.library.Library("zero_topo", "IMPL")
    for name, kernel in kernels_of(backend).items():
        library.impl(name, kernel, key)
    return library._destroy


def _reference(device: torch.device) -> Serve:
    return lambda key: lambda: None  # it serves every device that no other backend serves


# Best first.
BACKENDS: Mapping[str, Callable[[torch.device], Serve]] = MappingProxyType(
    {"native": _native, "triton": _triton, "reference": _reference}
)


KERNELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "native": ("int8", "int4", "nf4"),
        "triton": ("int8", "int4", "nf4"),
        "reference": tuple(KINDS),
    }
)
"""The kinds of blocks that a backend has kernels for: a new kind is named here when its kernels are
there.
"""


class _Serving:
    """Records the backend of each device type and how to unregister its kernels; the initial one is
    the reference.
    """

    def __init__(self) -> None:
        self._by_type: dict[str, tuple[str, Callable[[], object]]] = {}
        self._lock = Lock()

    def use(self, name: str, device: torch.device) -> str:
        """Make a backend serve a device type, for the whole process; return the previous backend.

        Raises:
            BackendUnavailable: if it cannot; the previous backend stays, or the reference if a
                first kernel failed.
        """
        with self._lock:
            before, withdraw = self._by_type.get(device.type, ("reference", lambda: None))
            if name != before:
                # Loaded before the old one is withdrawn: if this raises, that one stays.
                serve = BACKENDS[name](device)
                withdraw()
                self._by_type[device.type] = name, serve(device.type.upper())
                # A module may load and yet not run, such as one built for another GPU.
                reason = _why_it_does_not_run(device)
                if reason:
                    self._take_back(device)
                    raise BackendUnavailable(reason)
            return before

    def _take_back(self, device: torch.device) -> None:
        """Let the reference serve a device type again."""
        _, withdraw = self._by_type.pop(device.type)
        withdraw()


def _why_it_does_not_run(device: torch.device) -> str | None:
    """Round eight numbers to BF16, which has them all: the reason if the backend cannot, such as a
    module built for another GPU; else None.
    """
    numbers = torch.arange(8, dtype=torch.float32, device=device)
    rounded = torch.zeros(8, dtype=torch.bfloat16, device=device)
    message = rounded.view(torch.uint8).view(1, 1, 1, -1)
    try:
        OPS.quantize([numbers], [1, 8, 8, 8, 0], Cast("bf16").code, message, -1)
        right = torch.equal(rounded.float(), numbers)
    except Exception as error:
        # Whatever a compiler, a driver or a kernel runs into, there are other backends.
        reason = str(error).strip().splitlines() or [repr(error)]
        return f"a first kernel failed ({reason[0]})"
    return None if right else f"its first kernel wrote {rounded.tolist()} where 0 to 7 are right"


use = _Serving().use


def select(
    device: torch.device = CPU,
    kinds: Collection[str] = (),
    env: Mapping[str, str] = os.environ,
) -> str:
    """Select the best backend that loads for a device, or the one that ``ZERO_TOPO_QUANT`` names,
    and log one line.

    Args:
        device: the device.
        kinds: names of ``KINDS`` that the backend must have kernels for.
        env: the environment.

    Returns:
        The name of the backend.

    Raises:
        ValueError: if ``ZERO_TOPO_QUANT`` names a backend that does not exist, does not load or
            lacks a kind.
    """
    forced = env.get(VARIABLE)
    if forced and forced not in BACKENDS:
        raise ValueError(
            f"{VARIABLE}={forced} is no quantization backend; unset it or choose one of "
            f"{list(BACKENDS)}"
        )
    skipped = []
    for name in [forced] if forced else BACKENDS:
        try:
            # Before a backend is loaded, which may take minutes of compiling.
            if missing := [kind for kind in kinds if kind not in KERNELS[name]]:
                raise BackendUnavailable(f"it has no kernels for {', '.join(missing)}")
            use(name, device)
        except BackendUnavailable as reason:
            if forced:
                raise ValueError(
                    f"{VARIABLE}={name} cannot serve {device.type}: {reason}; unset it"
                ) from reason
            skipped.append(f"; not {name}: {reason}")
            continue
        why = f" ({VARIABLE})" if forced else "".join(skipped)
        if name == "triton":
            why += f"; {BLOCKS_ONLY}"
        logger.info("zero_topo: kernels on %s: %s%s", device.type, name, why)
        return name
    raise AssertionError("the reference serves every device")
