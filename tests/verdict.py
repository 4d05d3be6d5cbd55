# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How ranks that run the same tests agree on each outcome, so that one rank's failure neither hides nor hangs.

After every phase (setup, call, teardown) of every test:

1. each rank writes its outcome into the launch's key-value store and waits for the others' outcomes;
2. the phase passed if it passed on every rank; else every rank fails it, naming the ranks and the first reason;
3. a rank that has failed waits `grace_s` seconds for the others. Those still inside the test then (in a collective that
   will never end) print their stacks and end the process, and with it the launch.

The store is the one `torch.distributed` uses for its rendezvous, over connections of our own: no collective is needed,
so a process group in any state can be judged.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import IO

import torch.distributed as dist

STUCK_EXIT_CODE = 70
# Between saying where it is stuck and ending: the launcher then ends the other stuck ranks, which have to say it too.
SAY_IT_S = 2.0

Outcomes = Mapping[int, "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """How one phase of one test ended on one rank: "passed", "skipped", "failed" or "stuck", and why."""

    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Seat:
    """Where this process sits in the launch."""

    rank: int
    world_size: int
    host: str
    port: int

    @classmethod
    def from_environment(cls) -> Seat:
        """The seat the launcher gave this process; KeyError if it was not started by one."""
        env = os.environ
        return cls(int(env["RANK"]), int(env["WORLD_SIZE"]), env["MASTER_ADDR"], int(env["MASTER_PORT"]))

    def connect(self) -> dist.Store:
        """A connection of its own to the launch's store, which rank 0 holds once its process group exists."""
        store = dist.TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=60))
        return dist.PrefixStore("zero_topo_verdict", store)


class Verdict:
    """One rank's part in the agreement."""

    def __init__(self, seat: Seat, grace_s: float, log: IO[str], on_stuck: Callable[[str, str], None]) -> None:
        """Connects to the store.

        Args:
            seat: where this process sits.
            grace_s: seconds a failed rank waits for the others.
            log: where a stuck rank prints its stacks.
            on_stuck: called as `on_stuck(test, why)` in a rank that is about to end because it is stuck.

        Attributes:
            broken: a rank did not come out of a test, so the process group cannot be used any more.
        """
        self.seat = seat
        self.grace_s = grace_s
        self.broken = False
        self._log = log
        self._on_stuck = on_stuck
        self._store = seat.connect()
        self._watch_store = seat.connect()
        self._step = 0
        self._inside: tuple[int, str] | None = None
        threading.Thread(target=self._watch, name="verdict", daemon=True).start()

    @contextmanager
    def inside(self, test: str) -> Iterator[None]:
        """While this rank runs a phase of `test`: if another rank fails it, this one has `grace_s` to come out."""
        self._inside = (self._step, test)
        try:
            yield
        finally:
            self._inside = None

    def agree(self, own: Outcome) -> Outcomes:
        """Every rank's outcome of the phase just ended; "stuck" for ranks that did not come out of it."""
        step, self._step = self._step, self._step + 1
        self._store.set(f"{step}/{self.seat.rank}", json.dumps([own.kind, own.detail]))
        if own.kind == "failed":
            self._store.set(f"{step}/failed", "1")
        ranks = range(self.seat.world_size)
        missing = self._wait(step, {rank: f"{step}/{rank}" for rank in ranks})
        self.broken = self.broken or bool(missing)
        return {rank: Outcome("stuck") if rank in missing else self._outcome(step, rank) for rank in ranks}

    def farewell(self, patience_s: float = 10.0) -> None:
        """Waits until every rank has got here, so that the first to leave does not make the launcher end the rest."""
        deadline = time.monotonic() + patience_s
        byes = [f"bye/{rank}" for rank in range(self.seat.world_size)]
        try:
            self._store.set(byes[self.seat.rank], "1")
            while not self._store.check(byes) and time.monotonic() < deadline:
                time.sleep(0.05)
        except dist.DistError:  # rank 0 has seen everybody, and left with the store
            return

    def _outcome(self, step: int, rank: int) -> Outcome:
        kind, detail = json.loads(self._store.get(f"{step}/{rank}"))
        return Outcome(kind, detail)

    def _wait(self, step: int, keys: Mapping[int, str]) -> set[int]:
        """Waits for the keys; once a rank has failed, at most `grace_s`. The ranks that are missing then."""
        missing, failed_since, pause = set(keys), None, 0.002
        while missing := {rank for rank in missing if not self._store.check([keys[rank]])}:
            if failed_since is None and self._store.check([f"{step}/failed"]):
                failed_since = time.monotonic()
            if failed_since is not None and time.monotonic() - failed_since > self.grace_s:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return missing

    def _watch(self) -> None:
        """The watchdog's thread: ends this process when another rank has failed the test it is stuck in."""
        failed: tuple[int, float] | None = None
        while True:
            time.sleep(0.5)
            inside = self._inside
            if inside is None:
                continue
            step, test = inside
            try:
                if failed is None or failed[0] != step:
                    failed = (step, time.monotonic()) if self._watch_store.check([f"{step}/failed"]) else None
            except dist.DistError:
                self._give_up(test, "rank 0 is gone, and the store with it")
            # A little longer than the failed ranks wait, so that they can report before the launcher ends them.
            if failed is not None and time.monotonic() - failed[1] > self.grace_s + 3.0:
                self._give_up(test, self._reasons(step))

    def _reasons(self, step: int) -> str:
        ranks = [r for r in range(self.seat.world_size) if self._watch_store.check([f"{step}/{r}"])]
        found = {rank: json.loads(self._watch_store.get(f"{step}/{rank}")) for rank in ranks}
        return "\n".join(f"rank {rank} failed:\n{text}" for rank, (kind, text) in found.items() if kind == "failed")

    def _give_up(self, test: str, why: str) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame)[-6:])
        text = f"rank {self.seat.rank} is stuck in {test} at\n{stack}while another rank failed\n{why}"
        print(text, file=self._log, flush=True)
        faulthandler.dump_traceback(self._log, all_threads=True)
        self._on_stuck(test, text)
        time.sleep(SAY_IT_S)
        os._exit(STUCK_EXIT_CODE)
