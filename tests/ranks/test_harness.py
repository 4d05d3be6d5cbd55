# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads: failures and hangs surface, and a pretended world has its size. All other tests of ranks
use the collectives."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.bare import fake_world
from tests import device
from tests.harness import run_threads
from zero_topo.quant.operands import Codes


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


def test_hang_is_reported_with_the_place() -> None:
    """Collectives that do not match end in a TimeoutError that shows where each rank waits."""

    def body(rank: int) -> None:
        if rank != 1:
            dist.barrier()

    with pytest.raises(TimeoutError, match=r"ranks \[0, 2\] of 3") as caught:
        run_threads(3, body, timeout=0.5)
    assert "dist.barrier()" in "".join(caught.value.__notes__)
    check_nothing_is_left()


def test_fake_world_is_as_large_as_told() -> None:
    """One process is a rank of a Frontier-sized world and builds a mesh of it."""
    with fake_world(9408 * 8, rank=77):
        assert (dist.get_rank(), dist.get_world_size()) == (77, 75264)
        mesh = init_device_mesh("cpu", (9408, 8), mesh_dim_names=("nodes", "ranks"))
        assert mesh.get_local_rank("ranks") == 77 % 8
        assert dist.get_world_size(mesh.get_group("nodes")) == 9408
    assert not dist.is_initialized()


def test_fake_world_excludes_threads() -> None:
    """The two cannot be mixed: the mistake is named."""
    with fake_world(4), pytest.raises(RuntimeError, match="fake_world"):
        run_threads(2, lambda rank: rank)


def test_on_a_gpu_tests_create_tensors_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device in the call, also by a generator of the host. What the package creates stays where it says."""
    monkeypatch.setattr(device, "DEVICE", torch.device("meta"))
    with device.OnDevice():
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(1))
        kinds = [x.device.type for x in (torch.zeros(3), torch.tensor([1.0]), drawn, torch.ones(2, device="cpu"))]
        codes = Codes.build([(0, 64)], 1, 64, torch.device("cpu"))
    assert kinds == ["meta", "meta", "meta", "cpu"] and codes.slot_of.device.type == "cpu"
