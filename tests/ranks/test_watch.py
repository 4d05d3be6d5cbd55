# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A run that stands still: every rank that lives says who does not answer and where the others
wait, in time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from zero_topo.collectives.meter import Meter
from zero_topo.observe import watch as watch_module
from zero_topo.observe.watch import Position, Watch, main_thread_position, poll_s, standstill

SHORT_S = 0.6
IN_TIME_S = 30 * SHORT_S  # of a busy machine


def waiting(rank: int) -> Callable[[], Position]:
    """Stands in one place."""
    return lambda: (f"in backward of step {7 if rank else 8}, scatter", (rank,))


def moving() -> Callable[[], Position]:
    """Gets on, if slowly."""
    count = itertools.count()
    return lambda: ("in forward of step 7, at data.py:3", (next(count),))


@contextmanager
def watches(
    places: list[Callable[[], Position] | None],
) -> Iterator[tuple[list[Watch], list[list[str]]]]:
    """Ranks of one store, those with a place; and what each has said."""
    store = dist.HashStore()
    said: list[list[str]] = [[] for _ in places]
    for rank, place in enumerate(places):
        if place is None:  # came to the start, and was stopped there
            dist.PrefixStore("zero_topo/watch 1", store).set(f"host {rank}", f"n{rank}")
    found = [
        Watch(store, (rank, len(places), f"n{rank}"), place, said[rank].append, SHORT_S)
        for rank, place in enumerate(places)
        if place is not None
    ]
    try:
        yield found, said
    finally:
        for watch in found:
            watch.close()


def heard(said: list[list[str]], count: int = 1) -> None:
    """Wait until every rank has said so much."""
    end = time.monotonic() + IN_TIME_S
    while any(len(lines) < count for lines in said) and time.monotonic() < end:
        time.sleep(0.02)


def test_a_rank_that_does_not_answer_is_named_on_all_others() -> None:
    """With its host, in time, once, and with where the others wait: in which phase of which
    step.
    """
    with watches([waiting(0), waiting(1), None, waiting(1)]) as (_, said):
        heard([said[0], said[1], said[3]])
        time.sleep(2 * SHORT_S)
        lines = said[0]
        assert len(lines) == 1 and said[1] == said[3] == lines and said[2] == []
        assert "rank 2 of host n2 did not answer: ended, stopped, or cut off" in lines[0]
        assert "rank 0: " in lines[0] and "in backward of step 8, scatter" in lines[0]


def test_a_rank_that_died_before_it_said_its_host_holds_nobody_up() -> None:
    """Nor does one that died while it was to tell the others; the store would wait for either's
    word.
    """
    store = dist.HashStore()
    said: list[str] = []
    dist.PrefixStore("0", dist.PrefixStore("zero_topo/watch 1", store)).add("tellers", 1)
    watch = Watch(store, (0, 2, "n0"), waiting(1), said.append, SHORT_S)
    heard([said])
    begin = time.monotonic()
    watch.close()
    assert time.monotonic() - begin < IN_TIME_S
    assert len(said) == 1 and "rank 1 of host unknown did not answer" in said[0]


def test_nothing_is_said_while_all_get_on() -> None:
    """However long."""
    with watches([moving(), moving()]) as (_, said):
        time.sleep(3 * SHORT_S)
        assert said == [[], []]


def test_a_rank_that_left_in_good_order_is_not_missed() -> None:
    """Its engine was destroyed while another still saves; and that one's own end does not wait for
    anybody.
    """
    with watches([waiting(0), moving()]) as (found, said):
        found[1].close()
        heard(said[:1])
        assert "every rank answers" in said[0][0] and "rank 1" not in said[0][0]


def test_a_main_thread_that_waits_in_the_store_does_not_blind_the_watch() -> None:
    """A communicator made when first used waits there for its id, and torch's client serves one
    thread at a time.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=6))
    said: list[str] = []
    watch = Watch(store, (0, 2, "n0"), waiting(0), said.append, SHORT_S)

    def wait() -> None:
        with suppress(RuntimeError):
            store.get("never")

    waits = threading.Thread(target=wait)
    waits.start()
    heard([said])
    waits.join()
    watch.close()
    assert "rank 1 of host unknown did not answer" in said[0]


def test_a_run_that_goes_on_and_stands_still_again_says_so_again() -> None:
    """Each time once."""
    at = [0]
    with watches([lambda: ("in step", (at[0],)), moving()]) as (_, said):
        heard(said)
        at[0] = 1
        heard(said, 2)
        assert [len(lines) for lines in said] == [2, 2]


def test_a_place_names_phase_and_the_users_line() -> None:
    """Of the main thread, seen from another."""
    meter = Meter()
    found: list[Position] = []
    watcher = threading.Thread(target=lambda: found.append(main_thread_position(meter)))
    with meter.timing("scatter"):
        watcher.start()
        watcher.join()
    assert found[0][0].startswith("in ") and ", scatter, at " in found[0][0]
    assert found[0][1] != main_thread_position(meter)[1]


@pytest.mark.parametrize("ranks", [1, 5, 75264])
def test_a_line_stays_short(ranks: int) -> None:
    """Whatever the number of ranks."""
    silent = [f"rank {rank} of host n{rank}" for rank in range(ranks)]
    line = standstill(silent, {"61 s in step": list(range(ranks, 2 * ranks))})
    assert len(line) < 500 and ("more did not answer" in line) == (ranks > 4)
    assert ranks / poll_s(ranks, watch_module.STILL_S) <= watch_module.STORE_QUESTIONS_PER_S
