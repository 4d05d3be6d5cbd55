# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""How ranks that run the same tests agree on each outcome, so that one rank's failure neither hides
nor hangs.

After every phase (setup, call, teardown) of every test:

1. each rank writes its outcome into the launch's key-value store and waits for the others'
   outcomes;
2. the phase passed if it passed on every rank; else every rank fails it, naming the ranks and the
   first reason;
3. a rank that has failed waits `grace_s` seconds for the others. Those still inside the test then
   are in a collective that will never end: the rank ends, the launcher ends the others, and those
   print their stacks (`rank_plugin`).

The store is the one `torch.distributed` uses for its rendezvous, over a connection of our own: no
collective is needed, so a process group in any state can be judged.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

Outcomes = Mapping[int, "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """How one phase of one test ended on one rank: "passed", "skipped", "failed" or "stuck", and
    why.
    """

    kind: str
    detail: str = ""


class Verdict:
    """One rank's part in the agreement.

    Attributes:
        grace_s: seconds a failed rank waits for the others.
        broken: a rank did not come out of a test, so the process group cannot be used any more.
    """

    def __init__(self, grace_s: float) -> None:
        """Connects to the launch's store, which rank 0 holds once its process group exists."""
        env, wait = os.environ, timedelta(seconds=60)
        self.grace_s, self.broken, self._step = grace_s, False, 0
        self._rank, self._ranks = env["RANK"], range(int(env["WORLD_SIZE"]))
        store = dist.TCPStore(
            env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=wait
        )
        self._store = dist.PrefixStore("zero_topo_verdict", store)

    def agree(self, own: Outcome) -> Outcomes:
        """Every rank's outcome of the phase just ended; "stuck" for ranks that did not come out of
        it.
        """
        step, self._step = self._step, self._step + 1
        self._store.set(f"{step}/{self._rank}", json.dumps([own.kind, own.detail]))
        if own.kind == "failed":
            self._store.set(f"{step}/failed", "1")
        missing = self._wait(step)
        self.broken = self.broken or bool(missing)
        return {
            rank: Outcome("stuck") if rank in missing else self._outcome(step, rank)
            for rank in self._ranks
        }

    def farewell(self, patience_s: float) -> None:
        """Waits until every rank has got here, so that the first to leave does not make the
        launcher end the rest.
        """
        deadline = time.monotonic() + patience_s
        byes = [f"bye/{rank}" for rank in self._ranks]
        try:
            self._store.set(f"bye/{self._rank}", "1")
            while not self._store.check(byes) and time.monotonic() < deadline:
                time.sleep(0.05)
        except dist.DistError:  # rank 0 has seen everybody, and left with the store
            return

    def _outcome(self, step: int, rank: int) -> Outcome:
        kind, detail = json.loads(self._store.get(f"{step}/{rank}"))
        return Outcome(kind, detail)

    def _wait(self, step: int) -> set[int]:
        """Ranks whose outcome is missing, `grace_s` after one has failed; at once if some were
        missing before.
        """
        missing, failed_since, pause = set(self._ranks), None, 0.002
        while missing := {rank for rank in missing if not self._store.check([f"{step}/{rank}"])}:
            if failed_since is None and self._store.check([f"{step}/failed"]):
                failed_since = time.monotonic()
            if self.broken or (
                failed_since is not None and time.monotonic() - failed_since > self.grace_s
            ):
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return missing
