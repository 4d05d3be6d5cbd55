# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo schema``: the JSON schema, so that editors complete and check the block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from zero_topo.cli.files import Force, check_files
from zero_topo.config import json_schema


def schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write instead of stdout.")] = None,
    whole_file: Annotated[
        bool, typer.Option("--whole-file", help="Schema of a whole DeepSpeed config, for an editor's file association.")
    ] = False,
    force: Force = False,
) -> None:
    """Print the JSON schema of the "zero_topo" block."""
    check_files([(output, "", '"$schema": ')], force)
    text = json.dumps(json_schema(whole_file), indent=2) + "\n"
    if output is None:
        print(text, end="")
        return
    output.write_text(text, encoding="utf-8")
    print(f"wrote {output}")
