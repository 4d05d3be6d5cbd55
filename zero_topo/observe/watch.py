# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Watches a run: if it hangs, the ranks log which ranks do not answer, and where the others wait.

If one rank is stopped, cut off or busy elsewhere, the others wait in a collective until the
backend's timeout, half an hour by default, and then all fail with one error. Each rank therefore
has a thread that polls the position of its own main thread. If that has not moved for long, the
thread posts a question in the store of torch's rendezvous. The threads of all ranks answer, also on
ranks that compute, and one of them writes the verdict for all. While a run moves, each poll costs
one query of the store; the more ranks there are, the more rarely each polls. A rank that dies is
reported by the launcher.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from traceback import walk_stack

import torch.distributed as dist

from zero_topo.collectives.meter import Meter
from zero_topo.observe.log import users_line

logger = logging.getLogger(__name__)
SECONDS_VARIABLE = "ZERO_TOPO_WATCH_S"
"""Environment variable: seconds without progress after which ranks query each other; 0 disables the
watch.
"""
STILL_S = 60.0  # its default
METHODS = ("forward", "backward", "step", "save_checkpoint", "load_checkpoint", "destroy")
"""Methods of DeepSpeed's engine that a user calls."""
STORE_QUESTIONS_PER_S = 1000.0
SLACK_S = 10.0
"""Seconds to wait for the thread's end, which would never come if the store is cut off."""
MOST_NAMED = 4
"""The most ranks, and the most positions, that a message names."""


Position = tuple[str, tuple[object, ...]]
"""The position of a rank: words for the user, and values that change whenever the rank makes
progress.
"""


class Progress:
    """Times how long a position has not changed.

    Args:
        position: returns the position.
    """

    def __init__(self, position: Callable[[], Position]) -> None:
        self._position = position
        self._seen: tuple[object, ...] = ()
        self._since = 0.0
        self.words = ""

    def still_s(self) -> float:
        """Return the seconds since the last change that a call has seen; 0 if this call sees one.

        ``words`` then describes the position.
        """
        self.words, found = self._position()
        now = time.monotonic()
        if found != self._seen:
            self._seen = found
            self._since = now
        return now - self._since


class Watch:
    """A thread that watches one engine's progress on one rank.

    Args:
        store: the store of torch's rendezvous, shared by all ranks.
        placement: this rank, the number of ranks, and its host.
        position: returns the position of the main thread; called from the watch's thread.
        say: logs a verdict.
        still_s: seconds that a rank may make no progress, equal on all ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        placement: tuple[int, int, str],
        position: Callable[[], Position],
        say: Callable[[str], None],
        still_s: float,
    ) -> None:
        self._rank, self._ranks, host = placement
        turn = store.add(f"zero_topo/watched by {self._rank}", 1)
        # On rank 0 this object serves all clients, so it must stay alive
        self._given: dist.Store | None = store
        # A client serves one thread at a time, and the main thread may block in its own. Torch 2.6
        # has no clone.
        own = store.clone() if hasattr(store, "clone") else store
        self._store = dist.PrefixStore(f"zero_topo/watch {turn}", own)
        self._store.set(f"host {self._rank}", host)
        self._progress = Progress(position)
        self._say = say
        self._still_s = still_s
        self._poll_s = poll_s(self._ranks, still_s)
        self._answer_s = 2 * self._poll_s  # within which every live rank has polled
        self._closed = threading.Event()
        atexit.register(self._stop)
        self._thread = threading.Thread(target=self._run, name="zero_topo watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; record in the store that this rank left, unless it handles an error."""
        atexit.unregister(self._stop)
        if sys.exc_info()[1] is None:
            with suppress(RuntimeError):  # the store ended with its rank
                self._store.set(f"left {self._rank}", "")
        self._stop()
        self._given = None  # else a later init_process_group would find the old keys

    def _stop(self) -> None:
        """End the thread: one that runs while Python ends aborts the process."""
        self._closed.set()
        self._thread.join(SLACK_S + 4 * self._answer_s)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store ended with its rank
            self._watch()

    def _watch(self) -> None:
        """Poll; ask the other ranks once when this one stands still, and answer their questions."""
        turn = 0
        asks = True
        while not self._closed.wait(self._poll_s):
            still_s = self._progress.still_s()
            asks = asks or not still_s
            if asks and still_s > self._still_s:
                self._store.set(f"asked {turn}", "")
            if self._store.check([f"asked {turn}"]):
                pace = f"{still_s:.0f} s" if still_s > 1.5 * self._poll_s else "moves,"
                self._answer(turn, f"{pace} {self._progress.words}")
                turn += 1
                asks = False

    def _answer(self, turn: int, words: str) -> None:
        """Post this rank's position, wait for the others' answers, and log the verdict that one
        rank writes.
        """
        answers = dist.PrefixStore(f"{turn}", self._store)
        answers.set(f"{self._rank}", words)
        self._closed.wait(self._answer_s)
        if answers.add("tellers", 1) == 1:
            answers.set("verdict", self._verdict(answers))
        end = time.monotonic() + self._answer_s
        while not (verdict := answers.check(["verdict"])) and time.monotonic() < end:
            if self._closed.wait(self._answer_s / 20):
                return
        # Its writer may have died
        self._say(answers.get("verdict").decode() if verdict else self._verdict(answers))

    def _verdict(self, answers: dist.Store) -> str:
        places: dict[str, list[int]] = {}
        silent = []
        for rank in range(self._ranks):
            if answers.check([f"{rank}"]):
                places.setdefault(answers.get(f"{rank}").decode(), []).append(rank)
            elif not self._store.check([f"left {rank}"]):
                silent.append(f"rank {rank} of host {self._host(rank)}")
        return standstill(silent, places)

    def _host(self, rank: int) -> str:
        """Return a rank's host; "unknown" if it died before setting it, for a read would wait until
        the timeout.
        """
        key = f"host {rank}"
        return self._store.get(key).decode() if self._store.check([key]) else "unknown"


