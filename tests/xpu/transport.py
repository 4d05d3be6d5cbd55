# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Collectives between XPUs of the stand-in: gloo, which carries tensors of the CPU alone, with
copies on both ends.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future
from torch.utils import _pytree as pytree

BACKEND = "stand_in"
"""Its name, as ``dist_backend`` of ``deepspeed.init_distributed``."""
NAMES = {
    **{
        name: name
        for name in (
            "allgather",
            "allreduce",
            "alltoall",
            "broadcast",
            "gather",
            "reduce",
            "scatter",
        )
    },
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "_reduce_scatter_base",
}
"""Of each collective of a process group, its name in gloo."""


class Group(dist.ProcessGroup):
    """A process group of XPUs; a collective has ended when its call returns."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch declares one of two constructors
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        """As torch asks for it."""
        return BACKEND

    def barrier(self, opts: Any = None) -> dist.Work:
        """Waits for all."""
        self._gloo.barrier(dist.BarrierOptions() if opts is None else opts).wait()
        return _ended(None)


def _collective(name: str) -> Callable[..., dist.Work]:
    # Gloo takes no tables of messages
    flat = name.endswith("gather_base") or name.endswith("scatter_base")

    def run(self: Group, *arguments: Any) -> dist.Work:
        tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
        whole = [x.detach().to("cpu", copy=True) for x in tensors]
        copies = iter([x.view(-1) for x in whole] if flat else whole)
        there = pytree.tree_map_only(Tensor, lambda _: next(copies), arguments)
        getattr(self._gloo, name)(*there).wait()
        with torch.no_grad():
            for x, copy in zip(tensors, whole, strict=True):
                x.copy_(copy)
        return _ended(tensors)

    return run


def _ended(result: Any) -> dist.Work:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


for own, gloos in NAMES.items():
    setattr(Group, own, _collective(gloos))
dist.Backend.register_backend(BACKEND, Group, devices=["cpu", "xpu"])
