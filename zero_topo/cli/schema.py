# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo schema``: the JSON schema of the block, for editors."""

from __future__ import annotations

from typing import Annotated

import typer

from zero_topo.cli.output import print_json
from zero_topo.config import json_schema


def schema(
    whole_file: Annotated[
        bool, typer.Option("--whole-file", help="Schema of a whole DeepSpeed config, for editors.")
    ] = False,
) -> None:
    """Print the JSON schema of the block."""
    print_json(json_schema(whole_file))
