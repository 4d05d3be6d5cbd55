# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The ``zero-topo`` command. Importing it, and asking it for plans, never imports torch."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``zero-topo`` command.

    Args:
        arguments: command line without the program's name; None takes ``sys.argv``.

    Returns:
        Exit status: 0, or 2 after one line on stderr for wrong input.
    """
    from zero_topo.cli.app import run

    return run(arguments)
