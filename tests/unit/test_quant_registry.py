# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Which backend quantizes: the best that loads, said in one line; a forced one or a clear error."""

from __future__ import annotations

import logging
import sys
from types import MappingProxyType

import pytest
import torch

from zero_topo.quant import reference, registry
from zero_topo.quant.ops import Backend, BackendUnavailable
from zero_topo.quant.pieces import pieces_to_read

CPU = torch.device("cpu")


def broken(device: torch.device) -> Backend:
    """A backend that is not to be had."""
    raise BackendUnavailable("there is no C++ compiler (install g++)")


def good(device: torch.device) -> Backend:
    """One that is."""
    return reference


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best backend is not to be had, the next is."""
    monkeypatch.setattr(registry, "BACKENDS", MappingProxyType({"native": broken, "reference": good}))


@pytest.mark.usefixtures("two")
def test_a_missing_compiler_means_the_next_backend_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """No crash and no silence: the line names what serves and why the better one does not."""
    with caplog.at_level(logging.INFO, "zero_topo"):
        assert registry.select_quantizer(CPU, {}).name == "reference"
    (line,) = caplog.messages
    assert line == "zero_topo: kernels on cpu: reference; not native: there is no C++ compiler (install g++)"


@pytest.mark.usefixtures("two")
def test_a_forced_backend_is_taken_or_refused() -> None:
    """ZERO_TOPO_QUANT never falls back: what was asked for, or an error that says why and what to do."""
    assert registry.select_quantizer(CPU, {"ZERO_TOPO_QUANT": "reference"}).name == "reference"
    with pytest.raises(ValueError, match=r"ZERO_TOPO_QUANT=native cannot serve cpu: there is no C.. compiler.*unset"):
        registry.select_quantizer(CPU, {"ZERO_TOPO_QUANT": "native"})
    with pytest.raises(ValueError, match=r"ZERO_TOPO_QUANT=warp is no quantization backend.*native.*reference"):
        registry.select_quantizer(CPU, {"ZERO_TOPO_QUANT": "warp"})


def test_a_triton_that_is_too_old_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of torch 2.6: the next backend serves, instead of an AttributeError."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in ("zero_topo.quant.triton", "zero_topo.quant.triton_sparse"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("zero_topo.quant.triton", raising=False)
    monkeypatch.delattr("triton.knobs", raising=False)
    with pytest.raises(BackendUnavailable, match="older than"):
        registry.BACKENDS["triton"](CPU)


def test_every_backend_says_what_it_serves() -> None:
    """Without its interpreter Triton serves no CPU, and native kernels exist for CPUs and GPUs only."""
    with pytest.raises(BackendUnavailable, match="interpreter"):
        registry.BACKENDS["triton"](CPU)
    with pytest.raises(BackendUnavailable, match="no native kernels for meta"):
        registry.BACKENDS["native"](torch.device("meta"))
    assert registry.BACKENDS["reference"](CPU) is reference


def test_a_tensor_of_unusual_strides_is_read_as_a_copy() -> None:
    """All of it, in the order in which it is read."""
    x = torch.arange(24.0).view(2, 3, 4).permute(2, 1, 0)
    (piece,) = pieces_to_read(x)
    assert (piece.members, piece.rows, piece.columns) == (1, 1, 24) and torch.equal(piece.flat, x.reshape(-1))
