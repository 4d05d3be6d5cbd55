# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Real ranks: start a program under the `deepspeed` launcher, with one log per rank and a limit on
its time.

What is not about the launcher forks its ranks instead (`LaunchSettings.forked`,
`tests/forking.py`): torch and DeepSpeed are then imported once for all launches, not on every rank,
which is five CPU seconds each.

A launch is several processes on this machine, talking gloo over the loopback interface. Whatever
happens inside, the launch ends: a rank that fails takes the others with it (the launcher does
that), and at the time limit every rank prints where it is into its log and ends.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.forking import Forked

Process = subprocess.Popen[bytes] | Forked

ROOT = Path(__file__).resolve().parent.parent

_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CROSS_RANK",
)

STACKS_S = 3.0
"""Seconds in which ranks that are ended print where they are."""

_PYTEST_FRAME = re.compile(r'^  File "(?:.*/(?:pluggy|_pytest|pytest)/|<frozen runpy>)')


@dataclass(frozen=True)
class LaunchSettings:
    """How to launch.

    Attributes:
        log_dir: an empty or new directory for `rank<N>` logs and the launcher's own `launcher.log`.
        world_size: number of ranks.
        timeout_s: seconds until the launch is killed.
        module: the program is a module name, as after `python -m`, rather than a file.
        env: variables added to the environment of every rank.
        forked: ranks are forked of a process that has imported DeepSpeed and zero_topo, not started
            by the launcher.
    """

    log_dir: Path
    world_size: int = 8
    timeout_s: float = 300.0
    module: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    forked: bool = False


@dataclass(frozen=True)
class Launch:
    """A launch that has ended.

    Attributes:
        returncode: 0, or the exit code of the first rank that failed; negative if killed by a
            signal.
        seconds: wall time.
        timed_out: it was killed at its time limit.
        log_dir: where the logs are.
    """

    returncode: int
    seconds: float
    timed_out: bool
    log_dir: Path

    def log(self, rank: int) -> str:
        """What the rank wrote to stdout and stderr."""
        return "".join(
            path.read_text(errors="replace")
            for path in sorted(self.log_dir.glob(f"*_rank{rank}.log"))
        )

    def logs(self) -> list[str]:
        """Every rank's log, in rank order."""
        ranks = [int(path.stem.rpartition("rank")[2]) for path in self.log_dir.glob("*_rank*.log")]
        return [self.log(rank) for rank in sorted(set(ranks))]

    def launcher_log(self) -> str:
        """What the launcher itself wrote."""
        return (self.log_dir / "launcher.log").read_text(errors="replace")

    def tails(self, lines: int = 40) -> str:
        """The end of the launcher's and of every rank's log, without pytest's own frames, for a
        failure's message.
        """
        logs = {"launcher": self.launcher_log()} | {
            f"rank {rank}": text for rank, text in enumerate(self.logs())
        }
        kept = {
            name: [t for t in text.splitlines() if not _PYTEST_FRAME.search(t)]
            for name, text in logs.items()
        }
        return "\n".join("\n".join([f"--- {name}", *text[-lines:]]) for name, text in kept.items())


def launch(command: Sequence[str], settings: LaunchSettings) -> Launch:
    """Runs `command` (a script or module and its arguments) on every rank, and waits for its end.

    Never raises for what the ranks do: read `returncode`, `timed_out` and the logs.
    """
    settings.log_dir.mkdir(parents=True, exist_ok=True)
    start, port = time.monotonic(), free_port()
    process = (_forked if settings.forked else _launched)(command, settings, port)
    try:
        timed_out = _watch(process, start + settings.timeout_s)
    finally:
        _end(process)
        _free_shared_memory(port)
    return Launch(process.poll() or 0, time.monotonic() - start, timed_out, settings.log_dir)


def succeeded(command: Sequence[str], settings: LaunchSettings) -> Launch:
    """A launch that must end with exit code 0."""
    done = launch(command, settings)
    assert done.returncode == 0, done.tails()
    return done


def ended(command: Sequence[str | Path], **how: Any) -> subprocess.CompletedProcess[str]:
    """A program and what it printed; ``how`` are arguments of ``subprocess.run``."""
    return subprocess.run(command, capture_output=True, text=True, check=False, **how)


def output(command: Sequence[str | Path], **how: Any) -> str:
    """What a program that must succeed prints."""
    done = ended(command, **how)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return str(done.stdout)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _forked(command: Sequence[str], settings: LaunchSettings, port: int) -> Forked:
    where = settings.log_dir, rank_environment(**settings.env)
    return Forked(command, settings.module, settings.world_size, port, *where)


def _launched(
    command: Sequence[str], settings: LaunchSettings, port: int
) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank"]
    launcher += ["--num_accelerators", str(settings.world_size), "--master_port", str(port)]
    launcher += ["--enable_each_rank_log", str(settings.log_dir)]
    with open(settings.log_dir / "launcher.log", "wb") as output:
        return subprocess.Popen(
            [*launcher, *(["--module"] if settings.module else []), *command],
            env=rank_environment(**settings.env),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_no_core_files,
        )


def rank_environment(**more: str) -> dict[str, str]:
    """This process's environment for ranks: loopback interface, one thread each, stacks on abort;
    the tests' device.
    """
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    env.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".torch_extensions"))
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env["DS_ACCELERATOR"] = env.get("ZERO_TOPO_TEST_DEVICE", "cpu")
    env |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])  # ninja
    return env | more


def rank_alone() -> dict[str, str]:
    """The variables of a launcher for one rank that has no peers."""
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return {**names, "MASTER_PORT": str(free_port())}


def _no_core_files() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _watch(process: Process, deadline: float) -> bool:
    """Wait until the launch ends (False) or the deadline passes (True)."""
    while process.poll() is None:
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)
    return False


def _end(process: Process) -> None:
    """Ends whatever is left of the launch's process group: with stacks in the logs if it still
    runs.
    """
    assert process.pid is not None
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGABRT)
            time.sleep(STACKS_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_shared_memory(port: int) -> None:
    """Removes what DeepSpeed's CPU collectives leave in memory for ever: 66 MB a rank, under the
    port's name.
    """
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        path.unlink(missing_ok=True)
