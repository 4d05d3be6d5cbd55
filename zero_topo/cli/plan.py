# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo plan``: who holds what under a scheme, and what it costs in memory and bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from zero_topo.cli.inputs import machine, read_count
from zero_topo.cli.tables import memory_table, places_table, show, volume_table
from zero_topo.config import SCHEMES, ResolvedConfig, ZeroTopoConfig
from zero_topo.cost import Workload, by_domain, memory_bytes, step_bytes
from zero_topo.topology import Topology

ITEMSIZE = 2  # 16-bit training


@dataclass(frozen=True)
class Costed:
    """A scheme on a machine with its costs per rank: bytes held by role, bytes sent by phase and domain."""

    config: ResolvedConfig
    memory: dict[str, int]
    sent: dict[tuple[str, str], int]

    def to_json(self) -> dict[str, Any]:
        """In JSON types; bytes."""
        sent = [{"phase": phase, "domain": domain, "bytes": n} for (phase, domain), n in self.sent.items()]
        return {**self.config.to_json(), "memory": self.memory, "sent": sent, "sent_by_domain": by_domain(self.sent)}


def plan(
    params: Annotated[str, typer.Option(help="Parameters of the model, such as 20e9 or 20B.")],
    topology: Annotated[
        str, typer.Option(metavar="FILE|PRESET", help="A .json file, a preset or a JSON object.")
    ] = "auto",
    scheme: Annotated[list[str] | None, typer.Option(help="Scheme to show, may be repeated; default: all six.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks; default: what the launcher says.")] = None,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches per optimizer step.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes.")] = False,
) -> None:
    """Show each scheme's plan for a model in 16-bit training with Adam: degrees, memory and bytes sent, per rank."""
    found = machine(topology, world_size)
    work = Workload.uniform([read_count(params, "--params")], ITEMSIZE, micro_batches)
    rows = {name: _cost(name, found, work) for name in scheme or SCHEMES}
    if as_json:
        schemes = [row.to_json() for row in rows.values()]
        head = {"topology": found.to_json(), "params": work.numels[0], "micro_batches": micro_batches}
        print(json.dumps({**head, "schemes": schemes}, indent=2))
        return
    show(places_table({name: row.config for name, row in rows.items()}, _title(found, work)))
    show(memory_table({name: row.memory for name, row in rows.items()}, found.memory_per_rank))
    show(volume_table({name: by_domain(row.sent) for name, row in rows.items()}, micro_batches))
    if len(rows) == 1:
        for note in next(iter(rows.values())).config.notes:
            print(f"- {note}")


def _cost(scheme: str, found: Topology, work: Workload) -> Costed:
    config = ZeroTopoConfig.parse({"scheme": scheme}).resolve(found)
    return Costed(config, memory_bytes(config, work, accumulation_itemsize=ITEMSIZE), step_bytes(config, work))


def _title(found: Topology, work: Workload) -> str:
    shape = f"{found.nodes} x {found.gpus_per_node} x {found.ranks_per_gpu} = {found.world_size} ranks"
    return f"{work.numels[0]:,} parameters on {found.name}: {shape}"
