# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A transport may own the memory of what it sends and receives: all phases ask their group
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bare import BareStep, fake_world
from tests.plans import resolve
from tests.ranks.worlds import shuffled
from zero_topo.collectives.backends import Registered, transport
from zero_topo.collectives.meter import Meter
from zero_topo.collectives.queue import Handle
from zero_topo.collectives.transport import Group
from zero_topo.topology.presets import emulated

CODED: dict[str, Any] = {"scheme": "topo", "quantize": {"resident": "int8", "block_size": 64}}
OKTOPK: dict[str, Any] = {"scheme": "topo", "sync": {"mode": "oktopk", "density": 0.1}}
SCHEMES: dict[str, dict[str, Any]] = {
    "zero3": {"scheme": "zero3"},
    "zero++": {"scheme": "zero++"},
    "codes": CODED,
    "q4": {
        "scheme": "topo",
        "sync": {"mode": "quantized", "bits": 4},
        "publish": {"delta": "int4"},
    },
}


@pytest.mark.parametrize("placed", ["block", "shuffled"])
@pytest.mark.parametrize("name", SCHEMES)
def test_groups_allocate_what_they_exchange(name: str, placed: str) -> None:
    """All that is received, and all packed buffers; what is not encoded may be sent from the
    weights themselves.
    """
    machine = emulated(2, 4, 2)
    config = resolve(
        shuffled(machine) if placed == "shuffled" else machine, **SCHEMES[name], overlap=False
    )
    owned: list[Tensor] = []
    exchanges: list[tuple[Tensor, Tensor]] = []

    def allocate(group: Group, *size: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        owned.append(torch.empty(*size, dtype=dtype, device=device))
        return owned[-1]

    def ended(group: Group, work: Any, sent: Tensor, received: Tensor) -> Handle[Tensor]:
        exchanges.append((sent, received))
        return wait(group, work, sent, received)

    wait = Group._ended
    with fake_world(16):
        step = BareStep(config, [8192] * 4)
        with patch.object(Group, "allocate", allocate), patch.object(Group, "_ended", ended):
            for phase in ("gather_forward", "gather_backward", "scatter", "publish"):
                step.phases()[phase]()
        stored = {tensor.untyped_storage().data_ptr() for tensor in step.engine.weights.tensors()}
    own = {tensor.untyped_storage().data_ptr() for tensor in owned}
    large = [pair for pair in exchanges if pair[0].nbytes > 64]  # not the agreed sizes
    assert len(large) >= 6
    assert {received.untyped_storage().data_ptr() for _, received in large} <= own
    assert {sent.untyped_storage().data_ptr() for sent, _ in large} <= own | stored


class Pools:
    """Stands in for torch's pools of memory on a GPU, and for NCCL's part of them."""

    def __init__(self) -> None:
        self.mem_allocator = object()
        self.made: list[Any] = []
        self.registered: list[Any] = []
        self.used: list[Any] = []

    def MemPool(self, allocator: Any) -> Any:
        """One that takes its memory from NCCL."""
        assert allocator is self.mem_allocator
        self.made.append(SimpleNamespace())
        return self.made[-1]

    def register_mem_pool(self, pool: Any) -> None:
        """With a communicator."""
        self.registered.append(pool)

    @contextmanager
    def use_mem_pool(self, pool: Any) -> Iterator[None]:
        """For what this thread allocates."""
        self.used.append(pool)
        yield


def test_groups_share_registered_memory_from_their_first_exchange_on() -> None:
    """It makes the communicator with which memory is registered: once for each group, and for all
    its copies.
    """
    nccl = Pools()
    pools: list[Any] = []
    process_group = SimpleNamespace(_get_backend=lambda device: nccl)
    place = 1, 2, 0, (0, 1), "node", process_group, Meter(True)
    node, world = Registered(pools, *place), Registered(pools, *place)
    copies = [node.metered("gather"), node.metered("publish"), world.metered("gather")]
    message = torch.arange(4, dtype=torch.uint8)

    def exchange(received: Tensor, sent: Tensor, group: Any, async_op: bool) -> Any:
        received.copy_(sent.expand_as(received))
        return SimpleNamespace(wait=lambda: None)

    with (
        patch.object(torch.cuda, "MemPool", nccl.MemPool),
        patch.object(torch.cuda, "use_mem_pool", nccl.use_mem_pool),
        patch.object(dist, "all_gather_into_tensor", exchange),
    ):
        for copy, used, registered in zip(copies, (0, 1, 2), (1, 1, 2), strict=True):
            assert copy.gather(message).tolist() == [message.tolist()] * 2
            assert (len(nccl.used), len(nccl.registered)) == (used, registered)
    assert len(nccl.made) == 1
    assert {id(pool) for pool in (*nccl.used, *nccl.registered)} == {id(nccl.made[0])}


def test_any_first_exchange_registers_memory() -> None:
    """Also a reduce-scatter, and one of rows of different numbers."""
    table = torch.arange(8, dtype=torch.uint8).view(2, 4)

    def exchange(received: Tensor, sent: Any, *sizes: Any, group: Any, async_op: bool) -> Any:
        return SimpleNamespace(wait=lambda: None)

    runs: list[Callable[[Group], object]] = [
        lambda group: group.sum_later(table, torch.bfloat16),
        lambda group: group.all_to_all_known(table, [1, 1], [1, 1]),
    ]
    for run in runs:
        nccl = Pools()
        process_group = SimpleNamespace(_get_backend=lambda device, nccl=nccl: nccl)
        group = Registered([], 1, 2, 0, (0, 1), "node", process_group, Meter(True)).metered("sync")
        names = ("reduce_scatter_single", "reduce_scatter_tensor", "all_to_all_single")
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(patch.object(dist, name, exchange, create=True))
            stack.enter_context(patch.object(torch.cuda, "MemPool", nccl.MemPool))
            stack.enter_context(patch.object(torch.cuda, "use_mem_pool", nccl.use_mem_pool))
            run(group)
        assert len(nccl.registered) == 1


def test_registered_memory_needs_nccl() -> None:
    """Any other backend is refused by name."""
    with (
        fake_world(2),
        pytest.raises(ValueError, match=r"registered_buffers = true needs NCCL, .* remove the key"),
    ):
        transport(registered=True)
