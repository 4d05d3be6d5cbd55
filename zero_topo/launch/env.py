# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Converts the variables of Slurm, Flux or MPI to those that torch and DeepSpeed read (pure).

Contradictions
    If one rank refuses while others continue, the others wait for it. Checks therefore use
    variables that are equal on all ranks where possible. A contradiction that only some ranks can
    detect (their own placement) ends those ranks,
    and the launcher ends the others: mpirun by default, srun by ``--kill-on-bad-exit``.
"""

from __future__ import annotations

from collections.abc import Mapping

from zero_topo.topology.launchers import launcher_view
from zero_topo.topology.probes import LauncherView, read_int, slurm
from zero_topo.topology.probes.variables import MPI, probe

PORT = 3442  # the port of OLCF's examples, outside the kernel's ephemeral range
# Torchrun, the worker and deepspeed set one of them for their ranks
STARTERS = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
)
OPENMPI_MAPPING = "OMPI_MCA_rmaps_base_mapping_policy"


def rank_environment(env: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this process.

    A process that torchrun or deepspeed started keeps what it has.

    Args:
        env: environment variables of one rank.

    Raises:
        ValueError: if no launcher started the process, or its variables contradict each other.
    """
    started = any(env.get(name) for name in STARTERS)
    _check_stray(env, started)
    _check_mapping(env)
    view = launcher_view(env)
    if view is None or view.rank is None:
        raise ValueError(
            "the rank of this process is unknown: neither SLURM_PROCID nor FLUX_TASK_RANK, "
            "OMPI_COMM_WORLD_RANK, PMI_RANK or RANK is set; start it with srun, flux run or mpirun "
            "(`zero-topo launch slurm` writes a script)"
        )
    if view.source == "slurm" and not slurm.in_step(env):
        raise ValueError(
            f"this is the batch script of job {env.get('SLURM_JOB_ID', '?')}, not one of its "
            f"{view.world_size} tasks; put srun before the command"
        )
    found = _numbers(view)
    for name, value in found.items():
        if env.get(name, value) != value:
            raise ValueError(
                f"{name} is {env[name]!r} but the launcher's variables make it {value} "
                f"({view.origin('rank')}); unset {name}, or start the job with one launcher"
            )
    return found | {"MASTER_ADDR": _master(env, view), "MASTER_PORT": _port(env)}


def _numbers(view: LauncherView) -> dict[str, str]:
    """Numbers of this rank, as far as the launchers know them."""
    assert view.rank is not None  # the caller has checked
    place = view.place(view.rank)
    local = place[1] if view.local_rank is None and place else view.local_rank
    if local is None:
        raise ValueError(
            f"rank {view.rank} ({view.origin('rank')}) has no number on its node; set LOCAL_RANK, "
            "or start the ranks with srun, mpirun, torchrun or deepspeed"
        )
    found = {"RANK": view.rank, "WORLD_SIZE": view.world_size, "LOCAL_RANK": local}
    if view.ranks_per_node is not None:
        found["LOCAL_WORLD_SIZE"] = view.ranks_per_node
    return {name: str(value) for name, value in found.items()}


def _check_stray(env: Mapping[str, str], started: bool) -> None:
    """Refuse a RANK or LOCAL_RANK that all tasks have inherited: it is right only on the first one.

    Raises:
        ValueError: naming it.
    """
    view = probe(env, MPI)
    launcher = "Slurm" if slurm.in_step(env) else None
    if launcher is None and view is not None:
        launcher = "Flux" if view.source == "flux" else "MPI"
    stray = [name for name in ("RANK", "LOCAL_RANK") if env.get(name)]
    if launcher is not None and stray and not started:
        raise ValueError(
            f"{stray[0]} was set before {launcher} started the ranks, each of which gets its own "
            f"here; take `export {stray[0]}` out of the script"
        )


def _check_mapping(env: Mapping[str, str]) -> None:
    """Refuse ranks that mpirun assigns to the nodes in turn, because it does not report their
    placement.

    Raises:
        ValueError: on every rank.
    """
    policy = env.get(OPENMPI_MAPPING, "").lower()
    world = read_int(env, "OMPI_COMM_WORLD_SIZE")
    local = read_int(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    if policy.split(":")[0] == "node" and world != local:
        raise ValueError(
            f"mpirun --map-by {policy} deals the {world} ranks to the nodes in turn, so neighbours "
            "do not share a node; use --map-by slot"
        )


def _master(env: Mapping[str, str], view: LauncherView) -> str:
    """Return the host of rank 0."""
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if view.nodes == 1:
        return "127.0.0.1"
    first = view.place(0)
    if view.hosts is None or first is None:
        raise ValueError(
            f"MASTER_ADDR is not set, and {view.source} does not set the host of rank 0; export it "
            "before the ranks start (mpirun -x MASTER_ADDR=HOST)"
        )
    return view.hosts[first[0]]


def _port(env: Mapping[str, str]) -> str:
    port = read_int(env, "MASTER_PORT", least=1)
    if port is not None and port > 65535:
        raise ValueError(
            f"MASTER_PORT is {port}; a port is at most 65535: choose one that is free on rank 0's "
            "host"
        )
    return str(port or PORT)
