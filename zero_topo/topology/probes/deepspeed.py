# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The ``deepspeed`` launcher.

Its per-node part (``deepspeed/launcher/launch.py``) sets WORLD_SIZE, RANK, LOCAL_RANK, LOCAL_SIZE and, as CROSS_RANK
and CROSS_SIZE, the node's number and the number of nodes; ranks follow the hostfile node by node. Its MPICH and Intel
MPI runners set WORLD_SIZE and LOCAL_SIZE only, beside the variables of MPI.
"""

from __future__ import annotations

from collections.abc import Mapping

from zero_topo.topology.probes import LauncherView, Variables, read_view

DEEPSPEED = Variables(
    source="deepspeed",
    world_size=("WORLD_SIZE",),
    rank=("RANK",),
    local_rank=("LOCAL_RANK",),
    node=("CROSS_RANK",),
    ranks_per_node=("LOCAL_SIZE",),
    nodes=("CROSS_SIZE",),
)


def probe(env: Mapping[str, str]) -> LauncherView | None:
    """What the deepspeed launcher says, or None if it did not start the process (it always sets LOCAL_SIZE)."""
    return read_view(env, DEEPSPEED) if env.get("LOCAL_SIZE") else None
