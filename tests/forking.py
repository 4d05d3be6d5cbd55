# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Launches whose ranks are forked: one server imports torch and DeepSpeed, for all launches of this
process.

The server is ``multiprocessing``'s. It forks a leader for each launch, and the leader forks the
ranks and ends all of them when one fails. Ranks get the variables, the logs and the end that
DeepSpeed's launcher would give them.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path

# A rank would take five CPU seconds for these; DeepSpeed imports the third when it starts its first
# engine.
multiprocessing.set_forkserver_preload(
    ["pytest", "tests.without_inference", "torch._inductor.compile_fx", "zero_topo"]
)


class Forked(ForkServerProcess):
    """A launch of forked ranks, with the methods of ``subprocess.Popen`` that a launch needs.

    Args:
        command: a program and its arguments.
        module: the program is a module name.
        ranks: number of ranks.
        port: of the rendezvous.
        log_dir: for the ranks' logs and ``launcher.log``.
        env: all variables of every rank.
    """

    def __init__(
        self,
        command: Sequence[str],
        module: bool,
        ranks: int,
        port: int,
        log_dir: Path,
        env: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._command, self._module, self._ranks, self._port = list(command), module, ranks, port
        self._log_dir, self._env = log_dir, dict(env)
        self.start()

    def poll(self) -> int | None:
        """The exit code; None while the launch runs."""
        return self.exitcode

    def wait(self) -> None:
        """Wait for the end."""
        self.join()

    def run(self) -> None:
        """In the leader: run the ranks to their end, and exit with 0 or the status of the first
        rank that failed.
        """
        threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
        assert threads == 1, (
            f"{threads} threads before the fork: ranks would inherit their locks and not the "
            "threads"
        )
        os.setsid()
        os.chdir(Path(__file__).resolve().parent.parent)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ.clear()
        os.environ.update(self._env)
        _write_to(self._log_dir / "launcher.log")
        faulthandler.enable()
        # What is imported stays: ranks neither look through it for garbage nor copy its pages
        gc.freeze()
        children = []
        for rank in range(self._ranks):
            pid = os.fork()
            if pid == 0:
                self._become(rank)
            children.append(pid)
        sys.exit(_wait(children))

    def _become(self, rank: int) -> None:
        """The rank's log and environment; the program as `__main__`, and the end of the rank."""
        _write_to(self._log_dir / f"forked_rank{rank}.log")
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # else this process's warns
        own = {"RANK": rank, "LOCAL_RANK": rank, "CROSS_RANK": 0, "CROSS_SIZE": 1}
        own |= {"WORLD_SIZE": self._ranks, "LOCAL_SIZE": self._ranks, "MASTER_PORT": self._port}
        os.environ.update(
            {name: str(value) for name, value in own.items()}, MASTER_ADDR="127.0.0.1"
        )
        status: object = 1
        sys.argv = self._command
        try:
            if self._module:
                runpy.run_module(self._command[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self._command[0], run_name="__main__")
            status = 0
        except SystemExit as ended:
            status = ended.code
        except BaseException:
            sys.excepthook(*sys.exc_info())  # as the interpreter does
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status if isinstance(status, int) else int(status is not None))


def _write_to(path: Path) -> None:
    """Let stdout and stderr of this process end up in a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


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
