# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Slurm steps as tests make them up: their variables, and the node of each task as Slurm documents
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_topo.topology import Topology


def step(nodes: int, per_node: int, distribution: str = "block", **more: str) -> dict[str, str]:
    """The variables of an srun step on hosts n0, n1 and so on, without those of a single task."""
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": named(range(nodes)),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_DISTRIBUTION": distribution,
        **more,
    }


def shape(topology: Topology) -> tuple[int, int, int]:
    """Of the tree: nodes, GPUs in each, ranks in each of those."""
    return topology.nodes, topology.gpus_per_node, topology.ranks_per_gpu


def named(nodes: Sequence[int]) -> str:
    """A plain list of hosts."""
    return ",".join(f"n{node}" for node in nodes)


def deal(nodes: int, per_node: int, plane: int) -> list[int]:
    """The node of each task: ``plane`` tasks to each node with room, in turn."""
    room, tasks = [per_node] * nodes, []
    while any(room):
        for node in range(nodes):
            count = min(plane, room[node])
            tasks += [node] * count
            room[node] -= count
    return tasks


def task(tasks: Sequence[int], rank: int) -> dict[str, str]:
    """The variables of one task; ``tasks`` are the nodes of all."""
    numbers = {"PROCID": rank, "LOCALID": tasks[:rank].count(tasks[rank]), "NODEID": tasks[rank]}
    return {f"SLURM_{name}": str(number) for name, number in numbers.items()}
