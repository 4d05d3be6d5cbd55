# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The command line of ``torchrun`` (pure): one on each node, which finds the others by a rendezvous.

Note [Rendezvous]
    ``standalone``: one node, which needs no address. ``static``: each node is told its number and the first one's
    address, so that numbers of ranks follow those of nodes. ``c10d``: nodes are told an address and the job's name and
    number themselves by it; this is what torchrun recommends for several nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_topo.launch.commands import program
from zero_topo.topology.launchers import launcher_view
from zero_topo.topology.probes import slurm

STANDALONE, STATIC, C10D = KINDS = ("standalone", "static", "c10d")


def rendezvous(
    nodes: int, kind: str, port: int, host: str | None = None, node: int | None = None, job: str = "zero-topo"
) -> list[str]:
    """Options of ``torchrun`` that say how the nodes of a job find each other.

    Args:
        nodes: how many.
        kind: one of :data:`KINDS`.
        port: on the first node.
        host: the first node; None on one node.
        node: number of this node, for "static"; None for the others.
        job: a name that all nodes share, for "c10d".

    Raises:
        ValueError: for what nodes would wait for in vain, naming the option.
    """
    if kind not in KINDS:
        raise ValueError(f"--rendezvous {kind}: unknown; choose one of {', '.join(KINDS)}")
    if kind == STANDALONE:
        if nodes > 1:
            raise ValueError(f"--rendezvous standalone: that is one node, not {nodes}; use c10d or static")
        return ["--standalone"]
    if host is None:
        raise ValueError(f"--rendezvous {kind}: where? give --host, the first node's, the same on every node")
    if kind == C10D:
        return ["--nnodes", str(nodes), "--rdzv-backend", C10D, "--rdzv-endpoint", f"{host}:{port}", "--rdzv-id", job]
    if node is None or not 0 <= node < nodes:
        raise ValueError(f"--rendezvous static: give --node-rank, a number of 0 to {nodes - 1} for this node")
    return ["--nnodes", str(nodes), "--node-rank", str(node), "--master-addr", host, "--master-port", str(port)]


def of_step(env: Mapping[str, str]) -> dict[str, Any]:
    """What Slurm says about the nodes of a step with a task on each, as arguments of :func:`rendezvous`; or nothing.

    Args:
        env: environment variables of this task.

    Raises:
        ValueError: if the step has several tasks on a node: torchrun starts the ranks itself.
    """
    view = launcher_view(env) if slurm.in_step(env) else None
    if view is None or view.source != "slurm":
        return {}
    if view.ranks_per_node != 1:
        raise ValueError(
            f"srun started {view.ranks_per_node} tasks on each node, and torchrun starts the ranks itself; use "
            "srun --ntasks-per-node=1"
        )
    first = view.hosts[0] if view.hosts else None
    return {"nodes": view.world_size, "host": first, "node": view.node, "job": env.get("SLURM_JOB_ID", "zero-topo")}


def torchrun(command: tuple[str, ...], ranks_per_node: int, meeting: list[str]) -> list[str]:
    """The words of ``torchrun`` on this node, those of :func:`rendezvous` among them.

    Raises:
        ValueError: if the command is no Python script or module.
    """
    kind, rest = program(command, "torchrun")
    return ["torchrun", *meeting, "--nproc-per-node", str(ranks_per_node), *kind, *rest]
