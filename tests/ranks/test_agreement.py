# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What ranks agree on at their start: by digests, and in the store they met in where some may not know of zero_topo."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist

from benchmarks.bare import fake_world
from tests.harness import run_threads
from tests.ranks.worlds import world
from zero_topo.engine import agreement, start
from zero_topo.engine.agreement import agree, check_agreement, check_blocks
from zero_topo.topology.devices import DeviceTree
from zero_topo.topology.model import Topology
from zero_topo.topology.seats import Seat

CPU = torch.device("cpu")


def told_alike(size: int, say: Any) -> str:
    """What all ranks are told when each agrees to `say(rank)` in vain."""

    def rank_main(rank: int) -> str:
        with pytest.raises(ValueError) as caught:
            agree(say(rank), Seat(f"n{rank // 2}"), CPU)
        return str(caught.value)

    (said,) = set(run_threads(size, rank_main))
    return said


def test_ranks_that_say_the_same_gather_digests_alone() -> None:
    """48 bytes a rank, however long the text, and no object travels."""
    gathered: list[int] = []
    gather = dist.all_gather_into_tensor

    def counted(table: torch.Tensor, own: torch.Tensor) -> None:
        gathered.append(own.nbytes)
        gather(table, own)

    def rank_main(rank: int) -> list[Seat]:
        return agree({"order": list(range(100_000))}, Seat(f"n{rank // 2}", package=rank if rank else None), CPU)

    with (
        patch.object(dist, "all_gather_into_tensor", counted),
        patch.object(dist, "all_gather_object", side_effect=AssertionError),
        patch.object(dist, "broadcast_object_list", side_effect=AssertionError),
    ):
        seats = run_threads(4, rank_main)
    assert gathered == [48] * 4
    assert [seat.package for seat in seats[0]] == [None, 1, 2, 3]
    hosts = [seat.host for seat in seats[0]]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert all(found == seats[0] for found in seats)


def test_one_rank_of_each_kind_tells_what_it_has() -> None:
    """Two texts travel for two kinds among six ranks; most ranks are right, whichever rank 0 belongs to."""
    leaders: list[int] = []
    broadcast = dist.broadcast_object_list

    def counted(box: list[Any], src: int) -> None:
        leaders.append(src)
        broadcast(box, src=src)

    with patch.object(dist, "broadcast_object_list", counted):
        said = told_alike(6, lambda rank: {"zero": {"bucket": 5 if rank < 2 else 7, "stage": 3}})
    assert leaders.count(2) == leaders.count(0) == 6 and len(leaders) == 12
    assert said.startswith("ranks do not agree with rank 2 of host n1 and 3 more: rank 0 of host n0 and 1 more has ")
    assert "has zero.bucket 5 in place of 7; give" in said and "stage" not in said


def test_what_only_one_kind_has_is_named() -> None:
    """A parameter that the others do not have, and no more of a long list than helps."""
    said = told_alike(3, lambda rank: {"model": {f"w{i}": [2] for i in range(3 if rank else 9)}})
    assert "rank 0 of host n0 has model.w3 [2] in place of absent, " in said
    assert "w6" in said and "w7" not in said


def test_a_rank_that_refuses_is_heard_everywhere() -> None:
    """What only one rank can see ends all, with its words."""
    said = told_alike(4, lambda rank: {"refused": "no memory"} if rank == 3 else {"zero_topo": ""})
    assert said.startswith("rank 3 of host n1 refuses: no memory; ")


def test_misplaced_ranks_are_told_by_the_names_of_their_hosts() -> None:
    """Hosts are compared by digests; the names come when they are needed."""
    machine = Topology("tree", 2, 1, 2)
    config = world({"scheme": "zero3"}, machine).config

    def rank_main(rank: int) -> str:
        with pytest.raises(ValueError) as caught:
            check_agreement(config, CPU)
        return str(caught.value)

    with patch.object(agreement, "own_seat", lambda machine, device: Seat(f"host{dist.get_rank() % 2}")):
        (said,) = set(run_threads(4, rank_main))
    assert "puts ranks 0-1 on node 0, but of these host 'host1' runs 1 and host 'host0' others" in said


