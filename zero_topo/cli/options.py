# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Options of several commands, and commands whose options are the fields of a frozen dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from zero_topo.cost.model_files import MODELS
from zero_topo.strict import offering
from zero_topo.topology.presets import preset_names

Force = Annotated[
    bool, typer.Option("--force", help="Overwrite a file even if this command did not write it.")
]
MACHINES = offering(preset_names)
MODEL_NAMES = offering(lambda: MODELS)


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
