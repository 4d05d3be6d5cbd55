# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a benchmark, listens to rank 0, and ends them whatever happens.

Note [One import, many ranks]
    Importing torch and DeepSpeed costs seconds of CPU and 300 MB a process. One parent process
    imports them and forks the ranks (``rank_main.py``), each of which enters its own network
    namespace and sets its own environment before it touches anything of torch. The parent has a
    single thread and no process group, so there is nothing to inherit.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

_FOREIGN = (
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "MASTER_",
    "CROSS_",
    "GROUP_",
    "SLURM_",
    "OMPI_",
    "PMI",
    "TORCHELASTIC_",
)
MEMORY = " (out of memory? `dmesg` says)"
_SILENCE_S = 900.0  # longer than any step
_ENDING_S = 5.0  # for the parent to end its ranks and itself
_LINES = 30  # of a failed rank's log, in the error


@dataclass(frozen=True)
class Place:
    """Where one rank runs.

    Attributes:
        env: variables of its environment.
        space: file of its network namespace; None for the one of the benchmark.
    """

    env: Mapping[str, str]
    space: str | None = None


@dataclass(frozen=True)
class Address:
    """How ranks meet: interface of each, and address and port of rank 0."""

    interface: str
    host: str
    port: int


def place(
    rank: int, world_size: int, per_node: int, address: Address, space: Path | None = None
) -> Place:
    """The place of a rank on a node of ``per_node`` ranks.

    DeepSpeed's all-reduce goes through shared memory, past every link, if ``LOCAL_SIZE`` is the
    world size: it is the size of a node, of which there are at least two.
    """
    env = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % per_node,
        "LOCAL_WORLD_SIZE": per_node,
        "LOCAL_SIZE": per_node,
        "MASTER_ADDR": address.host,
        "MASTER_PORT": address.port,
        "GLOO_SOCKET_IFNAME": address.interface,
    }
    return Place(
        {key: str(value) for key, value in env.items()}, None if space is None else str(space)
    )


def on_loopback(world_size: int, per_node: int) -> list[Place]:
    """Places of ranks that talk over this machine's loopback interface, on a port that is
    free now.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = Address("lo", "127.0.0.1", int(probe.getsockname()[1]))
    return [place(rank, world_size, per_node, address) for rank in range(world_size)]


class Ranks:
    """Rank processes under way; use it in a ``with`` block, and take :meth:`messages` until they
    end.

    Args:
        program: ``"package.module:function"``, called on every rank with the settings and a
            ``Control``.
        settings: JSON types.
        places: one for each rank.
    """

    def __init__(self, program: str, settings: Mapping[str, Any], places: Sequence[Place]) -> None:
        self._world = {
            "program": program,
            "settings": settings,
            "places": [asdict(place) for place in places],
        }
        self._folder = tempfile.TemporaryDirectory(prefix="zero-topo-bench-")

    def __enter__(self) -> Ranks:
        file = Path(self._folder.name) / "world.json"
        file.write_text(json.dumps(self._world), encoding="utf-8")
        self._control, theirs = Pipe()
        # The parent of the ranks ends them when this end is closed
        self._lifeline_end, self._lifeline = os.pipe()
        command = [sys.executable, "-m", "benchmarks.rank_main", str(file)]
        with open(self._log("parent"), "wb") as log:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(self._lifeline_end)],
                env=environment(),
                pass_fds=(theirs.fileno(), self._lifeline_end),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        theirs.close()
        os.close(self._lifeline_end)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lifeline)
        self._control.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                self._process.wait(_ENDING_S)
                break
            except subprocess.TimeoutExpired:  # such as while it compiles
                # A session of its own: the parent, its ranks, its compilers
                os.killpg(self._process.pid, number)
        self._process.wait()
        self._folder.cleanup()

    def messages(self) -> Iterator[dict[str, Any]]:
        """What rank 0 says, until all ranks have ended.

        Raises:
            RuntimeError: if a rank fails or all are silent for too long, with the end of the log.
        """
        while True:
            if not self._control.poll(_SILENCE_S):
                raise RuntimeError(
                    f"the ranks said nothing for {_SILENCE_S:.0f} s; {self._last_words(0)}"
                )
            try:
                message = self._control.recv()
            except (EOFError, OSError):  # rank 0 has ended, perhaps in the middle of a word
                break
            yield message
        status = self._process.wait()
        if status:
            raise RuntimeError(f"the ranks did not finish; {self._failure()}")

    def results(
        self, jobs: Sequence[dict[str, Any]], hear: Callable[..., None]
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Each job with its result, as they come from ``Control.send_results``.

        Args:
            jobs: those that the ranks were given, in their order.
            hear: called for what else rank 0 says, with the job under way, the event, and what the
                message holds.

        Raises:
            ValueError: if a job is refused.
            RuntimeError: as from :meth:`messages`.
        """
        done = 0
        for message in self.messages():
            event = message.pop("event")
            if event == "refused":
                raise ValueError(f"scheme {jobs[done]['scheme']!r} is refused: {message['reason']}")
            if event != "measured":
                hear(jobs[done], event, **message)
                continue
            done += 1
            yield jobs[done - 1], message

    def reply(self, message: Mapping[str, Any]) -> None:
        """Answer what rank 0 asked last."""
        self._control.send(message)

    def _failure(self) -> str:
        said = self._log("parent").read_text(errors="replace")
        failed = re.search(r"^failed: rank (\d+)(?: killed by (\w+))?", said, re.MULTILINE)
        if failed is None:
            return f"their parent said:\n{said}"
        rank, killer = failed.groups()
        why = (
            ""
            if killer is None
            else f"rank {rank} was killed by {killer}{MEMORY if killer == 'SIGKILL' else ''}; "
        )
        return why + self._last_words(int(rank))

    def _last_words(self, rank: int) -> str:
        log = self._log(str(rank))
        text = log.read_text(errors="replace") if log.is_file() else ""
        return f"rank {rank} said last:\n" + "\n".join(text.splitlines()[-_LINES:])

    def _log(self, who: str) -> Path:
        return Path(self._folder.name) / f"{who}.log"


def environment() -> dict[str, str]:
    """Of the ranks' parent: one thread each on the CPU, and nothing that a launcher around us has
    set.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    root = Path(__file__).resolve().parent.parent
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])  # ninja
    return env | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
