# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""MPI launchers: OpenMPI, MVAPICH, and the PMI family (MPICH, Intel MPI, Cray PALS).

None of them says which node a rank is on unless the rank asks, so node-by-node numbering is assumed (their default
when the number of ranks per node is stated) and every rank checks it against its own local rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from zero_topo.topology.probes import LauncherView, Variables, read_view

FAMILIES = (
    Variables(
        source="openmpi",
        world_size=("OMPI_COMM_WORLD_SIZE",),
        rank=("OMPI_COMM_WORLD_RANK",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        ranks_per_node=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    Variables(
        source="mvapich",
        world_size=("MV2_COMM_WORLD_SIZE",),
        rank=("MV2_COMM_WORLD_RANK",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        ranks_per_node=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Variables(
        source="mpich",
        world_size=("PMI_SIZE",),
        rank=("PMI_RANK", "PALS_RANKID"),
        local_rank=("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        node=("PALS_NODEID",),
        ranks_per_node=("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
)


def probe(env: Mapping[str, str]) -> LauncherView | None:
    """What the MPI launcher says, or None if none of the families set a world size."""
    views = (read_view(env, family) for family in FAMILIES)
    return next((view for view in views if view is not None), None)
