# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Prints notes and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import to_jsonable_python


def print_notes(notes: Iterable[str]) -> None:
    """Print each note on a line of its own."""
    for note in notes:
        print(f"- {note}")


def print_json(content: Mapping[str, Any]) -> None:
    """Print a JSON object; dataclasses in it are objects too.

    Raises:
        PydanticSerializationError: for what JSON has no form of.
    """
    print(json.dumps(to_jsonable_python(content), indent=2))
