# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""Writes the batch script of a Slurm job, and submits it with ``sbatch``.

The script is self-contained: it reads nothing from the environment in which it is submitted except what ``sbatch``
passes on. Each setting follows a comment with its reason and its source.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_topo.launch.env import PORT
from zero_topo.launch.machines import LaunchMachine, Setting, bash_value, without

HEADER = "# Written by zero-topo launch"
BUILD = (
    "# -- Kernels: compiled on this node if they are not in the cache yet, so that ranks, which look there, need not.",
    "python -m zero_topo.cli build || true",
)
WORKER = ("python", "-m", "zero_topo.launch.worker", "--")
DISTRIBUTIONS = {
    "block": "ranks node by node, so that neighbours share a package and then a node",
    "cyclic": "ranks dealt to the nodes in turn; zero_topo reads this and still groups them by node",
}
UNPACK = (
    'mkdir -p "$1" && tar -xf "$1.tar" -C "$1" && rm "$1.tar" && export PATH="$1/bin:$PATH" '
    "&& if command -v conda-unpack >/dev/null; then conda-unpack; fi"
)
"""What each node does with the archive: paths in a conda environment are those of another folder until then."""
WIDTH = 110
_PLAIN = re.compile(r"[\w./:=@%+,-]+")


@dataclass(frozen=True)
class SlurmJob:
    """Describes a batch job: the command, the nodes, the options.

    Attributes:
        command: program and arguments of a rank.
        machine: how ranks are started on this machine.
        nodes: number of nodes.
        ranks_per_node: ranks on each node.
        name: name of the job.
        log: file of its output; Slurm replaces %x by the name and %j by the number of the job.
        account: account to charge, or None for the user's default.
        time: time limit, or None for the partition's.
        partition: partition, or None for the machine's or the cluster's.
        distribution: "block" or "cyclic".
        port: port of the rendezvous on the first node.
        environment: archive of a Python environment that each node unpacks on its own disk, or None.
    """

    command: tuple[str, ...]
    machine: LaunchMachine
    nodes: int
    ranks_per_node: int
    name: str = "zero-topo"
    log: str = "%x-%j.out"
    account: str | None = None
    time: str | None = None
    partition: str | None = None
    distribution: str = "block"
    port: int = PORT
    environment: str | None = None

    def __post_init__(self) -> None:
        """Refuse what would end the script's lines or break them.

        Raises:
            ValueError: naming the option.
        """
        if not self.command:
            raise ValueError("no command to start; put it after --, as in: -- python train.py ...")
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(f"--distribution {self.distribution}: unknown; choose {' or '.join(DISTRIBUTIONS)}")
        if self.machine.ranks_per_node not in (None, self.ranks_per_node):
            raise ValueError(
                f"--ranks-per-node {self.ranks_per_node}: {self.machine.name} has {self.machine.ranks_per_node} on "
                "each node, and its binding is for that many; leave it out, or give --machine FILE.json"
            )
        if self.environment is not None and not self.machine.disk:
            raise ValueError(
                f"--environment {self.environment}: machine {self.machine.name} names no disk of a node; leave it out, "
                'or give --machine FILE.json with a "disk"'
            )
        for option in ("name", "log", "account", "time", "partition", "environment"):
            value = getattr(self, option)
            if value is not None and not _PLAIN.fullmatch(value):
                raise ValueError(f"--{option} {value!r}: use letters, digits and . / : = @ % + - only")

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node


def script(job: SlurmJob) -> str:
    """The batch script, ready for ``sbatch``."""
    machine = job.machine
    lines = [
        "#!/bin/bash",
        f"{HEADER} for {machine.name}: {job.nodes} nodes x {job.ranks_per_node} = {job.ranks} ranks.",
        *_comment(f"{machine.description}. The Python environment active at submission is passed on by sbatch."),
        *_resources(job),
        "",
        "set -eo pipefail",
        *_modules(machine.modules),
        *_environment(job),
        "",
        "# -- Rendezvous: this script runs on the first node of the job, which is that of rank 0.",
        "MASTER_ADDR=$(hostname -i | cut -d' ' -f1)",
        f"MASTER_PORT={job.port}",
        "export MASTER_ADDR MASTER_PORT",
        *_variables("# -- Environment of every rank.", machine.variables),
        *_variables(
            "# -- What `zero-topo doctor` looks for; a comment says why, or what happens without.", machine.doctors
        ),
        "",
        *BUILD,
        "",
        *_step(job),
    ]
    return "\n".join(lines) + "\n"


