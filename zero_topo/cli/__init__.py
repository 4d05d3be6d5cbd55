# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The ``zero-topo`` command. Importing it, and asking it for plans, never imports torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

EXTRAS: Mapping[str, str] = {"typer": "cli", "matplotlib": "plot"}
"""Package that a command may need -> the extra of zero_topo that installs it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``zero-topo`` command.

    Args:
        arguments: command line without the program's name; None takes ``sys.argv``.

    Returns:
        Exit status: 0, or 2 after one line on stderr for wrong input.
    """
    try:
        from zero_topo.cli.app import run

        return run(arguments)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        print(
            f"zero-topo: {missing} is not installed: pip install 'zero_topo[{EXTRAS[missing]}]'",
            file=sys.stderr,
        )
        return 2
