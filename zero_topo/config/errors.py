# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""One readable line for each mistake in the ``zero_topo`` block.

Pydantic says what is wrong over several lines and in terms of its own types. Users edit JSON, so every error is turned
into ``zero_topo.<path>: <what>; did you mean '<nearest>'? (<allowed>)`` with values written as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from zero_topo.strict import as_json, did_you_mean

ROOT = "zero_topo"


def describe(error: ValidationError, root: str = ROOT) -> str:
    """A validation error as one line; several mistakes are joined by ``"; also "``."""
    return "; also ".join(_describe_one(detail, root) for detail in error.errors(include_url=False))


def _describe_one(detail: ErrorDetails, root: str) -> str:
    path = ".".join([root, *_keys(detail["loc"])])
    return _DESCRIBERS.get(detail["type"], _other)(path, detail)


def _keys(location: tuple[int | str, ...]) -> list[str]:
    """The JSON keys of a pydantic location: the tag that follows ``sync`` is not one."""
    return [str(key) for i, key in enumerate(location) if i == 0 or location[i - 1] != "sync"]


def _unknown_key(path: str, detail: ErrorDetails) -> str:
    return f"{path}.{detail['ctx']['key']}: {detail['ctx']['hint']}"


def _custom(path: str, detail: ErrorDetails) -> str:
    return f"{path}: {detail['msg']}"


def _not_an_object(path: str, detail: ErrorDetails) -> str:
    return f"{path}: must be a JSON object, got {as_json(detail['input'])}"


def _not_in_list(path: str, detail: ErrorDetails) -> str:
    expected = str(detail["ctx"]["expected"])
    hint = did_you_mean(detail["input"], re.findall(r"'([^']*)'", expected), cutoff=0.5)
    return f"{path}: {as_json(detail['input'])} is not one of {expected}{hint}"


def _not_a_mode(path: str, detail: ErrorDetails) -> str:
    expected = str(detail["ctx"]["expected_tags"])
    hint = did_you_mean(detail["ctx"]["tag"], re.findall(r"'([^']*)'", expected), cutoff=0.5)
    return f"{path}.mode: {as_json(detail['ctx']['tag'])} is not a mode of sync{hint} (modes: {expected})"


def _raised_here(path: str, detail: ErrorDetails) -> str:
    return f"{path}: {detail['ctx']['error']}"


def _other(path: str, detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Input ")
    return f"{path}: {message[:1].lower()}{message[1:]}, got {as_json(detail['input'])}"


_DESCRIBERS: Mapping[str, Callable[[str, ErrorDetails], str]] = MappingProxyType(
    {
        "unknown_key": _unknown_key,
        "bad_setting": _custom,
        "literal_error": _not_in_list,
        "union_tag_invalid": _not_a_mode,
        "value_error": _raised_here,
        "union_tag_not_found": _not_an_object,
        "model_type": _not_an_object,
        "model_attributes_type": _not_an_object,
        "dict_type": _not_an_object,
    }
)
