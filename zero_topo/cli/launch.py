# Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
"""``zero-topo launch``: print a job's script for Slurm, Flux or PBS, or a machine's variables for a
shell.
"""

from __future__ import annotations

import os

import typer

from zero_topo.cli.options import taking
from zero_topo.launch.batch import FLUX, PBS, SLURM, BatchJob, MachineName, Port, Scheduler, script
from zero_topo.launch.env import PORT
from zero_topo.launch.machines import load_launch_machine
from zero_topo.topology.launchers import launcher_view
from zero_topo.topology.presets import load_machine

launch = typer.Typer(
    help="Print a batch script, or a machine's variables.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


OWN_OPTIONS = {"allow_interspersed_args": False}  # the program's options are its own


@launch.command(context_settings=OWN_OPTIONS)
@taking(BatchJob)
def slurm(options: BatchJob) -> None:
    """Print a Slurm batch script. Read it, then submit it: zero-topo launch slurm ... | sbatch."""
    _print_script(options, SLURM)


@launch.command(context_settings=OWN_OPTIONS)
@taking(BatchJob)
def flux(options: BatchJob) -> None:
    """Print a Flux batch script. Read it, then submit it: zero-topo launch flux ... | flux
    batch.
    """
    _print_script(options, FLUX)


@launch.command(context_settings=OWN_OPTIONS)
@taking(BatchJob)
def pbs(options: BatchJob) -> None:
    """Print a PBS batch script. Read it, then submit it: zero-topo launch pbs ... | qsub."""
    _print_script(options, PBS)


def _print_script(options: BatchJob, scheduler: Scheduler) -> None:
    """Print a job's script.

    Raises:
        ValueError: if an option is missing that the machine's scheduler asks for.
    """
    target = options.target
    asked = ["account", "time"] if target.preset and load_machine(target.preset).clusters else []
    if target.scheduler == PBS.name:
        asked = ["account", "time", "partition"]
    missing = [f"--{name}" for name in asked if getattr(options, name) is None]
    text = script(options, scheduler)
    if missing:
        raise ValueError(f"{target.name} refuses a job without {' and '.join(missing)}; give them")
    print(text, end="")


@launch.command()
def env(machine: MachineName = "generic", master_port: Port = PORT) -> None:
    """Print a machine's variables for a shell. Use: eval "$(zero-topo launch env --machine NAME)".

    Variables that are set already are left out. Inside of a Slurm job MASTER_ADDR and MASTER_PORT
    come with them, for torchrun.
    """
    known = load_launch_machine(machine)
    for setting in (*known.variables, *known.doctors):
        if setting.name not in os.environ:
            print(f"# {setting.comment}\nexport {setting.bash}")
    view = launcher_view(os.environ)
    if view is not None and view.hosts and "MASTER_ADDR" not in os.environ:
        print("# The ranks meet on the first node of the job.")
        print(f"export MASTER_ADDR={view.hosts[0]} MASTER_PORT={master_port}")
