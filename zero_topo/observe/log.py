# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The log lines at the start of a run, and the one-line error of a rejected config.

DeepSpeed's logger and Python's default drop lines below a warning, so zero_topo has its own logger.
Every module logs to a child of ``zero_topo``; users can set its level and handlers as for any
logger.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType

LOGGER = logging.getLogger("zero_topo")
FORMAT = "[%(asctime)s] [%(levelname)s] %(message)s"
LIBRARIES = (
    "torch",
    "deepspeed",
    "accelerate",
    "transformers",
    "zero_topo",
    "contextlib",
    "typing_extensions",
)
REFUSED = "zero_topo_refused"
OTHERS_WAIT_S = 10.0
"""Rank 0 prints a refusal, and its launcher then ends the other ranks. A rank that still runs after
this many seconds was refused alone, and prints its own.
"""


def show_log(rank: int) -> None:
    """Send rank 0's choices and every rank's warnings to stderr, unless the user has configured
    logging.

    Args:
        rank: the rank of this process.
    """
    if rank == 0 and LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not LOGGER.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        LOGGER.addHandler(handler)


def log_notes(rank: int, notes: Iterable[str]) -> None:
    """Log one line on rank 0 for each note.

    Args:
        rank: the rank of this process.
        notes: choices made for the user.
    """
    for note in notes if rank == 0 else ():
        LOGGER.info("zero_topo: %s", note)


@contextmanager
def refusals() -> Iterator[None]:
    """Mark a ValueError as a user's mistake: if it is not caught, :func:`one_line` prints only its
    message.
    """
    try:
        yield
    except ValueError as error:
        setattr(error, REFUSED, True)
        raise


Show = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def one_line(show: Show) -> Show:
    """Wrap ``sys.excepthook`` to print an error marked ``REFUSED`` as one line, without a
    traceback.

    Args:
        show: the old hook, which prints all other errors with their traceback.
    """

    @wraps(show)
    def wrapper(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not getattr(error, REFUSED, False):
            show(kind, error, trace)
            return
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(OTHERS_WAIT_S)
        lines = [users_line(frame, lineno) for frame, lineno in walk_tb(trace)]
        where = next((f" ({line})" for line in reversed(lines) if line), "")
        print(f"zero_topo, rank {rank}: {error}{where}", file=sys.stderr, flush=True)

    return wrapper


def users_line(frame: FrameType, lineno: int) -> str:
    """Return ``file:line`` of a frame, or "" for a frame of a library."""
    name = str(frame.f_globals.get("__name__", ""))
    return (
        "" if name.split(".")[0] in LIBRARIES else f"{Path(frame.f_code.co_filename).name}:{lineno}"
    )
