# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Commands with many options: the options are the fields of a frozen dataclass, the rarely needed
ones in ``--set``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from pydantic import TypeAdapter, ValidationError

from zero_topo.config import SCHEMES, SPARSE_MODES
from zero_topo.cost.model_files import MODELS
from zero_topo.strict import cut, describe, did_you_mean, offering, words_of
from zero_topo.topology.presets import preset_names

SET = "settings"

Force = Annotated[
    bool, typer.Option("--force", help="Overwrite a file even if this command did not write it.")
]


MACHINES = offering(preset_names)
MODEL_NAMES = offering(lambda: MODELS)
SCHEME_NAMES = offering(lambda: (*SCHEMES, *(f"stock-{name}" for name in SCHEMES)))
SPARSE_NAMES = tuple(mode.MODE for mode in SPARSE_MODES)


@dataclass(frozen=True)
class Rare:
    """Marks a field that is given as ``--set KEY=VALUE``; ``help`` says what it is in a few words.

    No others than the ``values`` are taken, if there are any; a shell offers them.
    """

    help: str
    values: tuple[str, ...] = ()


def refuse_others(options: Any, used: Callable[[str], bool], why: str) -> None:
    """Refuse options that were given, but that the command would not read.

    Args:
        options: of :func:`taking`.
        used: whether it reads the option of a field's name.
        why: ends the message.

    Raises:
        ValueError: naming the first.
    """
    for field in fields(options):
        if not used(field.name) and getattr(options, field.name) != field.default:
            name = field.name.replace("_", "-")
            raise ValueError(
                f"--{f'set {name}' if field.name in _rare(type(options)) else name} would not "
                f"count: {why}"
            )


def taking(options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function whose first argument is a dataclass: each field is an option, as
    typer sees it.

    The function's other arguments are options of this command alone. Fields marked as :class:`Rare`
    share one option, ``--set KEY=VALUE``.

    Args:
        options: a dataclass whose fields all have defaults and are annotated as typer wants
            parameters to be.
    """
    hints = get_type_hints(options, include_extras=True)
    rare = _rare(options)
    own = inspect.get_annotations(options)  # those of a base class come after them
    names = sorted((field.name for field in fields(options)), key=lambda name: name not in own)
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(options, name),
            annotation=hints[name],
        )
        for name in names
        if name not in rare
    ]
    if rare:
        keys = "; ".join(f"{name.replace('_', '-')}: {of.help}" for name, (_, of) in rare.items())
        known = [
            f"{name}={value}" for name, (_, of) in rare.items() for value in of.values or ("",)
        ]
        about = f"A rarely needed setting; repeatable. {keys}."
        option = typer.Option(
            "--set", metavar="KEY=VALUE", help=about, autocompletion=offering(lambda: known)
        )
        kind: Any = Annotated[list[str] | None, option]
        parameters.append(
            inspect.Parameter(SET, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        _, *others = inspect.signature(function, eval_str=True).parameters.values()

        def command(**given: Any) -> None:
            settings = [_setting(text, rare) for text in given.pop(SET, None) or ()]
            own = {other.name: given.pop(other.name) for other in others}
            function(options(**given, **dict(settings)), **own)

        command.__name__ = function.__name__
        command.__doc__ = function.__doc__
        command.__signature__ = inspect.Signature([*others, *parameters])  # type: ignore[attr-defined]
        return command

    return decorate


def _rare(options: type[Any]) -> dict[str, tuple[Any, Rare]]:
    """Return the types and help of the fields that ``--set`` sets."""
    hints = get_type_hints(options, include_extras=True).items()
    marked = [(name, get_args(hint)) for name, hint in hints if get_origin(hint) is Annotated]
    return {name: (kind, mark) for name, (kind, *_, mark) in marked if isinstance(mark, Rare)}


def _setting(text: str, rare: Mapping[str, tuple[Any, Rare]]) -> tuple[str, Any]:
    """A field and its value from ``KEY=VALUE``; of a list, the values have commas between them.

    Raises:
        ValueError: for an unknown key or a value that is not of its type.
    """
    key, _, value = text.partition("=")
    name = key.strip().replace("-", "_")
    if name not in rare or "=" not in text:
        keys = [name.replace("_", "-") for name in rare]
        wrong = "unknown key" if "=" in text else "write KEY=VALUE"
        raise ValueError(
            f"--set {cut(text)}: {wrong}{did_you_mean(key, keys, cutoff=0.5)} (keys: "
            f"{', '.join(keys)})"
        )
    kind, mark = rare[name]
    words = words_of(value)
    if strange := [word for word in words if mark.values and word not in mark.values]:
        near = did_you_mean(strange[0], mark.values)
        raise ValueError(
            f"--set {name}={cut(strange[0])}: unknown{near} (choose among {', '.join(mark.values)})"
        )
    if kind == tuple[str, ...]:
        return name, tuple(words)
    try:
        return name, TypeAdapter(kind).validate_strings(value.strip())
    except ValidationError as error:
        raise ValueError(describe(error, f"--set {name}: ")) from None
