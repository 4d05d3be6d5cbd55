# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Commands with many options: the options are the fields of a frozen dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

Overlap = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Share of the communication that may run beside computation and does."),
]
T = TypeVar("T")


def refuse_others(options: Any, used: Callable[[str], bool], why: str) -> None:
    """Refuse options that were given, but that the command would not look at.

    Args:
        options: of :func:`taking`.
        used: whether it looks at the option of a field's name.
        why: ends the message.

    Raises:
        ValueError: naming the first.
    """
    for field in fields(options):
        if not used(field.name) and getattr(options, field.name) != field.default:
            raise ValueError(f"--{field.name.replace('_', '-')} would not count: {why}")


def taking(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Make a command of a function whose one argument is a dataclass: each field is an option, as typer sees it.

    Args:
        options: a dataclass whose fields all have defaults and are annotated as typer wants parameters to be.
    """
    hints = get_type_hints(options, include_extras=True)
    own = inspect.get_annotations(options)  # those of a base class come after them
    names = sorted((field.name for field in fields(options)), key=lambda name: name not in own)  # type: ignore[arg-type]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(options, name), annotation=hints[name])
        for name in names
    ]

    def decorate(function: Callable[[T], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            function(options(**given))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate
