# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The command line of ``torchrun`` (pure): one on each node, which finds the others by a rendezvous.

Note [Rendezvous]
    ``standalone``: one node, which needs no address. ``static``: each node is told its number and the first one's
    address, so that numbers of ranks follow those of nodes. ``c10d``: nodes are told an address and the job's name and
    number themselves by it; this is what torchrun recommends for several nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_topo.launch.commands import program
from zero_topo.launch.env import PORT
from zero_topo.topology.launchers import launcher_view
from zero_topo.topology.probes import slurm

STANDALONE, STATIC, C10D = KINDS = ("standalone", "static", "c10d")


@dataclass(frozen=True)
class Rendezvous:
    """How the nodes of a job find each other.

    Attributes:
        nodes: how many.
        kind: one of :data:`KINDS`.
        host: of the first node; None on one node.
        port: on it.
        node: number of this node, for "static"; None for the others.
        job: a name that all nodes share, for "c10d".
    """

    nodes: int
    kind: str
    host: str | None = None
    port: int = PORT
    node: int | None = None
    job: str = "zero-topo"

    def __post_init__(self) -> None:
        """Refuse what nodes would wait for in vain.

        Raises:
            ValueError: naming the option.
        """
        if self.kind not in KINDS:
            raise ValueError(f"--rendezvous {self.kind}: unknown; choose one of {', '.join(KINDS)}")
        if self.kind == STANDALONE and self.nodes > 1:
            raise ValueError(f"--rendezvous standalone: that is one node, not {self.nodes}; use c10d or static")
        if self.kind != STANDALONE and self.host is None:
            raise ValueError(f"--rendezvous {self.kind}: where? give --host, the first node's, the same on every node")
        if self.kind == STATIC and (self.node is None or not 0 <= self.node < self.nodes):
            raise ValueError(f"--rendezvous static: give --node-rank, a number of 0 to {self.nodes - 1} for this node")

    def words(self) -> list[str]:
        """Options of ``torchrun``."""
        if self.kind == STANDALONE:
            return ["--standalone"]
        if self.kind == STATIC:
            where = ["--master-addr", str(self.host), "--master-port", str(self.port)]
            return ["--nnodes", str(self.nodes), "--node-rank", str(self.node), *where]
        where = ["--rdzv-endpoint", f"{self.host}:{self.port}", "--rdzv-id", self.job]
        return ["--nnodes", str(self.nodes), "--rdzv-backend", C10D, *where]


def of_step(env: Mapping[str, str]) -> dict[str, Any]:
    """What Slurm says about the nodes of a step with a task on each, as fields of :class:`Rendezvous`; or nothing.

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


def torchrun(command: tuple[str, ...], ranks_per_node: int, rendezvous: Rendezvous) -> list[str]:
    """The words of ``torchrun`` on this node.

    Raises:
        ValueError: if the command is no Python script or module.
    """
    kind, rest = program(command, "torchrun")
    return ["torchrun", *rendezvous.words(), "--nproc-per-node", str(ranks_per_node), *kind, *rest]
