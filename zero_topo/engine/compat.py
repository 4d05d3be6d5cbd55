# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Whether another package still has what we rely on: names and parameter lists, compared at import time."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

Required = tuple[type, str, tuple[str, ...] | None]


def differences(required: Iterable[Required]) -> list[str]:
    """What is missing or changed, one phrase each.

    Args:
        required: (class, attribute, parameter names or None if only its existence matters).
    """
    problems = []
    for owner, name, expected in required:
        found = getattr(owner, name, None)
        if found is None:
            problems.append(f"{owner.__name__}.{name} is gone")
        elif expected is not None and _parameters(found) != expected:
            actual = ", ".join(_parameters(found))
            problems.append(f"{owner.__name__}.{name}({actual}) was expected as ({', '.join(expected)})")
    return problems


def _parameters(function: Any) -> tuple[str, ...]:
    """Parameter names; looks through a decorator that does not carry them over (DeepSpeed's tracing one)."""
    names = tuple(inspect.signature(function).parameters)
    inner = [c.cell_contents for c in function.__closure__ or () if inspect.isfunction(c.cell_contents)]
    return _parameters(inner[0]) if names == ("args", "kwargs") and inner else names
