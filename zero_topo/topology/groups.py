# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Groups of ranks that each shard one copy of a model: the data-parallel groups of a job with
tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zero_topo.topology.model import Topology


@dataclass(frozen=True)
class Groups:
    """Holds all data-parallel groups of a job, equal on every rank; with experts, their
    expert-data-parallel groups.

    A plan numbers the ranks of a group from 0, in the order of their global ranks. All groups use
    one plan, each with its own order, because ranks may be placed differently.

    Attributes:
        machine: the tree of all ranks.
        members: the global ranks of each group, ascending; together all ranks of the machine.
        name: prefixes the names of domains, to distinguish them from those of another tree; may be
            empty.

    Raises:
        ValueError: if the groups have different trees, so that one plan cannot serve all.
    """

    machine: Topology
    members: tuple[tuple[int, ...], ...]
    name: str = ""

    def __post_init__(self) -> None:
        shapes = {(tree.nodes, tree.gpus_per_node, tree.ranks_per_gpu) for tree in self.trees}
        if len(shapes) > 1:
            first = [list(ranks[:8]) for ranks in self.members[:2]]
            raise ValueError(
                f"the groups of ranks {first} of {self.machine.name} have different trees (nodes, "
                f"GPUs of a node, ranks of a GPU): {sorted(shapes)}; choose a tensor-parallel or "
                "expert-parallel size that divides a node's ranks"
            )

    @property
    def prefix(self) -> str:
        """Prefix of the names of domains."""
        return f"{self.name}_" if self.name else ""

    @cached_property
    def trees(self) -> tuple[Topology, ...]:
        """The tree of each group."""
        return tuple(self.machine.among(ranks) for ranks in self.members)

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Return the global ranks of a global rank's group."""
        return next(ranks for ranks in self.members if rank in ranks)

    def tree(self, rank: int) -> Topology:
        """Return the tree of a global rank's group."""
        return self.trees[self.members.index(self.ranks(rank))]


def groups_from(firsts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return groups from the lowest rank of each rank's group.

    Args:
        firsts: by global rank, the lowest global rank of its group.
    """
    members: dict[int, list[int]] = {}
    for rank, first in enumerate(firsts):
        members.setdefault(first, []).append(rank)
    return tuple(tuple(ranks) for _, ranks in sorted(members.items()))
