# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Options that mean the same in several commands."""

from __future__ import annotations

from typing import Annotated

import typer

ModelName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Model name, Hugging Face config.json or GPT-NeoX YAML.",
    ),
]
Params = Annotated[
    str | None, typer.Option(metavar="N", help="Parameters of the model, such as 20e9 or 20B.")
]
Machine = Annotated[
    str,
    typer.Option(
        metavar="PRESET|FILE|JSON",
        help="Preset, .json file or JSON object that describes the machine.",
    ),
]
Nodes = Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of nodes.")]
Ranks = Annotated[
    str | None, typer.Option("--ranks", "--world-size", metavar="N", help="Number of ranks.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, in bytes and seconds.")]
