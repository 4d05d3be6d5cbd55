# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A disk that is full for one rank costs one checkpoint: not the ones before, not the run, and
nobody hangs.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.launcher.checkpoints import job, loaded
from tests.launcher.training import advance, block, close, running, start

FULL_AT = 1000  # bytes of a file
UNLUCKY = 1


@contextmanager
def full_disk(rank: int) -> Iterator[None]:
    """Files of one rank end after some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == UNLUCKY:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def whole(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, when all ranks have come here. Collective."""
    dist.barrier()
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    dist.barrier()
    return found


def test_a_full_disk_costs_one_checkpoint(rank: int, shared_path: Path) -> None:
    """Every rank reads whose file and what to do; the same tag's older files stay; training goes on
    bit for bit.
    """
    run = job(block("topo", quantize={}), "bf16")
    with running(run) as engine:
        undisturbed = advance(run, engine, 0, run.steps)
    engine = start(run)
    losses = advance(run, engine, 0, 2)
    engine.save_checkpoint(str(shared_path), tag="good")
    before = whole(shared_path)
    assert before["latest"] == b"good"
    for tag in ("good", "bad"):
        with (
            full_disk(rank),
            pytest.raises(
                OSError, match=rf"rank {UNLUCKY} of host .*/{tag}/.*_{UNLUCKY}_.*delete older"
            ),
        ):
            engine.save_checkpoint(str(shared_path), tag=tag)
        assert whole(shared_path) == before and not (shared_path / "bad").exists()
    assert losses + advance(run, engine, 2, run.steps) == undisturbed
    engine.save_checkpoint(str(shared_path), tag="bad")
    assert whole(shared_path)["latest"] == b"bad"
    close(engine)
    with loaded(run, shared_path):
        pass
