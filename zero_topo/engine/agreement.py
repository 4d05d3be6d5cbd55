# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Checks that need every rank: the same plan everywhere, the machine as declared, replicas bit-identical.

Each check gathers the evidence on every rank and judges it there, so all ranks raise the same error and none hangs.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_topo.config import ResolvedConfig
from zero_topo.plan import Plan
from zero_topo.topology.captures import ask_tools
from zero_topo.topology.model import Topology
from zero_topo.topology.seats import Seat, check_seats, take_seat


def check_agreement(config: ResolvedConfig, device: torch.device) -> None:
    """All ranks resolved the same plan, and ranks that the topology puts on one node or GPU are there.

    Args:
        config: this rank's.
        device: the accelerator it uses.

    Raises:
        ValueError: on every rank, naming the odd rank or host.
    """
    topology = config.topology.to_json()
    topology.pop("sources", None)  # a tool that was too slow on one node leaves a note there
    own = json.dumps([config.to_json(), topology], sort_keys=True, default=str)
    seen: list[tuple[str, Seat]] = [("", Seat(""))] * dist.get_world_size()
    dist.all_gather_object(seen, (own, own_seat(config.topology, device)))
    seats = [seat for _, seat in seen]
    different = [rank for rank, (text, _) in enumerate(seen) if text != seen[0][0]]
    if different:
        raise ValueError(
            f"ranks {different[:8]} resolved another zero_topo plan than rank 0: {seats[different[0]].host} and "
            f"{seats[0].host} see different configs or launcher environments; give every rank the same JSON"
        )
    check_seats(config.topology, seats)


def own_seat(topology: Topology, device: torch.device) -> Seat:
    """Where this rank runs; tools are asked for GPU packages only where the topology says that ranks share one."""
    if device.type != "cuda" or topology.emulated:
        return take_seat(socket.gethostname(), None, None)
    found: Any = torch.cuda.get_device_properties(device)  # torch does not declare the PCI address
    bus_id = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    tree = ask_tools().tree if topology.ranks_per_gpu > 1 else None
    return take_seat(socket.gethostname(), bus_id, tree)


def check_replicas(plan: Plan, copies: Sequence[Tensor]) -> None:
    """Compare checksums of shards over the ranks that should hold the same bits.

    Args:
        plan: says who shares: ``copies[0]`` is shared within a weights position, ``copies[1]`` within a secondary one.
        copies: this rank's shards.

    Raises:
        RuntimeError: on every rank, naming two ranks that differ.
    """
    sums = torch.stack([checksum(copy) for copy in copies])
    seen = [torch.empty_like(sums) for _ in range(plan.world_size)]
    dist.all_gather(seen, sums)
    table = torch.stack(seen).tolist()
    degrees = {"weight": plan.weights, "secondary": plan.secondary}
    for column, (name, degree) in zip(range(len(copies)), degrees.items(), strict=False):
        assert degree is not None
        for rank in range(plan.world_size):
            first = plan.rank_at[plan.position(rank) % degree]
            if table[rank][column] != table[first][column]:
                raise RuntimeError(
                    f"ranks {first} and {rank} share a {name} shard but hold different bits after publish: the run is "
                    "no longer valid; restart from the last checkpoint and report this with your configuration"
                )


def checksum(tensor: Tensor) -> Tensor:
    """Order-sensitive 64-bit checksum of a tensor's bytes (scalar int64 on its device)."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    padding = -data.numel() % 8
    words = torch.cat([data, data.new_zeros(padding)]).view(torch.int64)
    places = torch.arange(1, 2 * words.numel(), 2, device=words.device, dtype=torch.int64)
    return (words * places * 0x9E3779B1).sum()
