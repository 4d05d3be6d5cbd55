# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The CPU kernels at each instruction set, the work whole or split; the GPU kernels, compiled for
the emulation.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from op_builder import source_dir
from op_builder.jit import BuildError
from tests.kernels.gpu_library import Emulated, bound
from tests.kernels.operators import LEVELS, Operators, limited, serving_module


@pytest.fixture(scope="session")
def module() -> ModuleType:
    """The compiled module; compiled here if no one has yet."""
    from op_builder.builder import CPUBuilder  # imports DeepSpeed

    try:
        return CPUBuilder().load()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(params=LEVELS)
def level(module: ModuleType, request: pytest.FixtureRequest) -> int:
    """Each instruction set in turn."""
    number = LEVELS[request.param]
    if number > module.best_level():
        pytest.skip(f"this processor has no {request.param}")
    return number


@pytest.fixture
def whole(module: ModuleType, level: int) -> Iterator[Operators]:
    """Each operation in one piece of work."""
    with limited(module, level) as kernels:
        yield kernels


@pytest.fixture
def split(module: ModuleType, level: int) -> Iterator[Operators]:
    """Each operation in pieces of few values, for four threads."""
    with limited(module, level, values=64, threads=4) as kernels:
        yield kernels


@pytest.fixture(scope="module")
def emulated() -> Iterator[Emulated]:
    """The GPU kernels, compiled for the emulation, behind the binding that an engine on a GPU
    loads.
    """
    module = bound(source_dir())
    with serving_module(module) as kernels:
        yield Emulated(module, kernels)
