# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo schema``: the JSON schema of the block, for editors, and of what commands print."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from zero_topo.cli.app import COMMANDS, MODULES
from zero_topo.cli.options import Force
from zero_topo.config import json_schema
from zero_topo.observe.files import check_files


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write to; default: standard output.")
    ] = None,
    whole_file: Annotated[
        bool, typer.Option("--whole-file", help="Schema of a whole DeepSpeed config, for editors.")
    ] = False,
    of: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Schema of what a command prints with --json.")
    ] = None,
    force: Force = False,
) -> None:
    """Print the JSON schema of the block, or of a --json output."""
    check_files([(output, "", '"$schema": "https://json-schema.org/')], force)
    content = json_schema(whole_file) if of is None else document(of).json_schema(mode="serialization")
    text = json.dumps(content, indent=2) + "\n"
    if output is None:
        print(text, end="")
        return
    output.write_text(text, encoding="utf-8")
    print(f"wrote {output}")


def documents() -> dict[str, Any]:
    """Command -> the type of what it prints with ``--json``: ``DOCUMENT`` of its module."""
    modules = {name: importlib.import_module(f"{__package__}.{MODULES.get(name, name)}") for name in COMMANDS}
    return {name: module.DOCUMENT for name, module in modules.items() if hasattr(module, "DOCUMENT")}


def document(command: str) -> TypeAdapter[Any]:
    """What a command prints with ``--json``: reads it, and gives its schema.

    Raises:
        ValueError: if the command prints none.
    """
    known = documents()
    if command not in known:
        raise ValueError(f"--of {command}: it prints no JSON; choose one of {', '.join(known)}")
    return TypeAdapter(known[command])
