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


def main(words: Sequence[str]) -> str:
    """Run the command after ``--`` in place of this process; returns an error only if that is not
    possible.
    """
    command = list(words[1:] if words[:1] == ["--"] else words)
    if not command:
        return "no command; usage: python -m zero_topo.launch.worker -- python train.py ..."
    try:
        os.execvpe(command[0], command, {**os.environ, **rank_environment(os.environ)})
    except (ValueError, OSError) as error:
        return f"{command[0]} cannot be run on {os.uname().nodename}: {error}"


if __name__ == "__main__":
    sys.exit(f"zero_topo.launch.worker: {main(sys.argv[1:])}")
