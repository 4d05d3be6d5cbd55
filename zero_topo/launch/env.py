# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Converts the variables of Slurm, Flux or MPI to those that torch and DeepSpeed read (pure).

The machine is not read from these variables: the ranks find it once they can communicate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PORT = 3442  # the port of OLCF's examples, outside the kernel's ephemeral range
# Torchrun, the worker and deepspeed set one of them for their ranks
STARTERS = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
)
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
MEETING = ("LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NODELISTS = ("SLURM_ARBITRARY_NODELIST", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")


@dataclass(frozen=True)
class Launcher:
    """Holds the variables of a launcher; of several names the first that is set counts.

    Attributes:
        name: what to call it.
        rank, world_size, local_rank: numbers of a process.
        on_node: ranks on its node, if the launcher sets that.
    """

    name: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    on_node: str = ""


# The closest to the process first: mpirun and flux run inside Slurm jobs, and mpiexec inside
# others. Slurm's own PMI sets PMI_RANK, but no local rank.
LAUNCHERS = (
    Launcher(
        "OpenMPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        ("MV2_COMM_WORLD_SIZE",),
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("MPICH", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("PALS", "PALS_RANKID", ("PMI_SIZE",), "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    Launcher("Flux", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), "FLUX_TASK_LOCAL_ID"),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        "SLURM_LOCALID",
    ),
)


def launcher_of(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started a process with these variables, or None.

    A Slurm batch script has most of a task's variables, but no step, in which tasks run.
    """
    for launcher in LAUNCHERS:
        if not all(env.get(name) for name in (launcher.rank, launcher.local_rank)):
            continue
        if launcher.name != "Slurm" or env.get("SLURM_STEP_NODELIST"):
            return launcher
    return None


def rank_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of this process, and
    LOCAL_WORLD_SIZE if the launcher reports it.

    A process that torchrun or deepspeed started keeps what it has.

    Args:
        env: environment variables of one rank.

    Raises:
        ValueError: if no launcher started the process, or its variables contradict each other.
    """
    if any(env.get(name) for name in STARTERS) and all(env.get(name) for name in NUMBERS):
        return {name: env[name] for name in (*NUMBERS, *MEETING) if env.get(name)}
    launcher = launcher_of(env)
    if launcher is None:
        raise ValueError(_unknown(env))
    stray = next((name for name in ("RANK", "LOCAL_RANK") if env.get(name)), None)
    if stray is not None:
        # Right on the first rank only, which would wait for the others.
        raise ValueError(
            f"{stray} was set before {launcher.name} started the ranks, each of which gets its own "
            f"here; take `export {stray}` out of the script"
        )
    found = {
        "RANK": _number(env, [launcher.rank]),
        "WORLD_SIZE": _number(env, launcher.world_size),
        "LOCAL_RANK": _number(env, [launcher.local_rank]),
    }
    on_node = _on_node(env, launcher)
    if on_node is not None:
        found["LOCAL_WORLD_SIZE"] = on_node
    for name, value in found.items():
        if env.get(name, value) != value:
            raise ValueError(
                f"{name} is {env[name]!r} but {launcher.name} sets {value}; unset it, or start the "
                "job with one launcher"
            )
    one_node = on_node == found["WORLD_SIZE"]
    return found | {"MASTER_ADDR": _master(env, launcher, one_node), "MASTER_PORT": _port(env)}


def _unknown(env: Mapping[str, str]) -> str:
    """Return why a process has no rank, in one line."""
    if env.get("SLURM_JOB_ID"):
        return (
            f"this is the batch script of job {env['SLURM_JOB_ID']}, not one of its tasks; put "
            "srun before the command"
        )
    names = ", ".join(launcher.rank for launcher in LAUNCHERS)
    return (
        f"the rank of this process is unknown: none of {names} is set with the local rank; start "
        "it with srun, flux run or mpirun (`zero-topo launch slurm` writes a script)"
    )


def _number(env: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the number in the first variable that is set."""
    name = next((name for name in names if env.get(name)), "")
    text = env.get(name, "").strip()
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise ValueError(
            f"environment variable {name or ' or '.join(names)} is {text[:40]!r}; it must be a "
            "whole number. The launcher sets it: unset it if it was set by hand"
        )
    return text


def _on_node(env: Mapping[str, str], launcher: Launcher) -> str | None:
    """Return the number of ranks on this node; None if the launcher does not report it."""
    if launcher.name == "Slurm":
        # One number for all nodes, such as 8(x2), or several
        tasks = env.get("SLURM_STEP_TASKS_PER_NODE", "")
        match = re.fullmatch(r"(\d{1,9})(\(x\d{1,9}\))?", tasks, re.ASCII)
        return match[1] if match else None
    if launcher.name == "Flux":
        ranks = int(_number(env, launcher.world_size))
        nodes = int(_number(env, ["FLUX_JOB_NNODES"]))
        return None if ranks % nodes else str(ranks // nodes)
    return _number(env, [launcher.on_node]) if env.get(launcher.on_node) else None


def _master(env: Mapping[str, str], launcher: Launcher, one_node: bool) -> str:
    """Return the host of rank 0."""
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if one_node:
        return "127.0.0.1"
    host = first_host(env)
    if launcher.name != "Slurm" or host is None:
        raise ValueError(
            f"MASTER_ADDR is not set, and {launcher.name} does not set the host of rank 0; export "
            "it before the ranks start (mpirun -x MASTER_ADDR=HOST)"
        )
    return host


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


def _port(env: Mapping[str, str]) -> str:
    port = int(_number(env, ["MASTER_PORT"])) if env.get("MASTER_PORT") else PORT
    if not 0 < port <= 65535:
        raise ValueError(
            f"MASTER_PORT is {port}; a port is from 1 to 65535: choose one that is free on rank "
            "0's host"
        )
    return str(port)
