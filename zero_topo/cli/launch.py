# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo launch``: write or submit a Slurm job, or run ``mpirun``, ``torchrun`` or ``deepspeed``, for a machine.

To add a launcher, write the function that makes its text or words in ``zero_topo/launch`` and its command here.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zero_topo.cli.files import Force, check_files
from zero_topo.cli.options import taking
from zero_topo.launch.commands import LocalJob, deepspeed, mpirun, read_hosts, variables
from zero_topo.launch.env import PORT
from zero_topo.launch.machines import LaunchMachine, load_launch_machine
from zero_topo.launch.slurm import HEADER, SlurmJob, script, submit
from zero_topo.launch.torchrun import C10D, KINDS, STANDALONE, of_step, rendezvous, torchrun

launch = typer.Typer(
    help="Start a job: Slurm, mpirun, torchrun or deepspeed.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

Command = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND", help="Program that each rank runs, and its arguments.")
]
MachineName = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE", help="frontier, lumi-g, perlmutter, dgx-a100, dgx-h100, generic, or a machine file."
    ),
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port on which the ranks meet.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the result and stop.")]


@dataclass(frozen=True)
class SlurmOptions:
    """Of ``launch slurm``."""

    command: Command = ()  # type: ignore[assignment]
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1
    machine: MachineName = "generic"
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks per node; default: the machine's.")] = None
    account: Annotated[str | None, typer.Option(help="Slurm account.")] = None
    time: Annotated[str | None, typer.Option(metavar="[H:]MM:SS", help="Time limit.")] = None
    partition: Annotated[str | None, typer.Option(help="Slurm partition; default: the machine's.")] = None
    name: Annotated[str, typer.Option(help="Job name.")] = "zero-topo"
    log: Annotated[str, typer.Option(help="Log file; %x is the job name, %j its number.")] = "%x-%j.out"
    distribution: Annotated[str, typer.Option(metavar="block|cyclic", help="Order of the ranks over the nodes.")] = (
        "block"
    )
    master_port: Port = PORT
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write the script to; default: NAME.sbatch.")
    ] = None
    force: Force = False
    submit: Annotated[bool, typer.Option("--submit", help="Submit the script with sbatch.")] = False
    dry_run: DryRun = False


@launch.command()
@taking(SlurmOptions)
def slurm(options: SlurmOptions) -> None:
    """Write a Slurm batch script, or submit it."""
    if options.submit and options.dry_run:
        raise ValueError("--submit and --dry-run contradict each other; give one of the two")
    machine, ranks = _machine(options)
    job = SlurmJob(
        command=tuple(options.command),
        machine=machine,
        nodes=options.nodes,
        ranks_per_node=ranks,
        name=options.name,
        log=options.log,
        account=options.account,
        time=options.time,
        partition=options.partition,
        distribution=options.distribution,
        port=options.master_port,
    )
    text, path = script(job), options.output or Path(f"{options.name}.sbatch")
    if options.dry_run:
        print(text, end="")
        return
    check_files([(path, "", HEADER)], options.force)
    path.write_text(text, encoding="utf-8")
    if options.submit:
        print(f"job {submit(path)}: {job.ranks} ranks on {job.nodes} nodes of {machine.name} ({path})")
    else:
        told = f"{job.ranks} ranks on {job.nodes} nodes of {machine.name}"
        print(f"{path}: {told}; submit it with: sbatch {shlex.quote(str(path))}")


@dataclass(frozen=True)
class LocalOptions:
    """Of ``launch mpirun`` and ``launch deepspeed``."""

    command: Command = ()  # type: ignore[assignment]
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1
    machine: MachineName = "generic"
    hostfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with one host per line; default: this host.")
    ] = None
    master_port: Port = PORT
    dry_run: DryRun = False


@dataclass(frozen=True)
class MpiOptions(LocalOptions):
    """Of ``launch mpirun``."""

    oversubscribe: Annotated[bool, typer.Option("--oversubscribe", help="Allow more ranks than cores.")] = False


@launch.command(name="mpirun")
@taking(MpiOptions)
def mpirun_command(options: MpiOptions) -> None:
    """Run the ranks with OpenMPI's mpirun."""
    job = _job(options, oversubscribe=options.oversubscribe)
    _execute(mpirun(job), {}, options.dry_run)


@launch.command(name="deepspeed")
@taking(LocalOptions)
def deepspeed_command(options: LocalOptions) -> None:
    """Run the ranks with the deepspeed launcher."""
    job = _job(options)
    _execute(deepspeed(job), variables(job.machine, job.env), options.dry_run)


@dataclass(frozen=True)
class TorchrunOptions:
    """Of ``launch torchrun``."""

    command: Command = ()  # type: ignore[assignment]
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes; default: the Slurm step's, or 1.")] = None
    machine: MachineName = "generic"
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks per node; default: the machine's.")] = None
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="|".join(KINDS), help="How nodes meet; default: standalone on one node, else c10d."),
    ] = None
    host: Annotated[str | None, typer.Option(help="Host of the first node; default: the Slurm step's.")] = None
    master_port: Port = PORT
    node_rank: Annotated[int | None, typer.Option(min=0, help="Number of this node, for static; default: Slurm's.")] = (
        None
    )
    dry_run: DryRun = False


@launch.command(name="torchrun")
@taking(TorchrunOptions)
def torchrun_command(options: TorchrunOptions) -> None:
    """Run this node's ranks with torchrun. Call it on each node, or once with srun --ntasks-per-node=1."""
    (machine, ranks), env = _machine(options), dict(os.environ)
    asked = {"nodes": options.nodes, "host": options.host, "node": options.node_rank}
    told = {"nodes": 1, **of_step(env), **{name: value for name, value in asked.items() if value is not None}}
    kind = options.rendezvous or (STANDALONE if told["nodes"] == 1 else C10D)
    meeting = rendezvous(**told, kind=kind, port=options.master_port)
    _execute(torchrun(tuple(options.command), ranks, meeting), variables(machine, env), options.dry_run)


def _machine(options: SlurmOptions | TorchrunOptions) -> tuple[LaunchMachine, int]:
    """The machine, and ranks of a node."""
    machine = load_launch_machine(options.machine)
    ranks = options.ranks_per_node or machine.ranks_per_node
    if ranks is None:
        raise ValueError(f"--machine {options.machine} does not say how many ranks a node has; give --ranks-per-node")
    return machine, ranks


def _job(options: LocalOptions, oversubscribe: bool = False) -> LocalJob:
    return LocalJob(
        command=tuple(options.command),
        machine=load_launch_machine(options.machine),
        ranks=options.ranks,
        hosts=() if options.hostfile is None else read_hosts(options.hostfile),
        hostfile=options.hostfile,
        port=options.master_port,
        oversubscribe=oversubscribe,
        env=dict(os.environ),
    )


def _execute(words: list[str], added: Mapping[str, str], dry_run: bool) -> None:
    """Print the command, or become it.

    Raises:
        ValueError: if the launcher is not installed.
    """
    if dry_run:
        print(shlex.join([*(f"{name}={value}" for name, value in added.items()), *words]))
        return
    sys.stdout.flush()
    try:
        os.execvpe(words[0], words, {**os.environ, **added})
    except FileNotFoundError:
        raise ValueError(f"{words[0]} is not installed, or not on PATH; --dry-run prints the command") from None
