# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What tests may rely on when their ranks are threads: these collectives, groups of ranks, failures that surface."""

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


def test_results_come_in_rank_order() -> None:
    """Each rank sees its own rank and the common arguments; results are in rank order."""
    assert run_threads(5, lambda rank, scale: (dist.get_rank(), rank * scale), 10) == [(r, 10 * r) for r in range(5)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_gather_and_all_to_all_move_bytes(asynchronous: bool) -> None:
    """The two collectives of packed buffers work on uint8, waited for or not."""

    def body(rank: int) -> tuple[list[int], list[int]]:
        world = dist.get_world_size()
        gathered = torch.empty(2 * world, dtype=torch.uint8)
        work = dist.all_gather_into_tensor(gathered, torch.full((2,), rank, dtype=torch.uint8), async_op=asynchronous)
        exchanged = torch.empty(world, dtype=torch.uint8)
        sent = torch.arange(world, dtype=torch.uint8) + 10 * rank
        other = dist.all_to_all_single(exchanged, sent, async_op=asynchronous)
        for handle in (work, other):
            if handle is not None:
                handle.wait()
        return gathered.tolist(), exchanged.tolist()

    for rank, (gathered, exchanged) in enumerate(run_threads(4, body)):
        assert gathered == [0, 0, 1, 1, 2, 2, 3, 3]
        assert exchanged == [10 * source + rank for source in range(4)]


def test_all_to_all_with_unequal_splits() -> None:
    """Split sizes are honoured: what rank r sends to rank d has length r + d."""

    def body(rank: int) -> list[float]:
        sizes = [rank + other for other in range(3)]
        received = torch.empty(sum(sizes))
        dist.all_to_all_single(received, torch.full((sum(sizes),), float(rank)), sizes, sizes)
        return received.tolist()

    assert run_threads(3, body)[2] == [0.0] * 2 + [1.0] * 3 + [2.0] * 4


def test_reductions() -> None:
    """Sum, maximum and reduce-scatter are real."""

    def body(rank: int) -> tuple[float, float, list[float]]:
        total, largest = torch.tensor([float(rank)]), torch.tensor([float(rank)])
        dist.all_reduce(total)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.arange(8.0))
        return float(total), float(largest), part.tolist()

    assert run_threads(4, body)[1] == (6.0, 3.0, [8.0, 12.0])


@pytest.mark.parametrize("local", [False, True])
def test_groups_do_not_mix(local: bool) -> None:
    """Collectives of disjoint groups, created by everybody or only by their members, keep to their members."""

    def body(rank: int) -> list[list[int]]:
        world = dist.get_world_size()
        members = [[r for r in range(world) if r % 2 == parity] for parity in (0, 1)]
        if local:
            group = dist.new_group(members[rank % 2], use_local_synchronization=True)
        else:
            group = [dist.new_group(ranks) for ranks in members][rank % 2]
        seen = []
        for _ in range(20):
            ranks = torch.empty(world // 2, dtype=torch.int64)
            dist.all_gather_into_tensor(ranks, torch.tensor([rank]), group=group)
            seen.append(ranks.tolist())
        return seen

    for rank, seen in enumerate(run_threads(16, body)):
        assert seen == [[r for r in range(16) if r % 2 == rank % 2]] * 20


def test_objects_travel() -> None:
    """all_gather_object and broadcast_object_list work, for checks across ranks."""

    def body(rank: int) -> list[object]:
        objects: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(objects, {"rank": rank})
        return objects

    assert run_threads(3, body)[0] == [{"rank": rank} for rank in range(3)]


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


def test_backward_runs_in_threads() -> None:
    """Autograd works in every rank."""

    def body(rank: int) -> float:
        x = torch.tensor(2.0, requires_grad=True)
        (x * x * rank).backward()
        assert x.grad is not None
        return float(x.grad)

    assert run_threads(3, body) == [0.0, 4.0, 8.0]


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
