# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo launch``: write or submit a Slurm job for a machine, or print the machine's variables for a shell."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zero_topo.cli.options import Force, offering, taking
from zero_topo.launch.env import PORT
from zero_topo.launch.machines import LaunchMachine, bash_value, load_launch_machine, machine_names
from zero_topo.launch.slurm import HEADER, SlurmJob, script, submit
from zero_topo.observe.files import check_files
from zero_topo.topology.launchers import launcher_view
from zero_topo.topology.presets import load_machine

launch = typer.Typer(
    help="Start a job: a Slurm script, or a machine's variables for any other launcher.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

Command = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND", help="Program that each rank runs, and its arguments.")
]
MachineName = Annotated[
    str,
    typer.Option(
        autocompletion=offering(machine_names),
        metavar="NAME|FILE",
        help="frontier, lumi-g, perlmutter, dgx-a100, dgx-h100, generic, or a machine file.",
    ),
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port on which the ranks meet.")]


@dataclass(frozen=True)
class SlurmOptions:
    """The options of ``launch slurm``."""

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
    environment: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.tar.gz",
            help="Python environment (conda pack, or tar of a venv) to unpack on each node's disk.",
        ),
    ] = None
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write the script to; default: NAME.sbatch.")
    ] = None
    force: Force = False
    submit: Annotated[bool, typer.Option("--submit", help="Submit the script with sbatch.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script and stop.")] = False


@launch.command()
@taking(SlurmOptions)
def slurm(options: SlurmOptions) -> None:
    """Write a Slurm batch script, or submit it."""
    if options.submit and options.dry_run:
        raise ValueError("--submit and --dry-run contradict each other; give one of the two")
    machine, ranks = _machine(options)
    same = ("nodes", "name", "log", "account", "time", "partition", "distribution", "environment")
    given = {name: getattr(options, name) for name in same}
    job = SlurmJob(tuple(options.command), machine, ranks_per_node=ranks, port=options.master_port, **given)
    if not options.dry_run and machine.preset is not None and load_machine(machine.preset).clusters:
        missing = [f"--{name}" for name in ("account", "time") if getattr(options, name) is None]
        if missing:
            raise ValueError(f"{machine.name} refuses a job without {' and '.join(missing)}; give them")
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


@launch.command()
def env(machine: MachineName = "generic", master_port: Port = PORT) -> None:
    """Print a machine's variables for a shell: eval "$(zero-topo launch env --machine NAME)".

    Variables that are set already are left out. Inside of a Slurm job MASTER_ADDR and MASTER_PORT come with them, for
    torchrun.
    """
    known = load_launch_machine(machine)
    for setting in (*known.variables, *known.doctors):
        if setting.name not in os.environ:
            print(f"# {setting.comment}\nexport {bash_value(setting)}")
    view = launcher_view(os.environ)
    if view is not None and view.hosts and "MASTER_ADDR" not in os.environ:
        print("# The ranks meet on the first node of the job.")
        print(f"export MASTER_ADDR={view.hosts[0]} MASTER_PORT={master_port}")


def _machine(options: SlurmOptions) -> tuple[LaunchMachine, int]:
    """The machine, and ranks of a node."""
    machine = load_launch_machine(options.machine)
    ranks = options.ranks_per_node or machine.ranks_per_node
    if ranks is None:
        raise ValueError(f"--machine {options.machine} has no number of ranks per node; give --ranks-per-node")
    return machine, ranks
