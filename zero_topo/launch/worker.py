# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``srun python -m zero_topo.launch.worker -- python train.py``: give this rank its variables and
become the command.

No process stays in between: signals and exit statuses go straight from and to the launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from zero_topo.launch.env import rank_environment

WRONG_INPUT = 2
NOT_FOUND = 127  # the shell's number


def main(words: Sequence[str]) -> int:
    """Run the command after ``--`` in place of this process; returns a status only if that is not
    possible.
    """
    command = list(words[1:] if words[:1] == ["--"] else words)
    if not command or command[0].startswith("-"):
        return _complain(
            "no command; usage: python -m zero_topo.launch.worker -- python train.py ...",
            WRONG_INPUT,
        )
    try:
        added = rank_environment(os.environ)
    except ValueError as error:
        return _complain(str(error), WRONG_INPUT)
    if added["LOCAL_RANK"] == "0":
        from zero_topo.doctor.files import warn_of_shortage

        warn_of_shortage()
    try:
        os.execvpe(command[0], command, {**os.environ, **added})
    except OSError as error:
        return _complain(
            f"{command[0]} cannot be run ({error.strerror}) on {os.uname().nodename}", NOT_FOUND
        )


def _complain(message: str, status: int) -> int:
    print(f"zero_topo.launch.worker: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
