# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The launch itself: what every other test in this directory takes for granted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.eight_ranks


def test_every_rank_is_there_once(rank: int, world_size: int) -> None:
    """The fixtures tell each process its own place in one common group."""
    ranks = torch.zeros(world_size, dtype=torch.int64)
    ranks[rank] = 1
    dist.all_reduce(ranks)
    assert ranks.tolist() == [1] * world_size


def test_shared_path_is_one_directory(rank: int, world_size: int, shared_path: Path) -> None:
    """What one rank writes there, the others find: checkpoints need it."""
    (shared_path / f"{rank}").write_text("here")
    dist.barrier()
    assert sorted(int(path.name) for path in shared_path.iterdir()) == list(range(world_size))


def test_tmp_path_is_the_ranks_own(rank: int, world_size: int, tmp_path: Path) -> None:
    """Ranks do not write into each other's temporary directories."""
    paths: list[str | None] = [None] * world_size
    dist.all_gather_object(paths, str(tmp_path))
    assert len(set(paths)) == world_size


def test_tests_start_from_the_same_random_state(world_size: int) -> None:
    """Models built without a seed of their own are equal on all ranks."""
    drawn: list[float | None] = [None] * world_size
    dist.all_gather_object(drawn, float(torch.rand(()) + random.Random(0).random()))
    assert len(set(drawn)) == 1
