# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The lines a run begins with, and the one that a refused run ends with.

DeepSpeed's logger and Python's drop what is below a warning, so zero_topo has its own.

Every module logs to a child of ``zero_topo``, whose level and handlers a user may set up as those of any logger.
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
from types import FrameType, TracebackType

LOGGER = logging.getLogger("zero_topo")
FORMAT = "[%(asctime)s] [%(levelname)s] %(message)s"
LIBRARIES = ("torch", "deepspeed", "accelerate", "transformers", "zero_topo", "contextlib", "typing_extensions")
REFUSED = "zero_topo_refused"
OTHERS_WAIT_S = 10.0
"""Rank 0 prints a refusal, and its launcher then ends the other ranks. A rank that still runs after this many seconds
was refused alone, and prints its own."""


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


@contextmanager
def refusals() -> Iterator[None]:
    """Mark a ValueError as a user's mistake: if nobody catches it, :func:`one_line` prints its sentence alone."""
    try:
        yield
    except ValueError as error:
        setattr(error, REFUSED, True)
        raise


Show = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def one_line(show: Show) -> Show:
    """``sys.excepthook``, which prints a marked error as one line, once for all ranks, and others with their traceback.

    Args:
        show: prints the others.
    """

    @wraps(show)
    def wrapper(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not getattr(error, REFUSED, False):
            show(kind, error, trace)
            return
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(OTHERS_WAIT_S)
        lines = []
        while trace is not None:
            lines.append(users_line(trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
        where = next((f" ({line})" for line in reversed(lines) if line), "")
        print(f"zero_topo, rank {rank}: {error}{where}", file=sys.stderr, flush=True)

    return wrapper


def users_line(frame: FrameType, lineno: int) -> str:
    """File and line of a frame, or nothing for one of a library."""
    name = str(frame.f_globals.get("__name__", ""))
    return "" if name.split(".")[0] in LIBRARIES else f"{Path(frame.f_code.co_filename).name}:{lineno}"
