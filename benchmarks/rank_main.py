# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The parent of a benchmark's ranks: imports their program, forks them, and ends all when one
fails.

Started by ``ranks.py`` as ``python -m benchmarks.rank_main WORLD.json CONTROL_FD LIFELINE_FD``; see
Note [One import, many ranks] there.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.control import Control

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
Program = Callable[[dict[str, Any], Control], None]


def main(arguments: list[str]) -> int:
    """Run the ranks to their end; exit status 0 if all ended well."""
    file = Path(arguments[0])
    control_fd = int(arguments[1])
    lifeline = int(arguments[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    world = json.loads(file.read_text(encoding="utf-8"))
    program = _load(world["program"])
    gc.collect()
    # What is imported stays: ranks neither look through it for garbage nor copy its pages
    gc.freeze()
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    assert threads == 1, (
        f"{threads} threads before the fork: ranks would inherit their locks and not the threads"
    )
    children: dict[int, int] = {}
    parent = os.getpid()
    for rank, place in enumerate(world["places"]):
        if _hung_up(lifeline, 0):
            return _end(children)
        try:
            pid = os.fork()
        except OSError as error:
            print(
                f"rank {rank} of {len(world['places'])} cannot be started ({error}): take fewer, "
                "or raise the limit"
            )
            return _end(children)
        if pid == 0:
            die_with(parent)
            os.close(lifeline)
            _become(rank, place, file.parent)
            _run(program, world["settings"], _control(control_fd, rank))
        children[pid] = rank
    os.close(control_fd)  # rank 0 alone holds it, so that its end is seen
    return _watch(children, lifeline)


def _load(name: str) -> Program:
    """The function, of a module that may have a ``prepare()`` to be called once, before the
    fork.
    """
    module_name, _, function = name.partition(":")
    module = importlib.import_module(module_name)
    getattr(module, "prepare", lambda: None)()
    program: Program = getattr(module, function)
    return program


# -- in a rank -------------------------------------------------------------------------------------


def die_with(parent: int) -> None:
    """End this process when its parent is gone, even if that was killed and could tell nobody."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def _become(rank: int, place: Mapping[str, Any], folder: Path) -> None:
    """Become a rank: its log, its network, its environment."""
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if place["space"] is not None:
        enter_network(place["space"])
    os.environ.update(place["env"])


def enter_network(space: str) -> None:
    """Move this process into a network namespace, given by its file.

    Raises:
        OSError: if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(space, os.O_RDONLY)
    try:
        if libc.setns(descriptor, CLONE_NEWNET):  # os.setns is new in Python 3.12
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), space)
    finally:
        os.close(descriptor)


def _control(descriptor: int, rank: int) -> Control:
    if rank == 0:
        return Control(Connection(descriptor))
    os.close(descriptor)
    return Control(None)


def _run(program: Program, settings: dict[str, Any], control: Control) -> None:
    """The rest of a rank's life."""
    status = 1
    try:
        program(settings, control)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# -- in the parent ---------------------------------------------------------------------------------


def _watch(children: dict[int, int], lifeline: int) -> int:
    """Wait for all ranks (pid -> rank). A failure of one, or the end of whoever started us, ends
    the others.
    """
    while children:
        if _hung_up(lifeline, 0.05):
            return _end(children)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            continue
        rank = children.pop(pid)
        if status:
            code = os.waitstatus_to_exitcode(status)
            print(
                "failed: rank "
                f"{rank}{f' killed by {signal.Signals(-code).name}' if code < 0 else ''}",
                flush=True,
            )
            return _end(children)
    return 0


def _hung_up(lifeline: int, seconds: float) -> bool:
    """Whether whoever started us is gone, after waiting for it so long."""
    return bool(select.select([lifeline], [], [], seconds)[0])


def _end(children: Mapping[int, int]) -> int:
    """End ranks, with a trace of where each was in its log."""
    for number in (signal.SIGABRT, signal.SIGKILL):
        for pid in children:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                os.kill(pid, number)
        time.sleep(0.5 if number == signal.SIGABRT and children else 0)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
