# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo schema``: the JSON schema of the block, for editors, and of what commands print."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from zero_topo.cli.app import COMMANDS
from zero_topo.cli.output import print_json
from zero_topo.config import json_schema


def schema(
    whole_file: Annotated[
        bool, typer.Option("--whole-file", help="Schema of a whole DeepSpeed config, for editors.")
    ] = False,
    of: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Schema of what a command prints with --json."),
    ] = None,
) -> None:
    """Print the JSON schema of the block, or of a --json output."""
    print_json(
        json_schema(whole_file) if of is None else document(of).json_schema(mode="serialization")
    )


def documents() -> dict[str, Any]:
    """Command -> the type of what it prints with ``--json``: ``DOCUMENT`` of its module."""
    modules = {name: importlib.import_module(f"{__package__}.{name}") for name in COMMANDS}
    return {
        name: module.DOCUMENT for name, module in modules.items() if hasattr(module, "DOCUMENT")
    }


def document(command: str) -> TypeAdapter[Any]:
    """What a command prints with ``--json``: reads it, and gives its schema.

    Raises:
        ValueError: if the command prints none.
    """
    known = documents()
    if command not in known:
        raise ValueError(f"--of {command}: it prints no JSON; choose one of {', '.join(known)}")
    return TypeAdapter(known[command])
