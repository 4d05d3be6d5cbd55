# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Formats each mistake in the ``zero_topo`` block as one readable line.

Pydantic reports errors over several lines and in terms of its own types. Users edit JSON, so every error is converted
to ``zero_topo.<path>: <what>; did you mean '<nearest>'? (<allowed>)`` with values written as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from zero_topo.strict import as_json, did_you_mean

ROOT = "zero_topo"


def describe(error: ValidationError, root: str = ROOT, near: Callable[[str], str] = str) -> str:
    """Format a validation error as one line; several mistakes are joined by ``"; also "``.

    Args:
        error: pydantic's error.
        root: the key whose block was wrong.
        near: returns a suggestion for an unknown key of a model from another package.
    """
    return "; also ".join(_describe_one(detail, root, near) for detail in error.errors(include_url=False))


def _describe_one(detail: ErrorDetails, root: str, near: Callable[[str], str]) -> str:
    # The tag that follows ``sync`` in a location is no JSON key.
    keys = [str(key) for i, key in enumerate(detail["loc"]) if i == 0 or detail["loc"][i - 1] != "sync"]
    path, context, shown = ".".join([root, *keys]), detail.get("ctx", {}), as_json(detail["input"])
    match detail["type"]:
        case "unknown_key":
            return f"{path}.{context['key']}: {context['hint']}"
        case "extra_forbidden":
            return f"{path}: unknown key; {near(keys[-1])}"
        case "bad_setting":
            return f"{path}: {detail['msg']}"
        case "value_error":
            return f"{path}: {context['error']}"
        case "literal_error":
            return f"{path}: {shown} is not one of {context['expected']}{_near(detail['input'], context['expected'])}"
        case "union_tag_invalid":
            tag, modes = context["tag"], context["expected_tags"]
            return f"{path}.mode: {as_json(tag)} is not a mode of sync{_near(tag, modes)} (modes: {modes})"
        case "union_tag_not_found" | "model_type" | "model_attributes_type" | "dict_type":
            way_out = "" if detail["input"] is not None else f"; {_instead_of_null(path)}"
            return f"{path}: must be a JSON object, got {shown}{way_out}"
        case _:
            message = detail["msg"].removeprefix("Input ")
            return f"{path}: {message[:1].lower()}{message[1:]}, got {shown}"


def _instead_of_null(path: str) -> str:
    if not path.endswith(".quantize"):
        return "leave it out, or write {}, for its defaults"
    nothing = dict.fromkeys(("weights", "secondary", "gradients", "resident"))
    return f"leave it out for the scheme's own, or quantize nothing with {as_json(nothing)}"


def _near(word: object, expected: str) -> str:
    return did_you_mean(word, re.findall(r"'([^']*)'", expected), cutoff=0.5)
