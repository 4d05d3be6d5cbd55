# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What ``make test`` runs, and what only ``make test-long`` does.

In tests/launcher a test is long unless it is marked ``core``; elsewhere only if it is marked
``long``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import partial
from typing import Any

import pytest

core = partial(pytest.param, marks=pytest.mark.core)
late = partial(pytest.param, marks=pytest.mark.long)


def often(some: Container[Any], values: Iterable[Any]) -> list[Any]:
    """All values of a test's parameter; ``make test`` tries only some, ``make test-long`` all."""
    return [value if value in some else late(value) for value in values]


def cores(some: Container[Any], values: Iterable[Any]) -> list[Any]:
    """All values of a parameter of tests/launcher; ``make test`` tries only some."""
    return [_core(value) if value in some else value for value in values]


def _core(value: Any) -> Any:
    return core(*value) if isinstance(value, tuple) else core(value)


def on_eight(*values: Any, name: str = "") -> Any:
    """A value of a test's parameter, or values of several, that is tried on eight ranks."""
    words = name or "-".join(str(value) for value in values)
    return pytest.param(*values, marks=pytest.mark.eight_ranks, id=f"{words}-on-eight")
