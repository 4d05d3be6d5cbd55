# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Parameters with which only ``make test-long`` runs a test."""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import partial
from typing import Any

import pytest

late = partial(pytest.param, marks=pytest.mark.long)


def often(some: Container[Any], values: Iterable[Any]) -> list[Any]:
    """All values of a test's parameter; ``make test`` tries only some, ``make test-long`` all."""
    return [value if value in some else late(value) for value in values]


def on_eight(*values: Any, name: str = "") -> Any:
    """A value of a test's parameter, or values of several, that only ``make test-long`` tries, on
    eight ranks.
    """
    words = name or "-".join(str(value) for value in values)
    return pytest.param(
        *values, marks=(pytest.mark.eight_ranks, pytest.mark.long), id=f"{words}-on-eight"
    )
