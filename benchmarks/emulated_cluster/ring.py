# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""A ring reduce-scatter for stock DeepSpeed on gloo, so that a baseline is not slowed by its
backend.

gloo has no reduce-scatter: torch runs an all-reduce and drops what is not wanted, which sends every
byte twice. NCCL and RCCL, where stock ZeRO-3 runs, send it once, in a ring. A baseline measured
with gloo's own would therefore look worse than it is; the benchmark shows it both ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed.comm.comm as deepspeed_comm
import torch
import torch.distributed as dist
from torch import Tensor


def ring_reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> None:
    """``torch.distributed.reduce_scatter_tensor`` for sums, blocking.

    1. pass the part of the rank behind on to the rank ahead;
    2. add the own values to what comes from behind, and pass that on; ``d - 1`` times, ``1 / d`` of
       the input each;
    3. what comes last is this rank's own part, complete.

    Args:
        output: ``[n]``; may be this rank's part of ``input``.
        input: ``[d * n]``, any dtype; summed in it, as NCCL does.
        op: SUM.
        group: of ``d`` ranks; None is the world.
        async_op: False.

    Raises:
        NotImplementedError: for another ``op``, or ``async_op``.
    """
    if op != dist.ReduceOp.SUM or async_op:
        raise NotImplementedError(
            f"the benchmark's ring sums and blocks, it was asked for {op}, async_op={async_op}"
        )
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    parts = input.reshape(size, -1)
    ahead = (rank + 1) % size
    behind = (rank - 1) % size
    passing = parts[behind]
    for step in range(2, size + 1):
        came = torch.empty_like(passing)
        works = [
            dist.isend(passing, group=group, group_dst=ahead),
            dist.irecv(came, group=group, group_src=behind),
        ]
        for work in works:
            assert work is not None
            work.wait()
        passing = came.add_(parts[(rank - step) % size])
    output.copy_(passing.view_as(output))


@contextmanager
def ring_under_deepspeed(enabled: bool = True) -> Iterator[None]:
    """DeepSpeed's reduce-scatters go through the ring within the block."""
    backend = deepspeed_comm.cdb
    before = backend.reduce_scatter_function
    if enabled:
        backend.reduce_scatter_function = ring_reduce_scatter_tensor
    try:
        yield
    finally:
        backend.reduce_scatter_function = before
