# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""When a run stands still, every rank that can says which ranks do not answer, and where the others wait.

Note [A run that stands still]
    A rank that is stopped, cut off, or busy elsewhere leaves the others in a collective until the backend's timeout,
    half an hour by default, and then all fail alike. So a thread of each rank looks now and then where its own main
    thread is. If that has not moved for long, it asks through the store in which the ranks met; every thread answers,
    also that of a rank that computes, and one of them tells all what it found. While a run moves, a rank asks the
    store one question each time it looks, and the more ranks there are the less often it looks.
    A rank that dies takes its neighbours with it at once where the backend notices, with an error that names nobody.
    So a process that ends by an error leaves word in the store, and if it may come from another rank asks the others
    before it ends. What a launcher ends has no time for that: the ranks of the node on which one died.
    A rank whose script comes to its end leaves word of that too. On rank 0 the store ends with the process, so it waits
    until the threads of all others have read that, and these look on without a store.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from zero_topo.collectives.meter import Meter
from zero_topo.hook.log import users_line

logger = logging.getLogger(__name__)
SECONDS_VARIABLE = "ZERO_TOPO_WATCH_S"
"""How long a run may stand still before its ranks ask each other; 0 turns the watch off."""
METHODS = ("forward", "backward", "step", "save_checkpoint", "load_checkpoint", "destroy")
"""Of DeepSpeed's engine; what a user calls."""
STORE_QUESTIONS_PER_S = 1000.0
AGAIN = 4
"""Still at a standstill after so many times as long, ranks are asked again: one that answered may have died since."""
FAILS = "the run fails"
STORE = "rank 0, which holds the store in which the ranks met,"
SLACK_S = 10.0
"""On a busy machine."""
IN_ORDER = "its script came to its end"
STORE_ENDS, HEARD = "store ends", "heard"
"""Keys: that rank 0 ends in good order, and how many ranks know or have ended before."""
MOST_OF_ERROR = 120
"""Characters of an error that the others are told."""


class Place(NamedTuple):
    """Where a rank is: ``words`` for the user, and ``moves``, which changes whenever the rank gets on."""

    words: str
    moves: tuple[object, ...]


@dataclass(frozen=True)
class Patience:
    """Seconds that a rank may stand still, and between two looks where ranks are few."""

    still_s: float = 60.0
    most_look_s: float = 1.0

    def look_s(self, ranks: int) -> float:
        """Seconds from one look to the next."""
        return max(min(self.still_s / 6, self.most_look_s), ranks / STORE_QUESTIONS_PER_S)

    def answer_s(self, ranks: int) -> float:
        """Seconds in which every rank that lives has looked."""
        return 2 * self.look_s(ranks)


