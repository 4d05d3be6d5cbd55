# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo completion``: what a shell reads to complete commands, options and their values."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.completion import get_completion_script

from zero_topo.cli.app import COMPLETING
from zero_topo.cli.options import offering

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "zero-topo"


def completion(
    shell: Annotated[
        str, typer.Argument(autocompletion=offering(lambda: SHELLS), metavar="|".join(SHELLS), help="Your shell.")
    ],
) -> None:
    """Print shell completion. Use: eval "$(zero-topo completion bash)"; in fish: ... | source."""
    if shell not in SHELLS:
        raise ValueError(f"completion {shell}: there is none; choose one of {', '.join(SHELLS)}")
    print(get_completion_script(prog_name=PROGRAM, complete_var=COMPLETING, shell=shell))
