# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads of one process look up the compiled kernels once, not each of them for each engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from zero_topo.quant import native


@pytest.fixture(autouse=True, scope="session")
def kernels_loaded_once() -> Iterator[None]:
    """Whether their sources have changed since, which hashes them all, is not asked again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", cache(native.load))
        yield
