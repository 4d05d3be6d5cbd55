# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""What launchers tell the processes they start; each file reads the variables of one launcher.

A probe is a pure function of an environment mapping. It returns a :class:`LauncherView`, or None if that launcher did
not start the process, and raises ValueError for variables that contradict each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zero_topo.strict import MOST_DIGITS, SHOWN_CHARACTERS, cut
from zero_topo.topology.model import MOST_RANKS


@dataclass(frozen=True)
class LauncherView:
    """What one launcher says about the job and about this process.

    Attributes:
        source: the launcher, for example "slurm".
        world_size: ranks (for Slurm: tasks) it started.
        rank: this process's rank, or None. Only ever used for checks: a topology must be equal on every rank.
        local_rank: its number on its node, or None; for checks too.
        node: its node's number, or None; for checks too.
        ranks_per_node: ranks on each node, or None if it does not say.
        hosts: host name of each node, or None.
        order: tree position of each rank, or None for block order.
        origins: field -> where it was read, for example "slurm: SLURM_NTASKS".
        doubt: a sentence on what was chosen where variables say different things, or None.
    """

    source: str
    world_size: int
    rank: int | None = None
    local_rank: int | None = None
    node: int | None = None
    ranks_per_node: int | None = None
    hosts: tuple[str, ...] | None = None
    order: tuple[int, ...] | None = None
    origins: Mapping[str, str] = field(default_factory=dict, hash=False)
    doubt: str | None = None

    @property
    def nodes(self) -> int | None:
        """Number of nodes, or None if unknown."""
        return None if self.ranks_per_node is None else self.world_size // self.ranks_per_node

    def origin(self, name: str) -> str:
        """Where a field was read, or the launcher's name if nothing more is known."""
        return self.origins.get(name, self.source)


def read_int(env: Mapping[str, str], name: str, least: int = 0) -> int | None:
    """The whole number in a variable, or None if it is not set or blank.

    Raises:
        ValueError: if it holds anything else, or a number below ``least``.
    """
    text = env.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or len(text) > MOST_DIGITS or not least <= int(text) <= MOST_RANKS:
        raise ValueError(
            f"environment variable {name} is {cut(env[name], SHOWN_CHARACTERS)!r}; it must be a whole number from "
            f"{least} to {MOST_RANKS:,}. The launcher sets it: unset it if it was set by hand"
        )
    return int(text)


def first_int(env: Mapping[str, str], names: tuple[str, ...], least: int = 0) -> tuple[int | None, str]:
    """The number in the first variable of ``names`` that is set, and that variable's name ("" if none is)."""
    for name in names:
        value = read_int(env, name, least)
        if value is not None:
            return value, name
    return None, ""


@dataclass(frozen=True)
class Variables:
    """The names under which a launcher passes its numbers; of several names the first that is set counts."""

    source: str
    world_size: tuple[str, ...]
    rank: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    ranks_per_node: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


def read_view(env: Mapping[str, str], names: Variables) -> LauncherView | None:
    """Read a launcher that numbers ranks node by node, with equally many on each.

    Returns:
        Its view, or None if it did not set a world size.

    Raises:
        ValueError: if a variable is no number, or the ranks do not spread evenly over the nodes.
    """
    world_size, world_name = first_int(env, names.world_size, least=1)
    if world_size is None:
        return None
    per_node, per_node_name = first_int(env, names.ranks_per_node, least=1)
    rank, rank_name = first_int(env, names.rank)
    local_rank, local_name = first_int(env, names.local_rank)
    node, node_name = first_int(env, names.node)
    nodes, nodes_name = first_int(env, names.nodes, least=1)
    alone = None
    if world_size == 1:  # what else runs on this node, and on which device this process does, is not its job's
        if per_node is not None and per_node > 1:
            alone = f"{world_name} is 1 but {per_node_name} {per_node} on this node: a rank of its own"
        per_node, per_node_name, nodes = 1, per_node_name or world_name, None
        node, local_rank = node and 0, local_rank and 0
    if per_node is not None and (world_size % per_node or (nodes is not None and nodes * per_node != world_size)):
        total = f"{world_size} ranks ({world_name})" + ("" if nodes is None else f" on {nodes} nodes ({nodes_name})")
        here = "this node" if node is None else f"this node, number {node} ({node_name}),"
        raise ValueError(
            f"{names.source}: of {total}, {here} has {per_node} ({per_node_name}): nodes with unequal numbers of ranks "
            "have no regular tree; start equally many ranks on every node"
        )
    read = {
        "world_size": world_name,
        "ranks_per_node": per_node_name,
        "rank": rank_name,
        "local_rank": local_name,
        "node": node_name,
    }
    return LauncherView(
        source=names.source,
        world_size=world_size,
        rank=rank,
        local_rank=local_rank,
        node=node,
        ranks_per_node=per_node,
        origins={key: f"{names.source}: {name}" for key, name in read.items() if name},
        doubt=alone,
    )
