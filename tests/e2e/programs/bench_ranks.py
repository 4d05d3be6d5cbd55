# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Programs for the ranks of `benchmarks.ranks`: one tries the ring, of two rank 1 fails."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.control import Control
from benchmarks.emulated_cluster.ring import ring_reduce_scatter_tensor


def ring(settings: dict[str, Any], control: Control) -> None:
    """Rank 0 tells whether every rank's ring gave the exact sums, and left the input as it was."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [torch.arange(size * settings["numel"]) * (other + 1) for other in range(size)]
    own, wanted = inputs[rank].clone(), sum(inputs).view(size, -1)[rank]  # type: ignore[union-attr]
    ring_reduce_scatter_tensor(output := torch.empty(settings["numel"], dtype=own.dtype), own)
    kept = torch.equal(own, inputs[rank])
    # as DeepSpeed calls it: the output is this rank's part of the input
    ring_reduce_scatter_tensor(part := own.view(size, -1)[rank], own)
    ranks: list[Any] = [None] * size
    dist.all_gather_object(
        ranks, kept and torch.equal(output, wanted) and torch.equal(part, wanted)
    )
    answer = control.ask({"event": "question"})
    control.send({"exact": ranks, "answer": answer, "environment": os.environ["LOCAL_SIZE"]})


def failing(settings: dict[str, Any], control: Control) -> None:
    """Rank 1 fails while the others wait for it."""
    if int(os.environ["RANK"]) == 1:
        raise ZeroDivisionError(settings["words"])
    time.sleep(600)


def killed(settings: dict[str, Any], control: Control) -> None:
    """Rank 1 is killed while the others wait for it."""
    if int(os.environ["RANK"]) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