class Watch:
    """A thread that looks after one engine's progress on one rank.

    Args:
        store: in which the ranks met, shared by all.
        seat: this rank, how many there are, and its host.
        place: where the main thread is now; called from the watch's thread.
        say: prints what was found.
        patience: after how long, the same on all ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        seat: tuple[int, int, str],
        place: Callable[[], Place],
        say: Callable[[str], None],
        patience: Patience,
    ) -> None:
        self._rank, self._ranks, host = seat
        turn = store.add(f"zero_topo/watched by {self._rank}", 1)
        self._given: dist.Store | None = store  # on rank 0 it serves all clients, as long as it is kept
        # A client serves one thread at a time, and the main thread may wait in its own. Torch 2.6 has no clone.
        own = store.clone() if hasattr(store, "clone") else store
        self._store = dist.PrefixStore(f"zero_topo/watch {turn}", own)
        self._store.set(f"host {self._rank}", host)
        self._place, self._say, self._patience = place, say, patience
        self._error, self._asks = "", False
        self._woken, self._closed = threading.Event(), threading.Event()
        if self._rank == 0:
            atexit.register(self._end_store)
        atexit.register(self.ended)  # the last registered is the first called
        self._asking_since = 0.0
        self._alone = False  # the store has ended in good order
        self._thread = threading.Thread(target=self._run, name="zero_topo watch", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="zero_topo watch of the store", daemon=True).start()

    def close(self) -> None:
        """End the thread; the others know that this rank left in good order, or of the error that is being handled."""
        atexit.unregister(self.ended)
        if error := sys.exc_info()[1]:
            self.ended(error)
        self._leave(f"left {self._rank}", "")
        self._given = None  # else a later init_process_group would find the old keys

    def _leave(self, key: str, word: str) -> None:
        """End the thread, with a word for the others unless it has ended by an error or left before."""
        if not (self._error or self._alone or self._closed.is_set()):
            with suppress(RuntimeError):  # the store went with its rank
                self._store.set(key, word)
                self._store.add(HEARD, 1)
        self._closed.set()
        self._woken.set()
        self._thread.join(self._most_s)

    def _end_store(self) -> None:
        """Before the process of rank 0 ends in good order: tell the others, and wait until they know."""
        gone = self._given is None and not dist.is_initialized()
        if gone or getattr(sys, "last_value", None) is not None:
            return
        with suppress(RuntimeError):
            self._store.set(STORE_ENDS, "")
            turn = 0
            while self._store.check([f"asked {turn}"]):
                turn += 1
            self._store.set(f"asked {turn}", "")  # the one question that all look for
            end = time.monotonic() + 2 * self._patience.answer_s(self._ranks)
            while self._store.add(HEARD, 0) < self._ranks and time.monotonic() < end:
                time.sleep(0.02)

    @property
    def _most_s(self) -> float:
        """How long the thread may take to end; for ever, were the store cut off."""
        return SLACK_S + 4 * self._patience.answer_s(self._ranks)

    def ended(self, error: BaseException | None = None) -> None:
        """Before the process ends: leave word of how; after an error also say what the others answer.

        Args:
            error: by default the one that nobody caught, if any.
        """
        error = error or getattr(sys, "last_value", None)
        if error is None:
            return self._leave(f"ended {self._rank}", IN_ORDER)
        said = " ".join([type(error).__name__ + ":", *str(error).split()])
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ())).replace("zero_topo: ", "")
        self._error = f"ended by {said[:MOST_OF_ERROR]}{notes[:MOST_OF_ERROR]}"
        self._asks = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        self._woken.set()
        self._thread.join(self._most_s)

    def _guard(self) -> None:
        """Say it, once, if the store leaves a question open for long: its process may be stopped, or cut off."""
        most_s = self._patience.still_s + 4 * self._patience.answer_s(self._ranks)
        while not self._closed.wait(self._patience.look_s(self._ranks)):
            if (since := self._asking_since) and time.monotonic() - since > most_s:
                return self._say(
                    f"{STORE} has not answered for {most_s:.0f} s: it is stopped, or cut off; look at it there"
                )

    def _run(self) -> None:
        try:
            turn, found = self._look_on()
            if self._alone and self._asks:
                self._say(f"{STORE} had ended in good order before")
            elif self._error and not self._alone:
                self._store.add(HEARD, 1)
                self._store.set(f"ended {self._rank}", self._error)
                if self._asks and not found.startswith(FAILS):  # else another one that fails has just asked
                    self._store.set(f"asked {turn}", "")
                    self._answer(turn, self._error)
        except RuntimeError:
            self._woken.wait(SLACK_S)  # where all end, rank 0 may be the first; who fails meanwhile says so at once
            if not self._closed.is_set():
                self._say(f"{STORE} does not answer: it ended or died")
        if self._asks:  # let the node's other ranks say so too: its launcher ends them once this one has ended
            self._closed.wait(self._patience.answer_s(self._ranks))

    def _look_on(self) -> tuple[int, str]:
        """Until somebody wakes the thread; which question is next, and what was found at this standstill."""
        turn, found, due = 0, "", self._patience.still_s
        seen, since = self._place(), time.monotonic()
        while not self._woken.wait(self._patience.look_s(self._ranks)):
            now = self._place()
            if now.moves != seen.moves:
                found, due, since = "", self._patience.still_s, time.monotonic()
            seen, still = now, time.monotonic() - since
            if self._alone:
                if still > due:
                    self._say(f"{STORE} ended in good order, and this rank stands still: {now.words}")
                    due = math.inf
                continue
            self._asking_since = time.monotonic()
            if still > due:
                self._store.set(f"asked {turn}", "")
            if self._store.check([f"asked {turn}"]):
                if self._store.check([STORE_ENDS]):
                    self._store.add(HEARD, 1)
                    self._alone, self._asking_since = True, 0.0
                    continue
                words = f"{still:.0f} s {now.words}" if still > self._look_s else f"moves, {now.words}"
                found = self._answer(turn, words)
                turn, due = turn + 1, AGAIN * max(still, self._patience.still_s)
            self._asking_since = 0.0
        return turn, found

    @property
    def _look_s(self) -> float:
        return 1.5 * self._patience.look_s(self._ranks)

    def _answer(self, turn: int, words: str) -> str:
        """Say where this rank is, wait for the others' answers, and print what one of them makes of all."""
        answers = dist.PrefixStore(f"{turn}", self._store)
        answers.set(f"{self._rank}", words)
        answer_s = self._patience.answer_s(self._ranks)
        self._closed.wait(answer_s)
        if answers.add("tellers", 1) == 1:
            answers.set("told", self._verdict(answers))
        end = time.monotonic() + answer_s
        while not (told := answers.check(["told"])) and time.monotonic() < end:
            if self._closed.wait(answer_s / 20):
                return ""
        found = answers.get("told").decode() if told else self._verdict(answers)  # the teller may have died
        self._say(found)
        return found

    def _verdict(self, answers: dist.Store) -> str:
        places: dict[str, list[int]] = {}
        silent = []
        for rank in range(self._ranks):
            if answers.check([f"{rank}"]):
                places.setdefault(answers.get(f"{rank}").decode(), []).append(rank)
            elif not self._store.check([f"left {rank}"]):
                word = f" ({self._store.get(f'ended {rank}').decode()})" if self._store.check([f"ended {rank}"]) else ""
                silent.append(f"rank {rank} of host {self._host(rank)}{word}")
        return standstill(silent, places)

    def _host(self, rank: int) -> str:
        """A rank that died early has set none, and to get it would wait for as long as the store does."""
        key = f"host {rank}"
        return self._store.get(key).decode() if self._store.check([key]) else "unknown"


