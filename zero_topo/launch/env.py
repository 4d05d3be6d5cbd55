# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Converts the variables of Slurm, Flux or MPI to those that torch and DeepSpeed read (pure).

The machine is not read from these variables: the ranks find it once they can communicate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PORT = "3442"  # the port of OLCF's examples, outside the kernel's ephemeral range
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SOURCES = {
    "RANK": (
        "OMPI_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_RANK",
        "PALS_RANKID",
        "PMI_RANK",
        "FLUX_TASK_RANK",
        "SLURM_PROCID",
    ),
    "WORLD_SIZE": (
        "OMPI_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_SIZE",
        "PMI_SIZE",
        "FLUX_JOB_SIZE",
        # Of a step, in which tasks run; a batch script has most other variables of a task
        "SLURM_STEP_NUM_TASKS",
    ),
    "LOCAL_RANK": (
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "PALS_LOCAL_RANKID",
        "MPI_LOCALRANKID",
        "FLUX_TASK_LOCAL_ID",
        "SLURM_LOCALID",
    ),
    "LOCAL_WORLD_SIZE": (
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        "PALS_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
}
"""Variable -> those of launchers that have its value, the closest to the process first: mpirun and
flux run inside Slurm jobs, and mpiexec inside others.
"""
NODELISTS = ("SLURM_ARBITRARY_NODELIST", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")


def rank_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of this process, and
    LOCAL_WORLD_SIZE if the launcher reports it.

    A process that torchrun or deepspeed started keeps what it has.

    Args:
        env: environment variables of one rank.

    Raises:
        ValueError: if no launcher started the process, or rank 0's host is not known.
    """
    found = {name: env[name] for name in SOURCES if env.get(name)}
    if not (env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE")) or not found.keys() >= {*NUMBERS}:
        found = {}
        for name, sources in SOURCES.items():
            value = next((env[source] for source in sources if env.get(source)), "")
            if value:
                found[name] = value.partition("(")[0]  # Slurm writes 8(x2)
    if not found.keys() >= {*NUMBERS}:
        raise ValueError(
            "the rank of this process is unknown; start it with srun, flux run or mpirun "
            "(zero-topo launch slurm writes a script)"
        )
    host = env.get("MASTER_ADDR") or first_host(env)
    if found.get("LOCAL_WORLD_SIZE") == found["WORLD_SIZE"]:
        host = env.get("MASTER_ADDR") or "127.0.0.1"
    if host is None:
        raise ValueError(
            "MASTER_ADDR is not set: export the host of rank 0 before the ranks start "
            "(mpirun -x MASTER_ADDR=HOST)"
        )
    return {**found, "MASTER_ADDR": host, "MASTER_PORT": env.get("MASTER_PORT") or PORT}


def first_host(env: Mapping[str, str]) -> str | None:
    """Return the first host of Slurm's step or job, or None outside Slurm.

    The first of ``"rack[1-2]node[01-16,20]"`` is ``"rack1node01"``.
    """
    text = next((env[name] for name in NODELISTS if env.get(name)), None)
    if text is None:
        return None
    match = re.match(r"(?:\[[^\]]*\]|[^\[\],])*", text)
    assert match is not None  # it matches nothing, too
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])
