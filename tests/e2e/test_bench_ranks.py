# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The ranks of a benchmark as processes: they talk to it, they end together, and their ring
sums.
"""

from __future__ import annotations

import time

import pytest

from benchmarks.ranks import Address, Place, Ranks, place
from benchmarks.scale import PROGRAM
from benchmarks.schemes import KNOWN
from tests.launching import free_port

pytestmark = pytest.mark.long
PROGRAMS = "tests.e2e.programs.bench_ranks"


def places(count: int) -> list[Place]:
    """Ranks on this machine's loopback interface."""
    address = Address("lo", "127.0.0.1", free_port())
    return [place(rank, count, 1, address) for rank in range(count)]


def test_ranks_talk_and_their_ring_is_exact() -> None:
    """Three forked ranks meet, rank 0 asks and is answered, and the ring reduce-scatter gives the
    sums.
    """
    with Ranks(f"{PROGRAMS}:ring", {"numel": 5}, places(3)) as ranks:
        messages = ranks.messages()
        assert next(messages) == {"event": "question"}
        ranks.reply({"forty": 2})
        assert list(messages) == [{"exact": [True] * 3, "answer": {"forty": 2}, "environment": "1"}]


def test_a_rank_that_fails_ends_all_and_is_quoted() -> None:
    """The error holds the failed rank's own words, and nobody waits for the ranks that sleep."""
    began = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=r"rank 1 said last:(?s:.*)ZeroDivisionError: by nothing"),
        Ranks(f"{PROGRAMS}:failing", {"words": "by nothing"}, places(3)) as ranks,
    ):
        list(ranks.messages())
    assert time.monotonic() - began < 60


def test_the_signal_that_ended_a_rank_is_named() -> None:
    """The kernel kills a rank where memory ends, and the rank itself can write nothing."""
    said = r"rank 1 was killed by SIGKILL \(out of memory\? .*\); rank 1 said last:"
    with (
        pytest.raises(RuntimeError, match=said),
        Ranks(f"{PROGRAMS}:killed", {}, places(2)) as ranks,
    ):
        list(ranks.messages())


def test_deepspeeds_own_launches_are_counted() -> None:
    """Stock ZeRO-3 gathers each parameter twice and scatters all at once; ours, next to it, calls
    kernels too.
    """
    topology = {"nodes": 1, "gpus_per_node": 1, "ranks_per_gpu": 2}
    jobs = [KNOWN[name].job_on(topology) for name in ("stock", "topo")]
    with Ranks(PROGRAM, {"params": 4, "jobs": jobs}, places(2)) as ranks:
        stock, topo = (found["phases"] for _, found in ranks.results(jobs, lambda *_: None))
    assert [stock[phase]["collectives"] for phase in ("forward", "backward")] == [4, 5]
    assert (
        not any(counts["kernels"] for counts in stock.values()) and stock["step"]["operations"] > 0
    )
    assert topo["forward"]["kernels"] >= 4 and topo["forward"]["collectives"] >= 4
