# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reads JSON written by users strictly: each mistake is one line with key, value, reason and what
to do.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields
from functools import cache, wraps
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails, PydanticCustomError

T = TypeVar("T")
SHOWN_CHARACTERS = 80
LINE_CHARACTERS = 500
MOST_BYTES = 16 << 20
MOST_DEEP = 50
MOST_VALUES = 2_000_000
MOST_DIGITS = 18
"""Of a file or a text that people name: no config, dump or record comes near."""


def cut(text: str, most: int = LINE_CHARACTERS) -> str:
    """Return the text, cut to a readable length."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def as_json(value: object) -> str:
    """The value as a user would write it in JSON, cut to a readable length."""
    return cut(json.dumps(value, default=repr), SHOWN_CHARACTERS)


def words_of(text: str) -> list[str]:
    """The words of a list with commas between them."""
    return [word.strip() for word in text.split(",") if word.strip()]


def nearest(word: object, known: Iterable[str], cutoff: float = 0.0) -> str | None:
    """The known name that looks most like a word, in any case; None if none is as similar as
    ``cutoff`` (0 to 1).
    """
    names = {name.lower(): name for name in known}
    low = str(word).lower()
    # Similarity of letters alone would not match "dgx" with "dgx-a100".
    begun = [name for name in names if low and name.startswith(low)]
    near = begun or difflib.get_close_matches(low, names if low else (), n=1, cutoff=cutoff)
    return names[near[0]] if near else None


def did_you_mean(word: object, known: Iterable[str], cutoff: float = 0.0) -> str:
    """``"; did you mean 'weights'?"``, or an empty string if no known name is as similar as
    ``cutoff``.
    """
    near = nearest(word, known, cutoff)
    return "" if near is None else f"; did you mean {near!r}?"


# -- texts -----------------------------------------------------------------------------------------


def read_text(path: Path, what: str, most: int = MOST_BYTES, errors: str = "strict") -> str:
    """The text of a file, or of a pipe.

    Raises:
        ValueError: for more than ``most`` bytes (/dev/zero has no end), or bytes that are no UTF-8.
        OSError: as ``open``.
    """
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{what}: has more than {most:,} bytes; give the file that was meant")
    try:
        return data.decode(errors=errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what}: is no UTF-8 text ({error.reason} at byte {error.start:,})"
        ) from None


def parse_json(text: str, what: str) -> Any:
    """Parse a JSON text, checked by :func:`within_limits`.

    Raises:
        ValueError: in one line that begins with ``what``, for anything else.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{what}: nested more than {MOST_DEEP} deep") from None
    except ValueError as error:
        raise ValueError(f"{what}: not valid JSON: {cut(str(error))}") from None
    return within_limits(value, what)


def packaged(package: str, name: str) -> Any:
    """The content of a JSON file that lies in a package, which may be zipped."""
    return json.loads(resources.files(package).joinpath(name).read_text(encoding="utf-8"))


def within_limits(value: Any, what: str) -> Any:
    """Return the value if it is safe to traverse: no YAML alias makes it endless, and no number
    overflows.

    Raises:
        ValueError: if it is nested deeper, has more parts, or a whole number of more digits than
            any config.
    """
    level = [value]
    depth = 0
    count = 0
    while level:
        depth = depth + 1
        count = count + len(level)
        if depth > MOST_DEEP:
            raise ValueError(f"{what}: nested more than {MOST_DEEP} deep")
        if count > MOST_VALUES:
            raise ValueError(f"{what}: has more than {MOST_VALUES:,} values")
        if any(isinstance(part, int) and abs(part) >= 10**MOST_DIGITS for part in level):
            raise ValueError(f"{what}: has a whole number of more than {MOST_DIGITS} digits")
        level = list(islice((part for whole in level for part in _parts(whole)), MOST_VALUES + 1))
    return value


def _parts(whole: Any) -> Iterable[Any]:
    if isinstance(whole, Mapping):
        return whole.values()
    return whole if isinstance(whole, list | tuple) else ()


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

    A wrong value is a ValueError of one line, as in :func:`read`, which begins with the class's
    name.
    """

    def check_keys(made: Any, block: Any) -> Any:
        return _known(block, [item.name for item in fields(made)])

    method: Any = classmethod(check_keys)
    setattr(cls, "_check_keys", model_validator(mode="before")(method))  # noqa: B010 (the class does not declare it)
    made: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    build = made.__init__

    @wraps(build)
    def one_line(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            build(self, *args, **kwargs)
        except ValidationError as error:
            names = [item.name for item in fields(made)]
            raise ValueError(describe(error, f"{cls.__name__.lower()}: ", names)) from None

    made.__init__ = one_line
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


def conform(kind: Any, what: str, text: str) -> Any:
    """Parse a JSON text with :func:`parse_json`, and check that it is of a type without any
    conversion.

    Raises:
        ValueError: in one line, as :func:`read`.
    """
    value = parse_json(text, what)
    try:
        _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(describe(error, f"{what}: ")) from None
    return value


def plain(text: str) -> str:
    """Return the text with terminal control characters written as escapes."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def to_json(value: object, exclude_defaults: bool = False) -> dict[str, Any]:
    """A JSON object from which :func:`read` builds an equal value."""
    kind: Any = type(value)
    written: dict[str, Any] = _adapter(kind).dump_python(
        value, mode="json", exclude_defaults=exclude_defaults
    )
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


