# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The parent of forked ranks: imports what takes seconds once, forks, and ends all ranks when one fails.

Started by `tests/launching.py` as `python -m tests.forking LOG_DIR RANKS PORT MODULES file|module PROGRAM WORD...`.
Ranks get the variables, the logs and the end that DeepSpeed's launcher would give them.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import sys
import time
from pathlib import Path


def main(words: list[str]) -> int:
    """Run the ranks to their end: 0, or the exit status of the first rank that failed."""
    log_dir, ranks, port, modules, kind, *command = words
    for name in modules.split(","):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported stays: ranks neither look through it for garbage nor copy its pages
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads before the fork: ranks would inherit their locks and not the threads"
    sys.stdout.flush()
    children = []
    for rank in range(int(ranks)):
        pid = os.fork()
        if pid == 0:
            _become(rank, int(ranks), port, Path(log_dir))
            _run(kind, command)
        children.append(pid)
    return _wait(children)


def _become(rank: int, ranks: int, port: str, log_dir: Path) -> None:
    """The rank's log and environment."""
    log = os.open(log_dir / f"forked_rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    own = {"RANK": rank, "LOCAL_RANK": rank, "CROSS_RANK": 0}
    shared = {
        "WORLD_SIZE": ranks,
        "LOCAL_SIZE": ranks,
        "CROSS_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in (own | shared).items()})


def _run(kind: str, command: list[str]) -> None:
    """The program as `__main__`, and the end of the rank."""
    status: object = 1
    sys.argv = list(command)
    try:
        if kind == "module":
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # as the interpreter does
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))


def _wait(children: list[int]) -> int:
    """Wait for all; when one fails, the others get two seconds."""
    left = set(children)
    while left:
        pid, status = os.wait()
        left.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code:
            _end(left)
            return code if code > 0 else 128 - code
    return 0


def _end(left: set[int]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            os.kill(pid, number)  # not waited for yet, so the number is still its own
        time.sleep(2.0 if left and number == signal.SIGTERM else 0.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
