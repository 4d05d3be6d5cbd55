# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads: failures and hangs surface, and a pretended world has its size. All other tests of ranks
use the collectives."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from tests.harness import run_threads


def check_nothing_is_left() -> None:
    """A failed or hung run leaves no process group and no termination flag: the harness works again."""
    assert not dist.is_initialized()
    assert run_threads(2, lambda rank: rank) == [0, 1]


def test_exception_of_one_rank_is_raised_with_its_rank() -> None:
    """The others wait in a collective for a rank that raised: its exception comes out, at once, with its rank."""

    def body(rank: int) -> None:
        if rank == 2:
            raise ValueError("a bad shard")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(ValueError, match="a bad shard") as caught:
        run_threads(4, body)
    assert "rank 2 of 4" in "".join(caught.value.__notes__)
    assert time.monotonic() - start < 5
    check_nothing_is_left()
