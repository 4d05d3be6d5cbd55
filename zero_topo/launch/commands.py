# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""The command lines of ``mpirun`` and ``deepspeed`` (pure): on this host, or on those of a hostfile."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zero_topo.launch.env import PORT
from zero_topo.launch.machines import LaunchMachine
from zero_topo.launch.slurm import WORKER
from zero_topo.strict import read_text

PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "TORCH_EXTENSIONS_DIR", "DS_ACCELERATOR")
PASSED_ON_PREFIXES = ("NCCL_", "RCCL_", "FI_", "GLOO_", "MIOPEN_", "ZT_")
PYTHONS = ("python", "python3")


@dataclass(frozen=True)
class LocalJob:
    """What to start without a batch system.

    Attributes:
        command: program and arguments of a rank.
        machine: whose variables and cores per rank to use.
        ranks: in all.
        hosts: names in the order of the hostfile; empty for this host.
        hostfile: the file itself, or None.
        port: of the rendezvous on the first host.
        oversubscribe: allow more ranks than cores (mpirun).
        env: this process's environment, part of which mpirun has to be told to pass on to other hosts.
    """

    command: tuple[str, ...]
    machine: LaunchMachine
    ranks: int
    hosts: tuple[str, ...] = ()
    hostfile: Path | None = None
    port: int = PORT
    oversubscribe: bool = False
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse ranks that the hosts cannot share evenly.

        Raises:
            ValueError: naming the numbers.
        """
        if not self.command:
            raise ValueError("no command to start; put it after --, as in: -- python train.py")
        if self.ranks % max(1, len(self.hosts)):
            raise ValueError(
                f"--ranks {self.ranks}: {self.hostfile} names {len(self.hosts)} hosts, which cannot get equally many; "
                f"give a multiple of {len(self.hosts)}"
            )

    @property
    def ranks_per_host(self) -> int:
        """On each."""
        return self.ranks // max(1, len(self.hosts))

    @property
    def master(self) -> str:
        """Host of rank 0."""
        return self.hosts[0] if self.hosts else "127.0.0.1"


def variables(machine: LaunchMachine, env: Mapping[str, str]) -> dict[str, str]:
    """A machine's variables, values expanded, without those that the user has set."""
    wanted = (setting.use.partition("=") for setting in (*machine.variables, *machine.doctors))
    return {name: os.path.expandvars(value) for name, _, value in wanted if name not in env}


def mpirun(job: LocalJob) -> list[str]:
    """OpenMPI's command: ranks node by node, variables with ``-x``."""
    words = ["mpirun", "-n", str(job.ranks)]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        words.append("--allow-run-as-root")
    if job.oversubscribe:
        words.append("--oversubscribe")
    cores = job.machine.cpus_per_rank
    mapping = "slot" if not job.hosts else f"ppr:{job.ranks_per_host}:node"
    if cores > 1:
        words += ["--map-by", f"{mapping}:PE={cores}", "--bind-to", "core"]
    else:
        words += ["--map-by", mapping, "--bind-to", "none"]
    words += ["--rank-by", "slot"]
    if job.hostfile is not None:
        words += ["--hostfile", str(job.hostfile)]
        inherited = [name for name in job.env if name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES)]
        for name in sorted(inherited):
            words += ["-x", name]
    given = {"MASTER_ADDR": job.master, "MASTER_PORT": str(job.port)} | variables(job.machine, job.env)
    for name, value in given.items():
        words += ["-x", f"{name}={value}"]
    return [*words, *WORKER, *job.command]


def deepspeed(job: LocalJob) -> list[str]:
    """DeepSpeed's command, which starts Python itself: ``python`` and ``-m`` before the script become its own."""
    words = ["deepspeed", "--no_local_rank", "--num_accelerators", str(job.ranks_per_host)]
    words += ["--master_port", str(job.port)]
    if job.hostfile is not None:
        words += ["--hostfile", str(job.hostfile), "--num_nodes", str(len(job.hosts)), "--master_addr", job.master]
    kind, rest = program(job.command, "deepspeed")
    return [*words, *kind, *rest]


def program(command: Sequence[str], launcher: str) -> tuple[list[str], list[str]]:
    """A command as a launcher that starts Python itself wants it: its option for a module, and what follows.

    Raises:
        ValueError: if the command is no Python script or module.
    """
    rest = list(command[1:] if command[:1] and command[0] in PYTHONS else command)
    kind, rest = (["--module"], rest[1:]) if rest[:1] == ["-m"] else ([], rest)
    if not rest or rest[0].startswith("-"):
        raise ValueError(
            f"{' '.join(command)}: {launcher} starts a script or module; write -- train.py ... or -- -m package"
        )
    return kind, rest


def read_hosts(path: Path) -> tuple[str, ...]:
    """The hosts of a hostfile: first word of each line, in MPI's and in DeepSpeed's form.

    Raises:
        ValueError: if it cannot be read, names none or one twice.
    """
    try:
        lines = (line.partition("#")[0].split() for line in read_text(path, f"--hostfile {path}").splitlines())
    except OSError as error:
        raise ValueError(f"--hostfile {path}: cannot be read ({error.strerror})") from None
    hosts = tuple(words[0] for words in lines if words)
    if not hosts or len(set(hosts)) < len(hosts):
        raise ValueError(f"--hostfile {path}: names {'a host twice' if hosts else 'no host'}; one line for each host")
    return hosts
