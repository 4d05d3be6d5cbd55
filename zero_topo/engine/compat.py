# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Whether another package still has what we rely on: names and parameter lists, compared at import time."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

Required = tuple[type, str, tuple[str, ...] | None]
Assigned = tuple[type, Sequence[str]]


def refuse(problems: Sequence[str], built_for: str, found: str) -> None:
    """Stop if there are problems.

    Args:
        problems: what :func:`differences` and :func:`unassigned` found.
        built_for: the version of DeepSpeed we know.
        found: the version that is installed.

    Raises:
        ImportError: naming every problem, and the way out.
    """
    if problems:
        raise ImportError(
            f"zero_topo is built for DeepSpeed {built_for}, but DeepSpeed {found} differs where it matters: "
            f"{'; '.join(problems)}. Install deepspeed=={built_for}, or a zero_topo for your version"
        )


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


def unassigned(required: Iterable[Assigned]) -> list[str]:
    """Attributes of instances that no method of their class sets, one phrase each.

    Args:
        required: (class, names of attributes).
    """
    problems = []
    for owner, names in required:
        functions = [f for base in owner.__mro__ for f in vars(base).values() if inspect.isfunction(f)]
        codes = [code for function in functions for code in _codes(function)]
        gone = [name for name in names if not hasattr(owner, name) and not any(_sets(code, name) for code in codes)]
        problems += [f"{owner.__name__}.{name} is gone" for name in gone]
    return problems


def _sets(code: CodeType, name: str) -> bool:
    """Whether code sets an attribute of this name, on whatever object."""
    steps = dis.get_instructions(code) if name in code.co_names else ()
    return any(step.opname == "STORE_ATTR" and step.argval == name for step in steps)


def _codes(function: FunctionType) -> Iterator[CodeType]:
    """Code of a function and of those it decorates."""
    yield function.__code__
    for cell in function.__closure__ or ():
        if inspect.isfunction(cell.cell_contents):
            yield from _codes(cell.cell_contents)
