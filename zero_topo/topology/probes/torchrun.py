# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""torchrun (torch elastic), and the plain variables of ``torch.distributed``'s ``env://``."""

from __future__ import annotations

from collections.abc import Mapping

from zero_topo.topology.probes import LauncherView, Variables, read_view

TORCHRUN = Variables(
    source="torchrun",
    world_size=("WORLD_SIZE",),
    rank=("RANK",),
    local_rank=("LOCAL_RANK",),
    node=("GROUP_RANK",),
    ranks_per_node=("LOCAL_WORLD_SIZE",),
    nodes=("GROUP_WORLD_SIZE",),
)
"""A "group" is torch elastic's word for the workers of one agent, that is of one node."""

PLAIN = Variables(source="environment", world_size=("WORLD_SIZE",), rank=("RANK",), local_rank=("LOCAL_RANK",))


def probe(env: Mapping[str, str]) -> LauncherView | None:
    """What torchrun says, or None if it did not start the process (it always sets LOCAL_WORLD_SIZE)."""
    return read_view(env, TORCHRUN) if env.get("LOCAL_WORLD_SIZE") else None


def probe_plain(env: Mapping[str, str]) -> LauncherView | None:
    """WORLD_SIZE, RANK and LOCAL_RANK as set by hand or by an unknown launcher; None without WORLD_SIZE."""
    return read_view(env, PLAIN)
