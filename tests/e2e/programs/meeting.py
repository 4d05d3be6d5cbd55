# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What the programs of the e2e tests share; no process group is needed for any of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

PATIENCE_S = 120.0


def meet(directory: Path) -> None:
    """Wait until every rank is here: files stand for ranks.

    Raises:
        TimeoutError: if they do not all come.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / os.environ["RANK"]).touch()
    deadline = time.monotonic() + PATIENCE_S
    while len(list(directory.iterdir())) < int(os.environ["WORLD_SIZE"]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {sorted(path.name for path in directory.iterdir())} came to {directory}")
        time.sleep(0.02)
