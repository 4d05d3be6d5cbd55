# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reads JSON written by users strictly: each mistake is one line with key, value, reason and what
to do.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails, PydanticCustomError

T = TypeVar("T")
SHOWN_CHARACTERS = 80
LINE_CHARACTERS = 500


def cut(text: str, most: int = LINE_CHARACTERS) -> str:
    """Return the text, cut to a readable length."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def as_json(value: object) -> str:
    """The value as a user would write it in JSON, cut to a readable length."""
    return cut(json.dumps(value, default=repr), SHOWN_CHARACTERS)


def words_of(text: str) -> list[str]:
    """The words of a list with commas between them."""
    return [word.strip() for word in text.split(",") if word.strip()]


def did_you_mean(word: object, known: Iterable[str], cutoff: float = 0.0) -> str:
    """``"; did you mean 'weights'?"`` of the known name that looks most like a word, in any case;
    an empty string if none is as similar as ``cutoff`` (0 to 1).
    """
    names = {name.lower(): name for name in known}
    low = str(word).lower()
    # Similarity of letters alone would not match "dgx" with "dgx-a100".
    begun = [name for name in names if low and name.startswith(low)]
    near = begun or difflib.get_close_matches(low, names if low else (), n=1, cutoff=cutoff)
    return f"; did you mean {names[near[0]]!r}?" if near else ""


# -- texts -----------------------------------------------------------------------------------------


def read_text(path: Path, what: str, errors: str = "strict") -> str:
    """The text of a file, or of a pipe.

    Raises:
        ValueError: for bytes that are no UTF-8.
        OSError: as ``open``.
    """
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what}: is no UTF-8 text ({error.reason} at byte {error.start:,})"
        ) from None


def parse_json(text: str, what: str) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: in one line that begins with ``what``, for anything else.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what}: not valid JSON: {cut(str(error))}") from None


def packaged(package: str, name: str) -> Any:
    """The content of a JSON file that lies in a package, which may be zipped."""
    return json.loads(resources.files(package).joinpath(name).read_text(encoding="utf-8"))


# -- models ----------------------------------------------------------------------------------------


class StrictModel(BaseModel):
    """A frozen block of settings that refuses unknown keys and names the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, block: Any) -> Any:
        return _known(block, list(cls.model_fields))


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def strict_dataclass(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are checked by their types, when built and when
    read from JSON.
    """

    def check_keys(made: Any, block: Any) -> Any:
        return _known(block, [item.name for item in fields(made)])

    method: Any = classmethod(check_keys)
    setattr(cls, "_check_keys", model_validator(mode="before")(method))  # noqa: B010 (the class does not declare it)
    made: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    checked: type[T] = made
    return checked


def read(kind: Any, what: str, data: object) -> Any:
    """Convert parsed JSON to a value of a type, mostly of a :func:`strict_dataclass`.

    Args:
        kind: the type.
        what: how errors call the data, for example ``"topology"``.
        data: the result of ``json.loads``.

    Raises:
        ValueError: in one line, for the first key that is unknown (with the nearest known one) or
            missing, or value that does not fit.
    """
    try:
        return _adapter(kind).validate_python(data)
    except ValidationError as error:
        raise ValueError(describe(error, f"{what}: ")) from None


def to_json(value: object) -> dict[str, Any]:
    """A JSON object from which :func:`read` builds an equal value, without fields at their
    default.
    """
    kind: Any = type(value)
    written: dict[str, Any] = _adapter(kind).dump_python(value, mode="json", exclude_defaults=True)
    return written


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _known(block: Any, known: list[str]) -> Any:
    unknown = [str(key) for key in block if key not in known] if isinstance(block, Mapping) else []
    if unknown:
        hint = (
            f"unknown key{did_you_mean(unknown[0], known, cutoff=0.5)} (allowed: "
            f"{', '.join(known)})"
        )
        raise PydanticCustomError("unknown_key", "{key}: {hint}", {"key": unknown[0], "hint": hint})
    return block


# -- values ----------------------------------------------------------------------------------------


Count = Annotated[int, Field(strict=True, ge=1)]
Text = Annotated[str, Field(min_length=1)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


def describe(error: ValidationError, what: str) -> str:
    """Return what is wrong, as ``<what><key>.<key>: <mistake>``; several mistakes are joined by
    ``"; also "``.

    Args:
        error: pydantic's error.
        what: the begin of each line, such as ``"topology: "``, or the key of a block with a dot.
    """
    details = error.errors(include_url=False)
    return "; also ".join(_describe_one(detail, what) for detail in details)


NO_OBJECT = re.compile("(model|model_attributes|dataclass|dict|mapping)_type|union_tag_not_found")
"""Pydantic's types of errors where a JSON object was expected."""


def _describe_one(detail: ErrorDetails, what: str) -> str:
    context = detail.get("ctx", {})
    keys = _keys(detail["loc"])
    place = f"{what}{'.'.join(keys)}".rstrip(".: ")
    shown = as_json(detail["input"])
    match detail["type"]:
        case "unknown_key":
            return f"{f'{place}.' if keys else what}{context['key']}: {context['hint']}"
        case "missing":
            above = f"{what}{'.'.join(keys[:-1])}".rstrip(".: ")
            return f"{above}: missing key {keys[-1]!r}"
        case "extra_forbidden":
            return f"{place}: unknown key; remove it"
        case "value_error" | "assertion_error":
            return f"{place}: {context['error']}" if keys else str(context["error"])
        case "literal_error":
            expected = context["expected"]
            near = _near(detail["input"], expected)
            return f"{place}: {shown} is not one of {expected}{near}"
        case "union_tag_invalid":
            modes = context["expected_tags"]
            near = _near(context["tag"], modes)
            return f"{place}.mode: {as_json(context['tag'])} is not one of {modes}{near}"
        case kind if NO_OBJECT.fullmatch(kind):
            return f"{place}: must be a JSON object, got {shown}"
        case _:
            message = detail["msg"].removeprefix("Input ").replace("a valid tuple", "a list")
            return f"{place}: {message[:1].lower()}{message[1:]}, got {shown}"


def _keys(location: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the JSON that lead to an error.

    Pydantic adds the mode after the block's ``sync``, and a word to the wrong key of a mapping.
    """
    keys = [str(key) for key in location]
    if keys[:1] == ["sync"]:
        del keys[1:2]
    return keys[:-2] if keys[-1:] == ["[key]"] else keys


def _near(word: object, expected: str) -> str:
    return did_you_mean(word, re.findall(r"'([^']*)'", expected), cutoff=0.5)
