# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo schema``: the JSON schema of the block, for editors, and of what commands print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

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
    if of is not None:
        from zero_topo.cli.documents import document

        content = document(of).json_schema(mode="serialization")
    else:
        content = json_schema(whole_file)
    text = json.dumps(content, indent=2) + "\n"
    if output is None:
        print(text, end="")
        return
    output.write_text(text, encoding="utf-8")
    print(f"wrote {output}")