def poll_s(ranks: int, still_s: float) -> float:
    """Return the seconds between two polls of a rank: the more ranks there are, the more rarely
    each polls.
    """
    return max(min(still_s / 6, 1.0), ranks / STORE_QUESTIONS_PER_S)


def standstill(silent: list[str], places: Mapping[str, list[int]]) -> str:
    """Return the message about a run that makes no progress.

    Args:
        silent: ranks that did not answer, with their hosts.
        places: where in the step ranks wait, and which ranks, by number.
    """
    shown = sorted(places.items(), key=lambda item: len(item[1]))[:MOST_NAMED]
    where = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {_named(ranks)}: {words}" for words, ranks in shown
    )
    if not silent:
        return f"the run makes no progress, and every rank answers; {where}"
    gone = f"{_named(silent)} did not answer: ended, stopped, or cut off from the network"
    return f"the run makes no progress: {gone}; look at it there. {where}"


def _named(ranks: Sequence[object]) -> str:
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"{', '.join(map(str, ranks[:MOST_NAMED]))}{more}"


def watched(store: dist.Store, meter: Meter) -> Watch | None:
    """Start the watch of the engine with this meter; return None if it is disabled or there is one
    rank.

    Raises:
        ValueError: if ``ZERO_TOPO_WATCH_S`` is not a number of seconds.
    """
    said = os.environ.get(SECONDS_VARIABLE, str(STILL_S))
    still_s = float(said) if re.fullmatch(r"\d{1,9}(\.\d{0,9})?", said) else -1.0
    if still_s < 0:
        raise ValueError(
            f"{SECONDS_VARIABLE} = {said!r}: give seconds, such as 60, or 0 for no watch"
        )
    if not still_s or dist.get_world_size() == 1:
        return None
    placement = dist.get_rank(), dist.get_world_size(), socket.gethostname()
    return Watch(
        store,
        placement,
        partial(main_thread_position, meter),
        partial(logger.warning, "zero_topo: %s"),
        still_s,
    )


def main_thread_position(meter: Meter) -> Position:
    """Return the position of the main thread: the engine's method, our phase, and the line of the
    user's script.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    method = ""
    line = ""
    innermost = (frame.f_code.co_name, frame.f_lasti) if frame else ("", 0)
    for caller, lineno in walk_stack(frame) if frame else ():
        if (
            caller.f_code.co_name in METHODS
            and caller.f_globals.get("__name__") == "deepspeed.runtime.engine"
        ):
            method = caller.f_code.co_name
        line = line or users_line(caller, lineno)
    phase = meter.phase()
    words = (
        f"in {method or innermost[0]} of step "
        f"{meter.steps}{phase and f', {phase}'}{line and f', at {line}'}"
    )
    return words, (words, *innermost, sum(list(meter.calls.values())))
