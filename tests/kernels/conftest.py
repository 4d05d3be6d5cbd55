# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The backends of the golden suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.backends import opened
from tests.kernels.operators import Operators


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Operators]:
    """The one that a test's parameter names."""
    with opened(request.param) as kernels:
        yield kernels
