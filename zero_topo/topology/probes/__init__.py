# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Reads the environment variables of launchers: ``slurm.py`` those of Slurm, ``variables.py`` those
of all others.

A probe is a pure function of an environment mapping. It returns a :class:`LauncherView`, or None if
that launcher did not start the process, and raises ValueError for variables that contradict each
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zero_topo.strict import SHOWN_CHARACTERS, cut
from zero_topo.topology.model import MOST_RANKS


@dataclass(frozen=True)
class LauncherView:
    """Holds what one launcher reports about the job and about this process.

    Attributes:
        source: the launcher, for example "slurm".
        world_size: ranks (for Slurm: tasks) it started.
        rank: this process's rank, or None. Used only for checks: a topology must be equal on every
            rank.
        local_rank: this process's rank on its node, or None; only for checks.
        node: this process's node number, or None; only for checks.
        ranks_per_node: ranks on each node, or None if the launcher does not report it.
        hosts: host name of each node, or None.
        order: tree position of each rank, or None for block order.
        origins: field -> where it was read, for example "slurm: SLURM_NTASKS".
        doubt: a warning that names the choice where variables differ, or None.
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
        """Return the number of nodes, or None if unknown."""
        return None if self.ranks_per_node is None else self.world_size // self.ranks_per_node

    def place(self, rank: int) -> tuple[int, int] | None:
        """Return the node of a rank and its number there, or None if the ranks on each node are
        unknown.
        """
        if self.ranks_per_node is None:
            return None
        return divmod(rank if self.order is None else self.order[rank], self.ranks_per_node)

    def origin(self, name: str) -> str:
        """Return where a field was read, or the launcher's name if the origin is unknown."""
        return self.origins.get(name, self.source)


def read_int(env: Mapping[str, str], name: str, least: int = 0) -> int | None:
    """Read the integer in a variable; None if it is not set or blank.

    Raises:
        ValueError: if it has any other value, or a number below ``least``.
    """
    text = env.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or len(text) > 18 or not least <= int(text) <= MOST_RANKS:
        raise ValueError(
            f"environment variable {name} is {cut(env[name], SHOWN_CHARACTERS)!r}; it must be a "
            "whole number from "
            f"{least} to {MOST_RANKS:,}. The launcher sets it: unset it if it was set by hand"
        )
    return int(text)


def first_int(
    env: Mapping[str, str], names: tuple[str, ...], least: int = 0
) -> tuple[int | None, str]:
    """Read the number in the first variable of ``names`` that is set; return it with its name (""
    if none is).
    """
    for name in names:
        value = read_int(env, name, least)
        if value is not None:
            return value, name
    return None, ""
