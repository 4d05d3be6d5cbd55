# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The CPU kernels, compiled once."""

from __future__ import annotations

import ctypes

import pytest

from tests.kernels import cpu_library
from tests.kernels.cpu_library import LEVELS


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """The kernels, compiled once."""
    return cpu_library.load(cpu_library.build())


@pytest.fixture(params=LEVELS)
def level(library: ctypes.CDLL, request: pytest.FixtureRequest) -> int:
    """Each instruction set in turn."""
    number = LEVELS[request.param]
    if number > library.zt_cpu_best_level():
        pytest.skip(f"this processor has no {request.param}")
    return number