def standstill(silent: list[str], places: Mapping[str, list[int]], most: int = 4) -> str:
    """What to say of a run that stands still.

    Args:
        silent: ranks that did not answer, with their hosts.
        places: where the others are -> these.
        most: ranks and places that are named.
    """
    shown = sorted(places.items(), key=lambda item: len(item[1]))[:most]
    where = "; ".join(f"{_named(ranks, most)}: {words}" for words, ranks in shown)
    what = FAILS if any(words.startswith("ended") for words in places) else "the run stands still"
    if not silent:
        return f"{what}, and every rank answers; {where}"
    more = f" and {len(silent) - most} more" if len(silent) > most else ""
    return (
        f"{what}: {', '.join(silent[:most])}{more} did not answer: ended, stopped, or cut off from the "
        f"network; look at it there. {where}"
    )


def _named(ranks: list[int], most: int) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"ranks {', '.join(map(str, ranks[:most]))}{more}"


def watched(store: dist.Store, meter: Meter) -> Watch | None:
    """The watch of the engine with this meter, among the ranks that met in a store; None where it is turned off.

    Raises:
        ValueError: if ``ZERO_TOPO_WATCH_S`` is no number of seconds.
    """
    said = os.environ.get(SECONDS_VARIABLE, str(Patience.still_s))
    still_s = float(said) if re.fullmatch(r"\d{1,9}(\.\d{0,9})?", said) else -1.0
    if still_s < 0:
        raise ValueError(f"{SECONDS_VARIABLE} = {said!r}: give seconds, such as 60, or 0 for no watch")
    if not still_s or dist.get_world_size() == 1:
        return None
    seat = dist.get_rank(), dist.get_world_size(), socket.gethostname()
    return Watch(store, seat, partial(main_thread_place, meter), _say, Patience(still_s))


def _say(found: str) -> None:
    logger.warning("zero_topo: %s", found)


def main_thread_place(meter: Meter) -> Place:
    """Where the main thread is: the engine's method, our phase, and the line of the user's script."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    method, line, innermost = "", "", (frame.f_code.co_name, frame.f_lasti) if frame else ("", 0)
    while frame is not None:
        if frame.f_code.co_name in METHODS and frame.f_globals.get("__name__") == "deepspeed.runtime.engine":
            method = frame.f_code.co_name
        line = line or users_line(frame, frame.f_lineno)
        frame = frame.f_back
    phase = meter.phase()
    words = f"in {method or innermost[0]} of step {meter.steps}{phase and f', {phase}'}{line and f', at {line}'}"
    return Place(words, (words, *innermost, sum(list(meter.calls.values()))))
