# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Small checks of what people write: each error names the value, the reason and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that looks most like ``name``, whatever its distance.

    Raises:
        ValueError: if nothing is known.
    """
    # get_close_matches compares letters only; a shared prefix ("dgx" -> "dgx-a100") should win over it.
    candidates = sorted(known, key=lambda other: not other.lower().startswith(name.lower()))
    if not candidates:
        raise ValueError(f"nothing is known that could be meant by {name!r}")
    if name and candidates[0].lower().startswith(name.lower()):
        return candidates[0]
    return difflib.get_close_matches(name, candidates, n=1, cutoff=0.0)[0]


def check_keys(what: str, data: Mapping[str, Any], known: Iterable[str], required: Iterable[str] = ()) -> None:
    """Refuse unknown and missing keys.

    Args:
        what: how the error calls the mapping, for example ``"topology"``.
        data: the mapping as the user wrote it.
        known: all keys it may have.
        required: the keys it must have.

    Raises:
        ValueError: naming the key, and for an unknown one the nearest known key.
    """
    known = list(known)
    for key in data:
        if key not in known:
            raise ValueError(
                f"{what}: unknown key {key!r}; did you mean {nearest(str(key), known)!r}? (known: {known})"
            )
    missing = [key for key in required if key not in data]
    if missing:
        raise ValueError(f"{what}: missing key {missing[0]!r}; it needs {list(required)}")


def check_int(what: str, value: object, least: int = 1) -> int:
    """Return ``value`` if it is an int (and no bool) of at least ``least``.

    Raises:
        ValueError: otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what} is {value!r}; it must be a whole number of at least {least}")
    return value


def check_number(what: str, value: object, positive: bool) -> float:
    """Return ``value`` as a float if it is a finite number above zero (or, if not ``positive``, at least zero).

    Raises:
        ValueError: otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{what} is {value!r}; it must be a finite number, not negative")
    if positive and value == 0:
        raise ValueError(f"{what} is 0; it must be positive (leave the link out if it is not known)")
    return float(value)


def check_mapping(what: str, value: object) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping.

    Raises:
        ValueError: otherwise.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {value!r}; it must be a JSON object")
    return value


def check_strings(what: str, value: object) -> tuple[str, ...]:
    """Return ``value`` as a tuple if it is a list or tuple of strings.

    Raises:
        ValueError: otherwise.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{what} is {value!r}; it must be a list of strings")
    return tuple(value)
