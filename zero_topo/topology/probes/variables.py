# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reads the variables of launchers that number ranks node by node: torchrun, deepspeed, Flux and
those of MPI.

torchrun (torch elastic) calls the workers of one agent, that is of one node, a group. The per-node
part of the ``deepspeed`` launcher (``deepspeed/launcher/launch.py``) sets WORLD_SIZE, RANK,
LOCAL_RANK, LOCAL_SIZE and, as CROSS_RANK and CROSS_SIZE, the node's number and the number of nodes;
ranks follow the hostfile node by node. Its MPICH and Intel MPI runners set WORLD_SIZE and
LOCAL_SIZE only, in addition to the variables of MPI.

Flux sets the number of nodes of the job in place of the tasks on each, and PMI_RANK and PMI_SIZE
for MPI (flux-core, ``flux-environment(7)``). An mpiexec of MPICH inside a Flux task sets
MPI_LOCALRANKID: it then started the ranks.

None of the MPI launchers reports the node of a rank in a variable, so node-by-node numbering is
assumed (their default when the number of ranks per node is stated) and every rank checks it against
its own local rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zero_topo.strict import packaged, read
from zero_topo.topology.probes import LauncherView, first_int


@dataclass(frozen=True)
class Variables:
    """Holds the names of a launcher's variables; of several names the first that is set counts.

    ``always`` is a variable that the launcher sets in every process it starts, if there is one. If
    ``others`` is set too, ``always`` identifies the launcher only together with a node's number:
    under the deepspeed launcher on CPUs, Hugging Face's Accelerate sets LOCAL_WORLD_SIZE to 1. If
    only the number of nodes is set, ranks are spread evenly.
    """

    source: str
    world_size: tuple[str, ...]
    rank: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    ranks_per_node: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    always: str = ""
    others: str = ""

    def started(self, env: Mapping[str, str]) -> bool:
        """Return whether this launcher may have started a process with this environment."""
        foreign = self.others in env and not any(name in env for name in self.node)
        return not self.always or bool(env.get(self.always) and not foreign)


UNEVEN = (
    "nodes with unequal numbers of ranks have no regular tree; start equally many ranks on every "
    "node"
)
_KNOWN = read(
    dict[str, tuple[Variables, ...]],
    "launchers.json",
    packaged(__package__, "launchers.json"),
)
CLOSEST = _KNOWN["closest"]
"""Launchers that start Python directly, and WORLD_SIZE, RANK and LOCAL_RANK set by hand or an
unknown launcher.
"""
MPI = _KNOWN["mpi"]
"""OpenMPI, MVAPICH, Flux, and the PMI family (MPICH, Intel MPI, Cray PALS)."""


def probe(env: Mapping[str, str], launchers: Sequence[Variables]) -> LauncherView | None:
    """Return the view of the first launcher that started the process and set a world size, or
    None.
    """
    views = (read_view(env, names) for names in launchers if names.started(env))
    return next((view for view in views if view is not None), None)


def read_view(env: Mapping[str, str], names: Variables) -> LauncherView | None:
    """Read the variables of a launcher that numbers ranks node by node, with equally many on each.

    Returns:
        Its view, or None if it did not set a world size.

    Raises:
        ValueError: if a variable is not a number, or the ranks are not distributed evenly over the
            nodes.
    """
    name: dict[str, str] = {}

    def number(key: str, least: int = 0) -> int | None:
        value, name[key] = first_int(env, getattr(names, key), least)
        return value

    if (world_size := number("world_size", least=1)) is None:
        return None
    per_node = number("ranks_per_node", least=1)
    nodes = number("nodes", least=1)
    if per_node is None and nodes is not None:
        if world_size % nodes:
            raise ValueError(
                f"{names.source}: {world_size} ranks ({name['world_size']}) on {nodes} nodes "
                f"({name['nodes']}) cannot be spread evenly: {UNEVEN}"
            )
        per_node = world_size // nodes
        name["ranks_per_node"] = f"{name['world_size']} / {name['nodes']}"
    view = LauncherView(
        source=names.source,
        world_size=world_size,
        rank=number("rank"),
        local_rank=number("local_rank"),
        node=number("node"),
        ranks_per_node=per_node,
    )
    if world_size == 1:
        view = _alone(view, name)
    elif per_node is not None and (world_size % per_node or nodes not in (None, view.nodes)):
        spread = "" if nodes is None else f" on {nodes} nodes ({name['nodes']})"
        number_of_it = "" if view.node is None else f", number {view.node} ({name['node']}),"
        raise ValueError(
            f"{names.source}: of {world_size} ranks ({name['world_size']}){spread}, this node"
            f"{number_of_it} has {per_node} ({name['ranks_per_node']}): {UNEVEN}"
        )
    origins = {key: f"{names.source}: {variable}" for key, variable in name.items() if variable}
    return replace(view, origins=origins)


def _alone(view: LauncherView, name: dict[str, str]) -> LauncherView:
    """Return the view of a job of one rank: other processes on its node, and the device of this
    process, are no property of the job.
    """
    doubt = None
    if view.ranks_per_node not in (None, 1):
        doubt = (
            f"{name['world_size']} is 1 but {name['ranks_per_node']} {view.ranks_per_node} on this "
            "node: a rank of its own"
        )
    name["ranks_per_node"] = name["ranks_per_node"] or name["world_size"]
    local_rank = view.local_rank and 0
    return replace(view, ranks_per_node=1, local_rank=local_rank, node=view.node and 0, doubt=doubt)