def submit(path: Path) -> str:
    """Submit a script with ``sbatch`` and return the job's number.

    Raises:
        ValueError: if there is no Slurm here or it refuses the job.
    """
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ValueError(f"sbatch is not installed here; {path} is written: submit it on a login node") from None
    if done.returncode:
        told = done.stderr.strip().splitlines()
        raise ValueError(f"sbatch refuses {path}: {told[-1] if told else f'exit status {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]


def _resources(job: SlurmJob) -> Iterator[str]:
    """The ``#SBATCH`` lines."""
    asked = {"--account": job.account, "--partition": job.partition, "--time": job.time}
    yield f"#SBATCH --job-name={job.name}"
    yield f"#SBATCH --output={job.log}"
    yield from (f"#SBATCH {option}={value}" for option, value in asked.items() if value is not None)
    yield f"#SBATCH --nodes={job.nodes}"
    yield f"#SBATCH --ntasks-per-node={job.ranks_per_node}"
    yield f"#SBATCH --cpus-per-task={job.machine.cpus_per_rank}"
    disk = job.machine.disk_sbatch if job.environment else ()
    for setting in without((*job.machine.sbatch, *disk), asked):
        yield from _comment(f"{setting.comment}:")
        yield f"#SBATCH {setting.use}"


def _modules(modules: Sequence[Setting]) -> Iterator[str]:
    if modules:
        yield from ("", "# -- Software.")
    for setting in modules:
        yield from (*_comment(f"{setting.comment}."), f"module load {setting.use}")


def _environment(job: SlurmJob) -> Iterator[str]:
    """Copy the Python environment to the disk of each node, and use it there."""
    if job.environment is None:
        return
    yield from _variables("# -- The Python environment, unpacked on a disk of each node.", job.machine.disk)
    each = f"srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1"
    yield 'environment="$NODE_DISK/zero-topo-$SLURM_JOB_ID"'
    yield from _comment("A failed copy may leave a part of the file: the job ends then (OLCF documentation).")
    yield f'sbcast --force --preserve {job.environment} "$environment.tar"'
    yield f"{each} bash -c '{UNPACK}' unpack \"$environment\""
    yield 'export PATH="$environment/bin:$PATH"'


def _variables(title: str, settings: Sequence[Setting]) -> Iterator[str]:
    if settings:
        yield from ("", title)
    for setting in settings:
        yield from (*_comment(f"{setting.comment}."), f"export {bash_value(setting)}")


def _step(job: SlurmJob) -> Iterator[str]:
    """The ``srun`` that starts the ranks; an array, because a continued line can hold no comments."""
    yield "# -- Ranks. The worker sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE from Slurm's variables."
    yield "options=("
    inner = [
        Setting(f"--nodes={job.nodes}", "", ""),
        Setting(f"--ntasks={job.ranks}", "", ""),
        Setting(f"--ntasks-per-node={job.ranks_per_node}", "", ""),
        Setting(f"--cpus-per-task={job.machine.cpus_per_rank}", "not passed on by sbatch since 22.05", "Slurm news"),
        Setting(f"--distribution={job.distribution}", DISTRIBUTIONS[job.distribution], "Slurm documentation, srun"),
        Setting("--kill-on-bad-exit=1", "one rank that fails ends the others, which would wait", "Slurm documentation"),
        *job.machine.srun,
    ]
    for setting in inner:
        if setting.reason:
            yield from _comment(f"{setting.comment}.", "  ")
        yield f"  {setting.use}"
    yield ")"
    yield f'srun "${{options[@]}}" {" ".join(WORKER)} \\'
    yield f"  {shlex.join(job.command)}"


def _comment(text: str, indent: str = "") -> list[str]:
    first = text.split()[0]
    text = text[:1].upper() + text[1:] if first.isalpha() else text  # a name such as kdreg2 stays as it is
    start = f"{indent}# "
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=start, break_long_words=False)
