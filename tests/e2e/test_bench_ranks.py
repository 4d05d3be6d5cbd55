# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The ranks of a benchmark as processes: they talk to it, they end together, and their ring sums."""

from __future__ import annotations

import time

import pytest

from tests.launching import free_port
from zero_topo.bench.ranks import Address, Place, Ranks, place

PROGRAMS = "tests.e2e.programs.bench_ranks"


def places(count: int) -> list[Place]:
    """Ranks on this machine's loopback interface."""
    address = Address("lo", "127.0.0.1", free_port())
    return [place(rank, count, 1, address) for rank in range(count)]


def test_ranks_talk_and_their_ring_is_exact() -> None:
    """Three forked ranks meet, rank 0 asks and is answered, and the ring reduce-scatter gives the sums."""
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


def test_ranks_end_with_the_benchmark() -> None:
    """Leaving the block, as Ctrl-C does, ends ranks that would go on."""
    began = time.monotonic()
    with Ranks(f"{PROGRAMS}:failing", {"words": "soon"}, places(1)):
        pass
    assert time.monotonic() - began < 60
