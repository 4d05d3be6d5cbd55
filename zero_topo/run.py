# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m zero_topo.run script.py [arguments]``: run a training script that may not be edited,
hook installed.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main(argv: list[str]) -> None:
    """Run ``argv[0]`` as ``__main__`` with the remaining arguments.

    Raises:
        SystemExit: with code 2 if no script is named or it does not exist.
    """
    if not argv or not Path(argv[0]).is_file():
        named = argv[0] if argv else "nothing"
        print(
            f"zero_topo.run: {named} is not a script; usage: python -m zero_topo.run SCRIPT.py ...",
            file=sys.stderr,
        )
        raise SystemExit(2)
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
