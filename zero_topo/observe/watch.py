# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Watches a run: if it hangs, the ranks log which ranks do not answer, and where the others wait.

If one rank is stopped, cut off or busy elsewhere, the others wait in a collective until the
backend's timeout, half an hour by default, and then all fail with one error. Each rank therefore
has a thread that polls the position of its own main thread. If that has not moved for long, the
thread posts a question in the store of torch's rendezvous. The threads of all ranks answer, also on
ranks that compute, and one of them writes the verdict for all. While a run moves, each poll costs
one query of the store; the more ranks there are, the more rarely each polls.

If a rank dies and the backend notices, its neighbours fail at once, with an error that names no
rank. A process that ends therefore records in the store how. If its error may come from another
rank, it queries the others before it ends. The store ends with the process of rank 0; the other
ranks then watch their own progress alone.
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

import torch
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
AGAIN = 4
"""A standstill that lasts this many times as long is queried again: a rank that answered may have
died since.
"""
FAILS = "the run fails"
STORE = "rank 0, which holds the store in which the ranks met,"
IN_ORDER = "its script came to its end"
SLACK_S = 10.0
"""Seconds of allowance for a busy machine."""
MOST_NAMED = 4
"""The most ranks, and the most positions, that a message names."""
MOST_OF_ERROR = 120
"""Characters of an error that are sent to the other ranks."""


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
        most_poll_s: the longest interval of polls for few ranks, equal on all ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        placement: tuple[int, int, str],
        position: Callable[[], Position],
        say: Callable[[str], None],
        still_s: float,
        most_poll_s: float = 1.0,
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
        self._poll_s = poll_s(self._ranks, still_s, most_poll_s)
        self._answer_s = 2 * self._poll_s  # within which every live rank has polled
        # Of an error: its text, and whether another rank may have caused it
        self._error = ""
        self._asks = False
        self._asking_since = 0.0  # 0: no query is under way
        self._woken = threading.Event()
        self._closed = threading.Event()
        atexit.register(self.ended)
        self._thread = threading.Thread(target=self._run, name="zero_topo watch", daemon=True)
        self._thread.start()
        guard = threading.Thread(target=self._guard, name="zero_topo store watch", daemon=True)
        guard.start()

    def close(self) -> None:
        """End the thread; record in the store that this rank left normally, or the error that is
        being handled.
        """
        atexit.unregister(self.ended)
        if error := sys.exc_info()[1]:
            self.ended(error)
        self._leave(f"left {self._rank}", "")
        self._given = None  # else a later init_process_group would find the old keys

    def _leave(self, key: str, word: str) -> None:
        """End the thread, and record ``word`` in the store unless an error is recorded."""
        if not self._error:
            with suppress(RuntimeError):  # the store ended with its rank
                self._store.set(key, word)
        self._closed.set()
        self._woken.set()
        self._thread.join(self._most_s)

    @property
    def _most_s(self) -> float:
        """Seconds to wait for the thread's end, which would never come if the store is cut off."""
        return SLACK_S + 4 * self._answer_s

    def ended(self, error: BaseException | None = None) -> None:
        """Record how the process ends; after an error, also log the other ranks' answers.

        Args:
            error: by default the uncaught one, if any.
        """
        error = error or getattr(sys, "last_value", None)
        if error is None:
            return self._leave(f"ended {self._rank}", IN_ORDER)
        text = " ".join([type(error).__name__ + ":", *str(error).split()])
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        notes = notes.replace("zero_topo: ", "")
        self._error = f"ended by {text[:MOST_OF_ERROR]}{notes[:MOST_OF_ERROR]}"
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        self._asks = isinstance(error, RuntimeError) and not out_of_memory
        self._woken.set()
        self._thread.join(self._most_s)

    def _guard(self) -> None:
        """Log once if the store does not answer for long: its process may be stopped, or cut
        off.
        """
        most_s = self._still_s + 4 * self._answer_s
        while not self._closed.wait(self._poll_s):
            since = self._asking_since
            if since and time.monotonic() - since > most_s:
                return self._say(
                    f"{STORE} has not answered for {most_s:.0f} s: it is stopped, or cut off; look "
                    "at it there"
                )

    def _run(self) -> None:
        try:
            self._watch_all()
        except RuntimeError:
            self._asking_since = 0.0
            self._watch_alone()
        # Give the node's other ranks time to log too: the launcher kills them when this one ends
        if self._asks:
            self._closed.wait(self._answer_s)

    def _watch_all(self) -> None:
        """Poll until the thread is woken; then record an error, and ask the other ranks about it.

        Raises:
            RuntimeError: if the store has ended.
        """
        turn = 0
        verdict = ""
        due_s = self._still_s
        while not self._woken.wait(self._poll_s):
            still_s = self._progress.still_s()
            if not still_s:
                verdict = ""
                due_s = self._still_s
            self._asking_since = time.monotonic()
            if still_s > due_s:
                self._store.set(f"asked {turn}", "")
            if self._store.check([f"asked {turn}"]):
                pace = f"{still_s:.0f} s" if still_s > 1.5 * self._poll_s else "moves,"
                verdict = self._answer(turn, f"{pace} {self._progress.words}")
                turn += 1
                due_s = AGAIN * max(still_s, self._still_s)
            self._asking_since = 0.0
        if self._error:
            self._store.set(f"ended {self._rank}", self._error)
            # Unless another failing rank has just asked
            if self._asks and not verdict.startswith(FAILS):
                self._store.set(f"asked {turn}", "")
                self._answer(turn, self._error)

    def _watch_alone(self) -> None:
        """Log if this rank fails, or makes no progress, after the store has ended with rank 0."""
        while not self._woken.wait(self._poll_s):
            if self._progress.still_s() > self._still_s:
                words = self._progress.words
                return self._say(f"{STORE} has ended, and this rank makes no progress: {words}")
        if self._asks:
            self._say(f"{STORE} does not answer: it ended or died")

    def _answer(self, turn: int, words: str) -> str:
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
                return ""
        # Its writer may have died
        found = answers.get("verdict").decode() if verdict else self._verdict(answers)
        self._say(found)
        return found

    def _verdict(self, answers: dist.Store) -> str:
        places: dict[str, list[int]] = {}
        silent = []
        for rank in range(self._ranks):
            if answers.check([f"{rank}"]):
                places.setdefault(answers.get(f"{rank}").decode(), []).append(rank)
            elif not self._store.check([f"left {rank}"]):
                word = (
                    f" ({self._store.get(f'ended {rank}').decode()})"
                    if self._store.check([f"ended {rank}"])
                    else ""
                )
                silent.append(f"rank {rank} of host {self._host(rank)}{word}")
        return standstill(silent, places)

    def _host(self, rank: int) -> str:
        """Return a rank's host; "unknown" if it died before setting it, for a read would wait until
        the timeout.
        """
        key = f"host {rank}"
        return self._store.get(key).decode() if self._store.check([key]) else "unknown"


def poll_s(ranks: int, still_s: float, most_s: float = 1.0) -> float:
    """Return the seconds between two polls of a rank: the more ranks there are, the more rarely
    each polls.
    """
    return max(min(still_s / 6, most_s), ranks / STORE_QUESTIONS_PER_S)


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
    what = (
        FAILS if any(words.startswith("ended") for words in places) else "the run makes no progress"
    )
    if not silent:
        return f"{what}, and every rank answers; {where}"
    gone = f"{_named(silent)} did not answer: ended, stopped, or cut off from the network"
    return f"{what}: {gone}; look at it there. {where}"


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
