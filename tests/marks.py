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
