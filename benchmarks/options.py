# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Commands whose options are the fields of a frozen dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints


def taking(options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function whose first argument is a dataclass: each field is an option, as
    typer sees it. The function's other arguments are options of this command alone.

    Args:
        options: a dataclass whose fields all have defaults and are annotated as typer wants
            parameters to be.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = []
    for field in fields(options):
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
        )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        _, *others = inspect.signature(function, eval_str=True).parameters.values()

        def command(**given: Any) -> None:
            own = {other.name: given.pop(other.name) for other in others}
            function(options(**given), **own)

        command.__name__ = function.__name__
        command.__doc__ = function.__doc__
        command.__signature__ = inspect.Signature([*others, *parameters])  # type: ignore[attr-defined]
        return command

    return decorate