def must_be(words: str) -> WrapValidator:
    """Return a validator whose error states what a value must be, in place of pydantic's
    message.
    """

    def check(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError as error:
            if any(detail["loc"] for detail in error.errors()):
                raise  # an error in a part of the value is more specific
            raise PydanticCustomError("must_be", "must be {words}", {"words": words}) from None

    return WrapValidator(check)


Count = Annotated[int, Field(strict=True, ge=1), must_be("a whole number of at least 1")]
Flag = Annotated[bool, Field(strict=True), must_be("true or false")]
Text = Annotated[str, Field(min_length=1), must_be("a string, not empty")]
Strings = Annotated[tuple[str, ...], Field(strict=False), must_be("a list of strings")]
Seconds = Annotated[
    float, Field(ge=0, le=1e12, allow_inf_nan=False), must_be("seconds, at least 0")
]
Positive = Annotated[
    float, Field(strict=True, ge=1e-30, le=1e30), must_be("a number from 1e-30 to 1e30")
]


Near = Callable[[Sequence[str]], str]


def describe(
    error: ValidationError, what: str, names: Sequence[str] = (), near: Near = lambda _: "remove it"
) -> str:
    """Return what is wrong, as ``<what><key>.<key>: <mistake>``; several mistakes are joined by
    ``"; also "``.

    Args:
        error: pydantic's error.
        what: the begin of each line, such as ``"topology: "``, or the key of a block with a dot.
        names: names of positional arguments.
        near: suggests what to do about an unknown key of a model from another package; gets the
            keys that lead to it.
    """
    return "; also ".join(
        _describe_one(detail, what, names, near) for detail in error.errors(include_url=False)
    )


NO_OBJECT = re.compile("(model|model_attributes|dataclass|dict|mapping)_type|union_tag_not_found")
"""Pydantic's types of errors where a JSON object was expected."""


def _describe_one(detail: ErrorDetails, what: str, names: Sequence[str], near: Near) -> str:
    first = detail["loc"][:1]
    context = detail.get("ctx", {})
    value = detail["input"]
    location = (
        *(names[part] if names and isinstance(part, int) else part for part in first),
        *detail["loc"][1:],
    )
    # The mode after the block's ``sync``, and pydantic's addition to a mapping's wrong key, are no
    # keys of the JSON.
    keys = [str(key) for i, key in enumerate(location) if i != 1 or location[0] != "sync"]
    keys = keys[:-2] if keys[-1:] == ["[key]"] else keys
    place, above = (f"{what}{'.'.join(path)}".rstrip(".: ") for path in (keys, keys[:-1]))
    shown = as_json(value)
    match detail["type"]:
        case "unknown_key":
            return f"{f'{place}.' if keys else what}{context['key']}: {context['hint']}"
        case "missing":
            return f"{above}: missing key {keys[-1]!r}"
        case "extra_forbidden":
            return f"{place}: unknown key; {near(keys)}"
        case "value_error" | "assertion_error":
            return f"{place}: {context['error']}" if keys else str(context["error"])
        case "literal_error":
            return (
                f"{place}: {shown} is not one of "
                f"{context['expected']}{_near(value, context['expected'])}"
            )
        case "union_tag_invalid":
            tag = context["tag"]
            modes = context["expected_tags"]
            return (
                f"{place}.mode: {as_json(tag)} is not a mode of sync{_near(tag, modes)} (modes: "
                f"{modes})"
            )
        case kind if NO_OBJECT.fullmatch(kind):
            way_out = "" if value is not None else f"; {_instead_of_null(place)}"
            return f"{place}: must be a JSON object, got {shown}{way_out}"
        case _:
            message = detail["msg"].removeprefix("Input ")
            return f"{place}: {message[:1].lower()}{message[1:]}, got {shown}"


def _instead_of_null(place: str) -> str:
    if not place.endswith(".quantize"):
        return "leave it out, or write {}, for its defaults"
    nothing = dict.fromkeys(("weights", "secondary", "gradients", "resident"))
    return f"leave it out for the scheme's own, or quantize nothing with {as_json(nothing)}"


def _near(word: object, expected: str) -> str:
    return did_you_mean(word, re.findall(r"'([^']*)'", expected), cutoff=0.5)


def offering(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return the names that complete an option's value in a shell; in a list, they complete the
    last word.

    Args:
        names: all that there are.
    """

    def offered(incomplete: str) -> list[str]:
        before, comma, word = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(word)]

    return offered
