# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The operators: schemas that say what is written, and which backend serves: the best that loads,
or a forced one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels import golden, golden_codes
from tests.kernels.operators import Operators
from zero_topo.quant import operators, ops, reference
from zero_topo.quant.operands import Codes, Masters
from zero_topo.quant.operators import OPS, BackendUnavailable, Serve
from zero_topo.quant.spec import BlockSpec, Cast

CPU = torch.device("cpu")


def broken(device: torch.device) -> Serve:
    """A backend that is not to be had."""
    raise BackendUnavailable("there is no C++ compiler (install g++)")


def serving(quantize: Callable[..., None]) -> Callable[[torch.device], Serve]:
    """A backend that quantizes so."""

    def serve(key: str) -> Callable[[], object]:
        library = torch.library.Library("zero_topo", "IMPL")
        library.impl("quantize", quantize, "CPU")
        return library._destroy

    return lambda device: serve


def fails(*arguments: Any) -> None:
    """As a module that was built for another GPU does."""
    raise RuntimeError("zero_topo kernels: invalid device function")


def nothing(*arguments: Any) -> None:
    """Writes nothing."""


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Backends to choose from, the best first; the reference comes last."""
    before = operators.use("reference", CPU)
    found: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr(operators, "BACKENDS", found)
        yield found
        operators.use("reference", CPU)
    operators.use(before, CPU)


@pytest.mark.parametrize(
    ("native", "kinds", "reason"),
    [
        (broken, ("int8",), "there is no C++ compiler"),
        (serving(fails), ("int8",), "invalid device function"),
        (serving(nothing), ("int8",), f"{[0.0] * 8}"),
        (serving(nothing), ("fp6",), "fp6"),
    ],
    ids=["missing", "does not run", "is wrong", "has no such blocks"],
)
def test_a_backend_that_cannot_serve_is_left_out_or_refused_if_forced(
    native: Callable[[torch.device], Serve],
    kinds: tuple[str, ...],
    reason: str,
    backends: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next one serves from the start, and one line says why; ZERO_TOPO_QUANT never falls
    back.
    """
    backends |= {"native": native, "reference": operators._reference}
    known = {"native": ("int8",), "reference": ("int8", "fp6")}
    monkeypatch.setattr(operators, "KERNELS", MappingProxyType(known))
    with caplog.at_level(logging.INFO, "zero_topo"):
        assert operators.select(CPU, set(kinds), {}) == "reference"
    (line,) = caplog.messages
    assert "kernels on cpu: reference; not native: " in line and reason in line
    assert ops.quantize(torch.ones(1), Cast("bf16")).tolist() == [0x80, 0x3F]
    forced = {"ZERO_TOPO_QUANT": "reference"}
    assert operators.select(CPU, env=forced) == "reference"
    with pytest.raises(ValueError, match="ZERO_TOPO_QUANT=native") as caught:
        operators.select(CPU, set(kinds), {"ZERO_TOPO_QUANT": "native"})
    assert reason in str(caught.value)
    with pytest.raises(ValueError, match="ZERO_TOPO_QUANT=warp"):
        operators.select(CPU, env={"ZERO_TOPO_QUANT": "warp"})


def test_triton_serves_blocks_and_torch_the_others(
    backends: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so, with the command that gives kernels for all; what it serves is its own."""
    called: list[str] = []

    def quantize(*arguments: Any) -> None:
        called.append("quantize")
        reference.quantize(*arguments)

    blocks = SimpleNamespace(quantize=quantize)
    serve = partial(operators._serve_python, blocks)
    backends |= {"triton": lambda device: serve, "reference": operators._reference}
    with caplog.at_level(logging.INFO, "zero_topo"):
        assert operators.select(CPU, env={}) == "triton"
        (line,) = caplog.messages
        assert "kernels on cpu: triton" in line and '"zero-topo build"' in line
        called.clear()
        x = torch.randn(64)
        values = ops.dequantize(ops.quantize(x, Cast("fp32")), Cast("fp32"), torch.empty(64))
        bits = ops.pack(x > 0)
        operators.use("reference", CPU)
    assert called == ["quantize"] and torch.equal(values, x)
    assert torch.equal(bits, ops.pack(x > 0))


def test_a_triton_that_is_too_old_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of torch 2.6: the next backend serves, instead of an AttributeError."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in ("zero_topo.quant.triton", "zero_topo.quant.triton_blocks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("zero_topo.quant.triton", raising=False)
    monkeypatch.delattr("triton.knobs", raising=False)
    with pytest.raises(BackendUnavailable, match="older than"):
        operators.BACKENDS["triton"](CPU)


def test_torch_operations_serve_intel_tiles(caplog: pytest.LogCaptureFixture) -> None:
    """A job on XPU starts, with one line that says what serves and why no kernel does."""
    with caplog.at_level(logging.INFO, "zero_topo"):
        assert operators.select(torch.device("xpu"), env={}) == "reference"
    assert (
        "kernels on xpu: reference; not native: there are no native kernels for xpu"
        in caplog.messages[0]
    )
    with pytest.raises(
        ValueError, match=r"ZERO_TOPO_QUANT=triton cannot serve xpu: .* never run on xpu; unset it"
    ):
        operators.select(torch.device("xpu"), env={"ZERO_TOPO_QUANT": "triton"})


def test_tensors_of_two_devices_are_refused() -> None:
    """By an error, in every operation: a kernel would read an address of the other device."""
    spec, x = BlockSpec("int8", 64), torch.randn(64)
    message = ops.quantize(x, spec)
    codes = Codes.build([(0, 64)], 1, 64, CPU).part(0, 1, 1, 1)
    masters = Masters(x[None], 0, 0)
    far, elsewhere = message.to("meta"), Masters(x[None].to("meta"), 0, 0)
    change = ops.assess_changes(masters, codes)
    zeros = torch.zeros(1, dtype=torch.uint8, device="meta")
    calls: list[Callable[[], object]] = [
        lambda: ops.dequantize(far, spec, x),
        lambda: ops.requantize(far[None], spec, message, 64),
        lambda: ops.encode_changes(elsewhere, codes, change, 1024),
        lambda: ops.apply_changes(far[None, None], codes, -1),
        lambda: ops.peel(torch.zeros(3, 1024), zeros, 1, 8),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="move one of them"):
            call()


class Calls(TorchDispatchMode):
    """The arguments of the last call of each operator of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "zero_topo":
            self.found[func] = args
        return func(*args, **(kwargs or {}))


def test_schemas_say_what_is_written() -> None:
    """Only marked arguments change, no result is an alias of one, and fake tensors get results of
    the right shape.
    """
    backend = Operators()
    with Calls() as calls:
        golden.check_operations(backend, golden.SERVED[0], 0)
        for check in golden.SPARSE:
            check(backend, Random(0))
        golden_codes.check_codes(backend, golden_codes.RAGGED[0], 0.4, 0)
    named = {name for name in dir(OPS) if not name.startswith("_")} - {"name"}
    assert {func._opname for func in calls.found} == named
    for func, arguments in calls.found.items():
        torch.library.opcheck(func, arguments, test_utils=("test_schema", "test_faketensor"))
