# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Ok-Topk over MPI and over torch on the same gradients, under mpirun; rank 0 prints SAME if all
bits agree.

Over MPI, torch's exchanges raise.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from zero_topo.config import ZeroTopoConfig, resolve_config
from zero_topo.engine.stage3 import Stage3
from zero_topo.leaving import leave
from zero_topo.sync import Parameter
from zero_topo.sync.sparse import Sparse
from zero_topo.topology.presets import emulated

NUMELS, STEPS = (10_000, 37), 7  # a matrix, and a vector that is reduced densely next to it


def synced(transport: str, sharded: bool) -> tuple[list[torch.Tensor], int]:
    """What the optimizer gets at each step, and the residual at the end; bytes sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    places = (
        {"scheme": "topo"}
        if sharded
        else {"weights": "rank", "gradients": "rank", "optimizer": "rank"}
    )
    sync = {
        "mode": "oktopk",
        "tau": 3,
        "tau_prime": 2,
        "density": 0.02,
        "sharded": sharded,
        "transport": transport,
    }
    plain = {"weights": None, "secondary": None, "gradients": None}
    config = resolve_config(
        ZeroTopoConfig.parse({**places, "quantize": plain, "sync": sync}), emulated(size, 1, 1)
    )
    parameters = [Parameter("w", NUMELS[0], 2), Parameter("b", NUMELS[1], 1, place=1)]
    fp32 = torch.float32
    engine = Stage3(config, parameters, (), torch.empty(0), fp32, fp32, 1 << 20, lambda: 1.0, tuple)
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        grads = [torch.randn(numel, generator=generator) ** 3 for numel in NUMELS]
        engine.gradients.scatter([0, 1], grads, last=False)
        engine.gradients.sync()
        found.append(engine.gradients.optimizer_rows().clone())
        engine.end_step(skipped=False)
    mode = engine.gradients.mode
    assert isinstance(mode, Sparse)
    gathered = mode.peers.gather(torch.arange(5.0) + rank)
    return [*found, mode.residual, gathered], sum(engine.meter.total.values())


def synced_over_mpi(sharded: bool) -> tuple[list[torch.Tensor], int]:
    """The same over MPI, and over nothing else."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a message goes over torch")

    with patch("zero_topo.collectives.backends.Gloo._swap", refuse):
        return synced("mpi", sharded)


def main() -> None:
    """Compare both transports."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = (
        os.environ[f"OMPI_COMM_WORLD_{word}"] for word in ("RANK", "SIZE")
    )
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
    dist.init_process_group("gloo")
    same = True
    for sharded in (False, True):
        (mine, sent), (theirs, sent_too) = synced_over_mpi(sharded), synced("torch", sharded)
        same &= (
            all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
            and sent == sent_too > 0
        )
    verdicts = torch.tensor([int(same)])
    dist.all_reduce(verdicts, dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        print("SAME" if verdicts.item() else "DIFFERENT", flush=True)
    leave()


if __name__ == "__main__":
    main()
