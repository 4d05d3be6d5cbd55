# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The lines a run begins with: DeepSpeed's logger and Python's drop what is below a warning, so zero_topo has its own.

Every module logs to a child of ``zero_topo``, whose level and handlers a user may set up as those of any logger.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

LOGGER = logging.getLogger("zero_topo")
FORMAT = "[%(asctime)s] [%(levelname)s] %(message)s"


def show_log(rank: int) -> None:
    """Let what rank 0 chose, and every rank's warnings, reach stderr; what the user has set up stays as it is.

    Args:
        rank: of this process.
    """
    if rank == 0 and LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        LOGGER.addHandler(handler)


def tell(rank: int, notes: Iterable[str]) -> None:
    """A line of rank 0 for each note.

    Args:
        rank: of this process.
        notes: choices made for the user.
    """
    for note in notes if rank == 0 else ():
        LOGGER.info("zero_topo: %s", note)