def test_a_gpu_says_its_address_and_its_package() -> None:
    """The package where ranks share GPUs; nothing of a device where the machine is emulated, and on a CPU."""
    device = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=0)
    tree = DeviceTree("rocm-smi", 1, packages=(3,), bus_ids=("0001:c1:00.0",))
    seats = []
    with (
        patch.object(torch.cuda, "get_device_properties", lambda _: device),
        patch.object(agreement, "ask_tools", lambda: SimpleNamespace(tree=tree)),
    ):
        for gpu, ranks_per_gpu, emulates in [
            ("cuda", 2, False),
            ("cuda", 1, False),
            ("cuda", 2, True),
            ("cpu", 2, False),
        ]:
            machine = Topology("tree", 1, 2, ranks_per_gpu, emulated=emulates)
            seats.append(agreement.own_seat(machine, torch.device(gpu)))
    found = [(seat.bus_id, seat.package) for seat in seats]
    assert found == [("0001:c1:00.0", 3), ("0001:c1:00.0", None), (None, None), (None, None)]


def test_seventy_five_thousand_ranks_agree_in_megabytes() -> None:
    """One table of digests for 75,264 ranks; the machine's order, a sixth of it for each of them, stays where it is."""
    size = 75_264
    order = tuple(reversed(range(size)))
    machine = Topology("frontier", size // 8, 4, 2, order=order, emulated=True)
    config = world({"scheme": "topo"}, machine).config
    gathered: list[int] = []
    gather = dist.all_gather_into_tensor

    def counted(table: torch.Tensor, own: torch.Tensor) -> None:
        gathered.append(table.nbytes)
        gather(table, own)

    with fake_world(size, 5), patch.object(dist, "all_gather_into_tensor", counted):
        check_agreement(config, CPU)
    assert gathered == [48 * size]


# -- a rank that may not know of zero_topo -----------------------------------------------------------------------------


def meet(blocks: list[bool | None], store: dist.Store | None = None) -> list[str]:
    """What ranks with and without a block are told; None does not come."""
    store = store or dist.HashStore()

    def rank_main(rank: int, has_block: bool) -> str:
        try:
            check_blocks(store, rank, len(blocks), has_block)
        except (ValueError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        return "goes on"

    with ThreadPoolExecutor(len(blocks)) as pool:
        said = [pool.submit(rank_main, rank, has) for rank, has in enumerate(blocks) if has is not None]
        return [one.result() for one in said]


def test_ranks_with_the_block_name_those_without() -> None:
    """Those without go on at once."""
    said = meet([True, False, True, False])
    assert said[1] == said[3] == "goes on"
    assert said[0] == said[2]
    assert said[0].startswith('ValueError: 2 of 4 ranks have no "zero_topo" block in their DeepSpeed config, such as ')
    assert "rank 1 of host " in said[0] and "rank 3 of host " in said[0]


def test_engine_after_engine_meets_anew() -> None:
    """A second engine is not taken for the first: what was left in the store belongs to one engine."""
    store = dist.HashStore()
    assert meet([False, False], store) == ["goes on"] * 2
    assert meet([True, True], store) == ["goes on"] * 2
    assert meet([True, False], store)[0].startswith("ValueError: 1 of 2")


def test_a_rank_that_does_not_come_is_named() -> None:
    """Its script may not import zero_topo: after the store's timeout the others say so."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    said = meet([True, None, True], store)
    assert said == [said[0]] * 2
    assert said[0].startswith("TimeoutError: ranks [1] did not begin the engine")


def test_a_rank_alone_without_a_block_never_waits() -> None:
    """Whoever imports zero_topo for a plan, on one rank, must not change how stock DeepSpeed starts."""
    assert meet([False, None, None, None]) == ["goes on"]


def test_all_ranks_plan_for_the_smallest_device() -> None:
    """Devices of one job may differ by a little, and ranks that planned each for its own would not agree."""
    device = deepspeed.accelerator.get_accelerator()
    with (
        patch.object(device, "is_synchronized_device", lambda: False),
        patch.object(device, "total_memory", lambda: 10**11 + dist.get_rank()),
    ):
        assert run_threads(3, lambda rank: start.least_memory(CPU)) == [10**11] * 3
    assert start.least_memory(CPU) is None
